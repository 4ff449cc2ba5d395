"""Measures the rates by which the scheduler weighs recomputing against swapping."""

from __future__ import annotations

import time

import torch

from kernels.interface import block_of
from shared.plan import CacheOp, CacheOpKind, SequenceStart, StepPlan
from shared.sampling import SamplingParams
from worker_svc.kv_cache import KvCache
from worker_svc.model_runner import ModelRunner

PREFILL_TOKENS = {"cpu": 64, "cuda": 128}
"""By device: on the CPU, as fast as twice as many within some percent."""
WARM_UP_TOKENS = 16
NUM_TRIALS = 2
MAX_COPIED_BLOCKS = 16
COPY_BYTES_PER_S = 1e9
"""Told when there is no host pool, so that nothing is ever copied."""


def prefill_rate(runner: ModelRunner, num_tokens: int) -> float:
    """Prompt tokens per second of one chunk of `num_tokens`: the better of NUM_TRIALS, after a
    short one to warm up, for others may use the machine at the same time.

    Runs plans on the runner's state, and forgets them.
    """
    runner.execute(_prefill_plan(min(WARM_UP_TOKENS, num_tokens), runner.state.block_size))
    plan = _prefill_plan(num_tokens, runner.state.block_size)
    seconds = min(runner.execute(plan).execute_s for _ in range(NUM_TRIALS))
    runner.state.reset()
    return num_tokens / seconds


def _prefill_plan(num_tokens: int, block_size: int) -> StepPlan:
    """One sequence of arbitrary tokens, from scratch."""
    start = SequenceStart(
        handle=0,
        token_ids=[token % 7 for token in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_table=range(-(-num_tokens // block_size)),
        sampling=SamplingParams(temperature=0.0),
    )
    return StepPlan(
        step=1,
        base_step=0,
        reset=True,
        starts=[start],
        chunk_handles=[0],
        chunk_num_tokens=[num_tokens],
        chunk_samples=[True],
    )


def copy_rate(cache: KvCache) -> float:
    """Bytes per second from device to host pool: the best of a first copy, which maps the memory,
    and NUM_TRIALS more."""
    num_blocks = min(cache.num_device_blocks, cache.num_host_blocks, MAX_COPIED_BLOCKS)
    if not num_blocks:
        return COPY_BYTES_PER_S
    blocks = range(num_blocks)
    op = CacheOp(0, CacheOpKind.SWAP_OUT, blocks, blocks)
    seconds = float("inf")
    for _ in range(1 + NUM_TRIALS):
        _finish_queued(cache.device_blocks.device)
        started_s = time.perf_counter()
        cache.run([op])
        _finish_queued(cache.device_blocks.device)
        seconds = min(seconds, time.perf_counter() - started_s)
    return num_blocks * block_of(cache.host_blocks, 0).nbytes / seconds


def _finish_queued(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
