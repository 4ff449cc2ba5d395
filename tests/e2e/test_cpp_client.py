"""The client in C++: built from the .proto file, streams, cancels, and tells an error."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.cluster import PATIENCE_S, Cluster, eventually
from tests.tree import ROOT

FOLDER = ROOT / "examples/cpp"
TOOLS = ("make", "g++", "protoc", "grpc_cpp_plugin", "pkg-config")
BUILD_LIMIT_S = 110
CANCELLED, INVALID_ARGUMENT = 1, 3


@pytest.fixture(scope="session")
def client() -> Path:
    """The program; made anew only when its sources have changed."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    libraries = ("pkg-config", "--exists", "grpc++", "protobuf")
    if missing or subprocess.run(libraries, check=False).returncode != 0:
        pytest.skip(f"gRPC for C++ isn't installed ({missing or 'its libraries'}); it is optional")
    made = subprocess.run(
        ["make"], cwd=FOLDER, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
    )
    assert made.returncode == 0, made.stderr
    return FOLDER / "build/client"


def run(client: Path, cluster: Cluster, *arguments: str) -> tuple[str, str]:
    """The text, and the last line."""
    ended = subprocess.run(
        [client, cluster.address, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    text, _, last = ended.stdout.rstrip("\n").rpartition("\n")
    return text, last


def test_it_streams_the_same_tokens_as_python(client: Path, plain: Cluster) -> None:
    prompt = "The capital of France is"
    text, last = run(client, plain, prompt, "12")
    request = inference_pb2.GenerateRequest(
        text=prompt,
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stopping=inference_pb2.StoppingParams(max_tokens=12, ignore_eos=True),
    )
    answer = plain.generate(request)
    ids = ",".join(map(str, answer.token_ids))
    assert (text, last) == (answer.text, f"ids={ids} reason=FINISH_REASON_MAX_TOKENS status=0")


def test_it_cancels_and_the_blocks_are_free(client: Path, plain: Cluster) -> None:
    _, last = run(client, plain, "Once upon a time", "4096", "3")
    assert f"reason=none status={CANCELLED}" in last
    eventually(plain.is_idle, PATIENCE_S, "no sequence and no block is held", plain.tail)


def test_it_tells_what_is_wrong_with_a_request(client: Path, plain: Cluster) -> None:
    _, last = run(client, plain, "Once upon a time", "0")
    assert f"status={INVALID_ARGUMENT} (stopping.max_tokens" in last
