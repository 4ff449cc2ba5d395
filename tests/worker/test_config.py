"""Flags and environment become one configuration, or one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import ConfigError
from shared.model_files import read_model_spec
from tests.worker.tiny_llama import make_llama, save_safetensors
from worker_svc import memory
from worker_svc.config import GIB, EngineConfig, parse_config

MODEL = ["--model", "m.gguf"]


def test_defaults() -> None:
    config = parse_config(MODEL, {})
    assert config.scheduler_endpoint == "tcp://127.0.0.1:50053"
    assert config.worker_id.endswith(f"-{os.getpid()}")
    assert config.engine.num_threads == len(os.sched_getaffinity(0))
    assert config.engine.max_num_batched_tokens is None


def test_a_flag_wins_over_the_environment() -> None:
    environ = {"QUIRE_MODEL": "e.gguf", "QUIRE_MAX_NUM_SEQS": "8", "QUIRE_KV_MEMORY": "0.5"}
    config = parse_config(["--max-num-seqs", "9"], environ)
    assert config.engine.model_path == Path("e.gguf")
    assert config.engine.max_num_seqs == 9
    assert config.engine.kv_bytes == GIB // 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "no model given"),
        ([*MODEL, "--devise", "cpu"], "--devise"),
        ([*MODEL, "--device", "tpu"], "auto, cpu, cuda"),
        ([*MODEL, "--threads", "0"], "--threads.*at least 1"),
        ([*MODEL, "--threads", "two"], "--threads"),
        ([*MODEL, "--block-size", "12"], "multiple of 8"),
        ([*MODEL, "--kv-memory", "nan"], "GiB"),
        ([*MODEL, "--worker-id", "w" * 65], "64"),
        ([*MODEL, "--backend", "native", "--dtype", "float16"], "native"),
        ([*MODEL, "--backend", "native", "--kv-cache-dtype", "float16"], "bfloat16 or int8"),
        ([*MODEL, "--scheduler-endpoint", "http://x"], "tcp://HOST:PORT"),
        ([*MODEL, "--scheduler-endpoint", "tcp://10.0.0.1:1"], "needs a shared secret"),
        ([*MODEL, "--worker-secret-file", "/nonexistent"], "cannot read the secret"),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        parse_config(flags, {})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nonexistent.gguf"], "no model at /nonexistent.gguf"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_the_process_says_it_and_exits_with_2(flags: list[str], words: str) -> None:
    """FIELD-FAILURES 3: a bad model path: the cause is printed and the process exits."""
    done = subprocess.run(
        [sys.executable, "-m", "worker_svc", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_pool_is_sized_by_memory_and_never_beyond_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_model_spec(save_safetensors(make_llama(), tmp_path))
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 8 * GIB)

    def blocks(**fields: Any) -> int:
        config = EngineConfig(tmp_path, **fields)
        return memory.num_device_blocks(spec, config, cpu, block_bytes=1 << 20)

    assert blocks(num_blocks=7) == 7
    assert blocks(kv_bytes=100 << 20) == 100
    assert blocks() == 2048
    assert blocks(max_num_seqs=1) == 128 // 16
    with pytest.raises(ConfigError, match="holds no block"):
        blocks(kv_bytes=1000)
    host = EngineConfig(tmp_path, host_bytes=0)
    assert memory.num_host_blocks(spec, host, cpu, block_bytes=1 << 20) == 0
    assert memory.num_host_blocks(spec, EngineConfig(tmp_path), cpu, 1 << 20) == 1024


def test_free_memory_is_something() -> None:
    assert memory.free_host_bytes() > 1 << 20


def test_a_containers_cached_files_count_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system takes cached file pages back, as those of weights that were read: they are no
    use of memory. Those of anonymous memory and of shmem are."""
    limit, used, stat = (tmp_path / name for name in ("max", "current", "stat"))
    monkeypatch.setattr(memory, "CGROUP_LIMIT", limit)
    monkeypatch.setattr(memory, "CGROUP_USED", used)
    monkeypatch.setattr(memory, "CGROUP_STAT", stat)
    of_machine = memory.free_host_bytes()
    assert of_machine > 100_000
    limit.write_text("100000\n")
    used.write_text("90000\n")
    stat.write_text("anon 30000\nfile 60000\nshmem 10000\ninactive_file 45000\nactive_file 5000\n")
    assert memory.free_host_bytes() == 100_000 - 90_000 + 45_000 + 5_000
    stat.write_text("anon 90000\ninactive_file 0\nactive_file 0\n")
    assert memory.free_host_bytes() == 10_000
    used.write_text("110000\n")
    assert memory.free_host_bytes() == 0
    limit.write_text("max\n")
    assert memory.free_host_bytes() > 100_000
