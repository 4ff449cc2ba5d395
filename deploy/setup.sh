#!/bin/sh
# One-shot service: what must stand in the volumes before the other services start.
set -eu

python -m shared.secret_file "$QUIRE_WORKER_SECRET_FILE"

for source in /opt/model/*.gguf; do
    target=/models/${source##*/}
    if cmp -s "$source" "$target"; then
        echo "$target is there already"
    else
        echo "placing $target"
        cp "$source" "$target.part"
        mv "$target.part" "$target"
    fi
done
