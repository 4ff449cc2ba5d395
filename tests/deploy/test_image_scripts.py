"""The scripts that run inside the images and while they are built."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

from deploy.check_worker import is_connected
from deploy.requirements import requirements
from tests.tree import ROOT

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
TO_50053 = (
    "   0: 0302A8C0:D2F0 0202A8C0:C385 {state} 00000000:00000000 00:00000000 00000000 10001\n"
)
FROM_50053 = "   1: 0302A8C0:C385 0202A8C0:D2F0 01 00000000:00000000 00:00000000 00000000 10001\n"


def test_a_worker_is_connected_by_an_established_connection_to_the_scheduler_s_port() -> None:
    assert is_connected([HEADER, HEADER + TO_50053.format(state="01")], 50053)
    assert not is_connected([HEADER + TO_50053.format(state="02")], 50053)  # SYN_SENT
    assert not is_connected([HEADER + TO_50053.format(state="01")], 50051)
    assert not is_connected([HEADER + FROM_50053], 50053)
    assert not is_connected([], 50053)


def test_the_scheduler_s_image_asks_for_no_torch_and_the_worker_s_for_no_grpc() -> None:
    for image, foreign in (("scheduler", {"torch", "triton"}), ("worker", {"grpcio", "uvloop"})):
        dockerfile = (ROOT / "deploy" / f"{image}.Dockerfile").read_text()
        call = re.search(r"python requirements\.py ((?:[^>&]|\\\n)*)", dockerfile)
        assert call is not None
        words = call[1].replace("\\\n", " ").split()
        without = words[words.index("--without") + 1 :]
        extras = ["worker"] if "--extra" in words else []
        wanted = requirements(ROOT / "pyproject.toml", extras, without)
        names = {re.split(r"[^a-z0-9-]", line)[0] for line in wanted}
        assert not names & foreign
        assert {"protobuf", "pyzmq", "numpy"} <= names


def test_a_model_file_that_is_right_is_left_alone_and_a_broken_one_is_not(tmp_path: Path) -> None:
    """Without a network: the package's name leads pip nowhere, so only the check can succeed."""
    content = b"a model"
    script = (ROOT / "deploy" / "fetch_model.sh").read_text()
    script = re.sub(r"SHA256=\w+", f"SHA256={hashlib.sha256(content).hexdigest()}", script)
    script = re.sub(r"PACKAGE=\S+", f"PACKAGE={tmp_path / 'no-such.whl'}", script)
    fetch = tmp_path / "fetch.sh"
    fetch.write_text(script)
    model = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"

    model.write_bytes(content)
    assert _run(fetch, tmp_path) == 0
    model.write_bytes(content[:-1])
    assert _run(fetch, tmp_path) != 0
    assert not list(tmp_path.glob(".fetch.*")), "the draft folder is left behind"


def _run(script: Path, target: Path) -> int:
    return subprocess.run(["bash", script, target], capture_output=True, check=False).returncode
