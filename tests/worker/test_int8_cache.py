"""A KV cache in int8: the same tokens through swaps and copies, more blocks, or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.interface import block_of
from shared.errors import ConfigError
from shared.model_files import read_model_spec
from shared.plan import CacheOp, CacheOpKind, SequenceStart, StepPlan
from shared.sampling import SamplingParams
from tests.worker.tiny_llama import CPU, make_llama, save_safetensors
from worker_svc.config import EngineConfig
from worker_svc.engine import Engine, load_engine
from worker_svc.model_runner import ModelRunner
from worker_svc.models.registry import load_model

PROMPT = list(range(3, 23))  # 20 tokens, 3 blocks of 8
GREEDY = SamplingParams(temperature=0.0)
BACKENDS = ("native", "torch")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(make_llama(), tmp_path_factory.mktemp("llama"))


def load(path: Path, backend: str, kv_dtype: str = "int8") -> Engine:
    config = EngineConfig(
        path,
        dtype="float32",
        kv_dtype=kv_dtype,
        backend=backend,
        block_size=8,
        kv_bytes=1 << 20,
        host_bytes=1 << 16,
        max_num_seqs=64,
    )
    return load_engine(read_model_spec(path), config, CPU, lambda fraction: None)


def start(table: list[int], tokens: list[int], computed: int = 0) -> SequenceStart:
    return SequenceStart(0, tokens, len(PROMPT), computed, table, GREEDY)


def prefill(table: list[int]) -> StepPlan:
    return StepPlan(
        step=1,
        base_step=0,
        reset=True,
        starts=[start(table, PROMPT)],
        chunk_handles=[0],
        chunk_num_tokens=[len(PROMPT)],
        chunk_samples=[True],
    )


def decode(runner: ModelRunner, count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        step = runner.state.step + 1
        plan = StepPlan(step=step, base_step=step - 1, decode_handles=[0])
        tokens += runner.execute(plan).token_ids
    return tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_swapped_out_and_in_again_goes_on(path: Path, backend: str) -> None:
    runner = load(path, backend).runner
    assert runner.cache.device_blocks.dtype == torch.int8
    wanted = [*runner.execute(prefill([0, 1, 2, 3])).token_ids, *decode(runner, 7)]
    tokens = [*runner.execute(prefill([0, 1, 2, 3])).token_ids, *decode(runner, 2)]
    out = CacheOp(1, CacheOpKind.SWAP_OUT, [0, 1, 2], [4, 3, 5])
    runner.execute(StepPlan(step=4, base_step=3, finished_handles=[0], cache_ops=[out]))
    for block in range(4):
        block_of(runner.cache.device_blocks, block)[:] = -1
    back = CacheOp(2, CacheOpKind.SWAP_IN, [4, 3, 5], [20, 21, 22])
    again = CacheOp(3, CacheOpKind.COPY, [22], [23])
    resumed = start([20, 21, 23, 24], [*PROMPT, *tokens], computed=22)
    plan = StepPlan(
        step=5, base_step=4, starts=[resumed], cache_ops=[back, again], decode_handles=[0]
    )
    tokens += runner.execute(plan).token_ids
    assert [*tokens, *decode(runner, 4)] == wanted


def test_native_and_torch_compute_the_same(path: Path) -> None:
    tokens = []
    for backend in BACKENDS:
        runner = load(path, backend).runner
        tokens.append([*runner.execute(prefill([5, 2, 7, 0])).token_ids, *decode(runner, 7)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_memory_holds_more_blocks(path: Path, backend: str) -> None:
    small, large = (load(path, backend, kv_dtype).capacity for kv_dtype in ("int8", "float32"))
    per_row = 16 + 4  # head_dim quants and a scale
    assert small.block_bytes == 2 * 2 * 2 * 8 * per_row
    assert large.block_bytes == 2 * 2 * 2 * 8 * 16 * 4
    assert small.num_device_blocks == (1 << 20) // small.block_bytes
    assert small.num_host_blocks == (1 << 16) // small.block_bytes
    assert large.num_device_blocks == (1 << 20) // large.block_bytes


def test_cuda_refuses_it_before_it_reads_weights(path: Path) -> None:
    config = EngineConfig(path, kv_dtype="int8")
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is for --device cpu"):
        load_model(read_model_spec(path), config, torch.device("cuda"), 64, lambda fraction: None)
