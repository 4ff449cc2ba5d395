"""From a model's path to a runner that is ready for plans, with the capacity that was measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.dispatch import select_kernels, select_logit_kernels
from shared.errors import ConfigError
from shared.model_spec import ModelSpec
from worker_svc import memory
from worker_svc.config import GIB, EngineConfig
from worker_svc.kv_cache import KvCache, block_bytes
from worker_svc.measure import PREFILL_TOKENS, copy_rate, prefill_rate
from worker_svc.model_runner import ModelRunner
from worker_svc.models.registry import LoadedModel, load_model
from worker_svc.request_state import RequestState
from worker_svc.warm_up import warm_up

log = logging.getLogger(__name__)

MAX_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the worker tells the scheduler when it is ready."""

    num_device_blocks: int
    num_host_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_bytes: int
    copy_bytes_per_s: float
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model with its cache."""

    runner: ModelRunner
    capacity: Capacity


def resolve_device(name: str) -> torch.device:
    """The device of `--device`. Raises ConfigError for CUDA where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    return torch.device(name)


def load_engine(
    spec: ModelSpec,
    config: EngineConfig,
    device: torch.device,
    progress: Callable[[float], None],
) -> Engine:
    """Load the model, size the cache, measure the rates.

    Raises ModelLoadError and ConfigError with a sentence for the operator.
    """
    max_tokens = config.max_num_batched_tokens or MAX_BATCHED_TOKENS[device.type]
    model = load_model(spec, config, device, max_tokens, progress)
    bytes_per_block = block_bytes(spec, config.block_size, model.kv_dtype)
    if device.type == "cuda" and config.num_blocks is None:
        _reserve_step_memory(spec, config, model, device, max_tokens)
    num_blocks = memory.num_device_blocks(spec, config, device, bytes_per_block)
    runner = _make_runner(
        spec,
        config,
        model,
        device,
        max_tokens,
        num_device_blocks=num_blocks,
        num_host_blocks=memory.num_host_blocks(spec, config, device, bytes_per_block),
    )
    warm_up(select_logit_kernels(device), spec.vocab_size, device)
    most_tokens = min(max_tokens, spec.context_length, num_blocks * config.block_size)
    sample_tokens = min(PREFILL_TOKENS[device.type], most_tokens)
    capacity = Capacity(
        num_device_blocks=num_blocks,
        num_host_blocks=runner.cache.num_host_blocks,
        block_size=config.block_size,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=config.max_num_seqs,
        block_bytes=bytes_per_block,
        copy_bytes_per_s=copy_rate(runner.cache),
        prefill_tokens_per_s=prefill_rate(runner, sample_tokens),
    )
    log.info(
        "%s: %d KV blocks of %d tokens (%.2f GiB), %d on the host; prefill %.0f tokens/s",
        spec.name,
        num_blocks,
        config.block_size,
        num_blocks * bytes_per_block / GIB,
        capacity.num_host_blocks,
        capacity.prefill_tokens_per_s,
    )
    return Engine(runner, capacity)


def _make_runner(
    spec: ModelSpec,
    config: EngineConfig,
    model: LoadedModel,
    device: torch.device,
    max_tokens: int,
    *,
    num_device_blocks: int,
    num_host_blocks: int,
) -> ModelRunner:
    cache = KvCache(
        spec,
        block_size=config.block_size,
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        dtype=model.kv_dtype,
        device=device,
        kernels=select_kernels(device),
    )
    state = RequestState(
        num_rows=config.max_num_seqs,
        context_length=spec.context_length,
        block_size=config.block_size,
        num_blocks=num_device_blocks,
        vocab_size=spec.vocab_size,
    )
    return ModelRunner(
        model.decoder,
        cache,
        state,
        select_logit_kernels(device),
        device=device,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=config.max_num_seqs,
    )


def _reserve_step_memory(
    spec: ModelSpec,
    config: EngineConfig,
    model: LoadedModel,
    device: torch.device,
    max_tokens: int,
) -> None:
    """Run the largest step once over a small cache, so that torch reserves what it takes."""
    num_tokens = min(max_tokens, spec.context_length)
    num_blocks = -(-num_tokens // config.block_size)
    runner = _make_runner(
        spec,
        config,
        model,
        device,
        max_tokens,
        num_device_blocks=num_blocks,
        num_host_blocks=0,
    )
    prefill_rate(runner, num_tokens)
