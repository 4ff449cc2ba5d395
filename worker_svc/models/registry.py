"""Which implementation runs a model on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.decoder import Decoder, DecoderWeights
from kernels.dispatch import select_kernels, select_logit_kernels
from shared.errors import ConfigError, ModelLoadError
from shared.model_spec import ModelSpec
from worker_svc.config import EngineConfig
from worker_svc.weights.gguf import load_gguf
from worker_svc.weights.safetensors import load_safetensors

log = logging.getLogger(__name__)

ARCHITECTURES = ("llama",)
NATIVE_DTYPES = ("auto", "float32")
NATIVE_KV_DTYPES = ("auto", "float32", "bfloat16", "int8")
WEIGHT_LOADERS: dict[str, Callable[[ModelSpec], DecoderWeights]] = {
    "gguf": load_gguf,
    "safetensors": load_safetensors,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder, and the type in which its KV cache is kept."""

    decoder: Decoder
    kv_dtype: torch.dtype


def load_model(
    spec: ModelSpec,
    config: EngineConfig,
    device: torch.device,
    max_num_batched_tokens: int,
    progress: Callable[[float], None],
) -> LoadedModel:
    """Read the weights and make the decoder, native on the CPU where that can be.

    Calls `progress` with the loaded fraction, 0 to 1. Sets torch's number of threads. Raises
    ModelLoadError for the model's files, ConfigError for a combination that can't be had.
    """
    if spec.architecture not in ARCHITECTURES:
        raise ModelLoadError(f"{spec.path}: architecture {spec.architecture!r} is not supported")
    if device.type == "cuda" and config.kv_dtype == "int8":
        raise ConfigError("--kv-cache-dtype int8 is for --device cpu; on CUDA take bfloat16")
    # Beside the native decoder's threads, torch's would spin for what little is left to compute.
    torch.set_num_threads(1)
    weights = WEIGHT_LOADERS[spec.file_format](spec)
    if device.type == "cpu" and config.backend != "torch":
        native = _load_native(spec, weights, config, max_num_batched_tokens, progress)
        if native is not None:
            return native
        if config.backend == "native":
            raise ConfigError(
                "--backend native: the native kernels can't do this here, see the log"
            )
    return _load_torch(spec, weights, config, device, progress)


def _load_native(
    spec: ModelSpec,
    weights: DecoderWeights,
    config: EngineConfig,
    max_num_batched_tokens: int,
    progress: Callable[[float], None],
) -> LoadedModel | None:
    """None when the native decoder can't be built, or does not compute in the type asked for.
    ModelLoadError for weights that are not finite."""
    # Building and loading the library is paid for only where it is used.
    from kernels import cpu

    if config.dtype not in NATIVE_DTYPES or config.kv_dtype not in NATIVE_KV_DTYPES:
        return None
    is_exact = config.dtype == "float32"
    kv_dtype = _dtype(config.kv_dtype, torch.float32 if is_exact else torch.bfloat16)
    try:
        decoder = cpu.load_decoder(
            spec,
            weights,
            compute="float32" if is_exact else "auto",
            kv_dtype=kv_dtype,
            num_threads=config.num_threads,
            max_num_tokens=max_num_batched_tokens,
            block_size=config.block_size,
            progress=progress,
        )
    except ValueError as error:
        raise ModelLoadError(f"{spec.path}: {error}") from error
    if decoder is None:
        return None
    log.info("computing with the native kernels, %d threads", config.num_threads)
    return LoadedModel(decoder, kv_dtype)


def _load_torch(
    spec: ModelSpec,
    weights: DecoderWeights,
    config: EngineConfig,
    device: torch.device,
    progress: Callable[[float], None],
) -> LoadedModel:
    # The gguf package, which decodes blocks for it, is imported only where it is used.
    from worker_svc.models.llama import LlamaDecoder

    torch.set_num_threads(config.num_threads)
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = _dtype(config.dtype, default)
    kernels, logit_kernels = select_kernels(device), select_logit_kernels(device)
    decoder = LlamaDecoder(spec, weights, kernels, logit_kernels, dtype, device, progress)
    log.info("computing with torch in %s on %s", dtype, device)
    return LoadedModel(decoder, _dtype(config.kv_dtype, dtype))


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    if name == "auto":
        return default
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
