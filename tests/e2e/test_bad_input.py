"""Bad input gives one clear sentence and the right status or exit code; the service goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.cluster import Cluster, free_address, greedy
from tests.tree import ROOT

VOCAB_SIZE = 49_152
CONTEXT_LENGTH = 8192
Request = inference_pb2.GenerateRequest
Sampling = inference_pb2.SamplingParams
INVALID = grpc.StatusCode.INVALID_ARGUMENT

BAD_REQUESTS: dict[str, tuple[Callable[[], Request], grpc.StatusCode]] = {
    "no prompt": (Request, INVALID),
    "empty text": (lambda: Request(text=""), INVALID),
    "empty ids": (lambda: greedy([], 1), INVALID),
    "empty chat": (lambda: Request(chat=inference_pb2.ChatPrompt()), INVALID),
    "id of the vocabulary's size": (lambda: greedy([VOCAB_SIZE], 1), INVALID),
    "largest id": (lambda: greedy([2**32 - 1], 1), INVALID),
    "prompt beyond context": (lambda: greedy([5] * CONTEXT_LENGTH, 1), INVALID),
    "unknown model": (lambda: Request(text="x", model="gpt-9"), grpc.StatusCode.NOT_FOUND),
    "temperature": (lambda: Request(text="x", sampling=Sampling(temperature=-1)), INVALID),
    "NaN": (lambda: Request(text="x", sampling=Sampling(temperature=float("nan"))), INVALID),
    "top_p": (lambda: Request(text="x", sampling=Sampling(top_p=0)), INVALID),
    "min_p": (lambda: Request(text="x", sampling=Sampling(min_p=1.5)), INVALID),
    "top_k": (lambda: Request(text="x", sampling=Sampling(top_k=VOCAB_SIZE + 1)), INVALID),
    "no tokens": (lambda: greedy([1], 0), INVALID),
    "priority": (lambda: Request(text="x", priority=1000), INVALID),
    "long id": (lambda: Request(text="x", request_id="x" * 129), INVALID),
    "stop token id": (
        lambda: Request(
            text="x", stopping=inference_pb2.StoppingParams(stop_token_ids=[VOCAB_SIZE])
        ),
        INVALID,
    ),
    "long stop string": (
        lambda: Request(text="x", stopping=inference_pb2.StoppingParams(stop_strings=["x" * 257])),
        INVALID,
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_gets_a_sentence_and_its_status(plain: Cluster, name: str) -> None:
    """FIELD-FAILURES, part 4: token ids out of range, empty prompts, -1 and NaN."""
    make, status = BAD_REQUESTS[name]
    with pytest.raises(grpc.RpcError) as refused:
        plain.generate(make())
    assert refused.value.code() == status
    sentence = refused.value.details()
    assert 10 < len(sentence) < 300 and "Traceback" not in sentence and "\n" not in sentence


def test_the_service_goes_on_after_bad_requests(plain: Cluster) -> None:
    for make, _status in BAD_REQUESTS.values():
        with pytest.raises(grpc.RpcError):
            plain.generate(make())
    assert len(plain.generate(greedy([1, 2, 3], 4)).token_ids) == 4
    assert plain.is_idle()


@pytest.fixture(scope="session")
def broken_files(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("broken")
    with model_path.open("rb") as whole:
        (folder / "cut.gguf").write_bytes(whole.read(3_000_000))
    (folder / "garbage.gguf").write_bytes(bytes(range(256)) * 64)
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "bare").mkdir()
    return {
        "missing": folder / "nosuch.gguf",
        **{path.stem: path for path in sorted(folder.iterdir())},
    }


def _ends_with_a_sentence(*command: str) -> str:
    """The last line of a command that must fail on its flags or files."""
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 2, output
    assert "Traceback" not in output
    return output.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["missing", "cut", "garbage", "empty", "bare"])
def test_the_scheduler_names_a_bad_model_file(broken_files: dict[str, Path], name: str) -> None:
    """FIELD-FAILURES, part 3: a bad model path: the cause is printed and both sides exit."""
    sentence = _ends_with_a_sentence(
        *("scheduler_svc", "--listen", free_address(), "--admin-listen", free_address()),
        *("--model", str(broken_files[name])),
    )
    assert broken_files[name].name in sentence


def test_serve_passes_on_the_cause_of_a_failed_start(broken_files: dict[str, Path]) -> None:
    sentence = _ends_with_a_sentence(
        *("cli", "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"),
        *("--model", str(broken_files["cut"])),
    )
    assert broken_files["cut"].name in sentence


@pytest.mark.parametrize("name", ["missing", "garbage"])
def test_a_worker_names_a_bad_model_file(broken_files: dict[str, Path], name: str) -> None:
    sentence = _ends_with_a_sentence("worker_svc", "--model", str(broken_files[name]))
    assert broken_files[name].name in sentence


def test_a_port_in_use_is_named(plain: Cluster, model_path: Path) -> None:
    sentence = _ends_with_a_sentence(
        "scheduler_svc",
        *("--model", str(model_path), "--listen", plain.address),
        *("--admin-listen", free_address(), "--worker-endpoint", f"tcp://{free_address()}"),
    )
    assert plain.address in sentence


@pytest.mark.parametrize("process", ["scheduler_svc", "worker_svc", "cli serve"])
def test_an_unknown_flag_is_named(process: str) -> None:
    assert "--no-such-flag" in _ends_with_a_sentence(
        *process.split(), "--model", "x", "--no-such-flag"
    )
