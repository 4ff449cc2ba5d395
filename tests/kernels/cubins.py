"""Compiles every Triton kernel as its launcher would, and says what came out, one JSON per line.

Run as `python -m tests.kernels.cubins CAPABILITY`, apart from tests that interpret: a process has
one kind of `triton.jit`. Needs no device; ptxas comes with Triton.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton import attention, block_copy, kv_write, logit_rules, sampling
from kernels.triton.attention_decode import decode_kernel, merge_kernel
from kernels.triton.attention_prefill import prefill_kernel
from kernels.triton.draw import best_kernel, draw_candidates_kernel, draw_kernel
from kernels.triton.gather import gather_kernel
from kernels.triton.parameters import NUM_PARAMETERS

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

SHAPES: tuple[tuple[int, int, int, int, torch.dtype, tuple[int, ...]], ...] = (
    # heads, KV heads, head_dim, block_size, type, capabilities
    (32, 8, 128, 16, BF16, (80, 90)),
    (8, 2, 256, 32, BF16, (80,)),
    (9, 3, 64, 16, FP16, (90,)),
    (9, 3, 64, 16, FP32, (80,)),
)
"""Every type; the widest heads where shared memory is tightest; an odd group."""

VOCAB_SIZES = {80: 49_153, 90: 128_256}
"""Of logits, by capability: an odd one, and Llama 3's, whose rows are aligned."""

_NAMES = {
    **{BF16: "bf16", FP16: "fp16", FP32: "fp32", FP64: "fp64"},
    **{torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"},
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One cubin and what it asks of the device."""

    kernel: str
    shape: str
    capability: int
    cubin_bytes: int
    shared_bytes: int
    has_async_copy: bool
    has_tensor_core: bool
    rounds_each_operation: bool
    """Whether no product in float32 may be fused with a sum."""


def compile_kernel(
    kernel: Any, arguments: list[Any], options: Mapping[str, Any], capability: int, shape: str
) -> Compiled:
    """Compiles for arguments that are tensors, integers or floats; tensors and strides are as
    aligned as torch makes them."""
    names = kernel.arg_names
    constants = {name: value for name, value in options.items() if name in names}
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = arguments[index]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + _NAMES[value.dtype]
            aligned = True
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            aligned = isinstance(value, int) and value % 16 == 0 and value > 0
        if aligned and name not in kernel.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    launch = {name: value for name, value in options.items() if name not in names}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    ptx = compiled.asm["ptx"]
    return Compiled(
        kernel=kernel.fn.__name__,
        shape=shape,
        capability=capability,
        cubin_bytes=len(compiled.asm["cubin"]),
        shared_bytes=compiled.metadata.shared,
        has_async_copy="cp.async" in ptx,
        has_tensor_core=re.search(r"\bw?g?mma\.", ptx) is not None,
        # With a rounding mode in its name, an operation stays as it is.
        rounds_each_operation=re.search(r"\b(mul|add|sub)\.f32\b|\bfma\S*\.f32\b", ptx) is None,
    )


def compile_all(capability: int) -> Iterator[Compiled]:
    """Every kernel and shape for this capability: 80 or 90."""
    for num_heads, num_kv_heads, head_dim, block_size, dtype, capabilities in SHAPES:
        if capability not in capabilities:
            continue
        query = torch.empty(4, num_heads, head_dim, dtype=dtype, device="meta")
        cache_shape = (4, 2, num_kv_heads, 1, 2, block_size, head_dim)
        kv_cache = torch.empty(cache_shape, dtype=dtype, device="meta")
        shape = f"{num_heads}/{num_kv_heads} heads of {head_dim} {_NAMES[dtype]}"
        for kernel, arguments, options in _launches(query, kv_cache):
            yield compile_kernel(kernel, arguments, options, capability, shape)
    logits = torch.empty(4, VOCAB_SIZES[capability], device="meta")
    for kernel, arguments, options in _logit_launches(logits):
        shape = f"vocabulary of {logits.shape[1]}"
        yield compile_kernel(kernel, arguments, options, capability, shape)


def _launches(
    query: torch.Tensor, kv_cache: torch.Tensor
) -> Iterator[tuple[Any, list[Any], Mapping[str, Any]]]:
    """(kernel, its arguments in order, its options), as the launchers pass them."""
    keys = kv_cache[:, 0, :, 0, 0]
    int32 = torch.empty(4, dtype=torch.int32, device="meta")
    int64 = torch.empty(4, dtype=torch.int64, device="meta")
    floats = torch.empty(4, device="meta")
    strides = [*query.stride()[:2], *keys.stride()[:3]]
    inputs = [query, keys, keys, int32, int32, int32]
    yield (
        decode_kernel,
        [*inputs, floats, floats, floats, 3, *strides, 17, 1.0],
        attention.decode_options(query, keys),
    )
    yield (
        merge_kernel,
        [floats, floats, floats, int32, int32, query, 3],
        attention.merge_options(query, keys),
    )
    yield (
        prefill_kernel,
        [*inputs, query, 3, *strides, 17, 1.0],
        attention.prefill_options(query, keys),
    )
    yield (
        kv_write.write_kernel,
        [keys, keys, keys, keys, int64, *query.stride()[:2], *strides],
        kv_write.write_options(kv_cache),
    )
    yield (
        block_copy.copy_kernel,
        [int32, int32, int64, int64, kv_cache[0].numel()],
        {"WORDS": block_copy.WORDS},
    )


def _logit_launches(logits: torch.Tensor) -> Iterator[tuple[Any, list[Any], Mapping[str, Any]]]:
    """The same of the kernels over logits."""
    vocab_size = logits.shape[1]
    floats = torch.empty(4, device="meta")
    int32 = torch.empty(4, dtype=torch.int32, device="meta")
    int64 = torch.empty(4, dtype=torch.int64, device="meta")
    bits = torch.empty(4, -(-vocab_size // 8), dtype=torch.uint8, device="meta")
    parameters = torch.empty(4, NUM_PARAMETERS.value, dtype=FP64, device="meta")
    sizes = [logits.stride(0), vocab_size]
    gathered = [int64, int64, int32, int64]
    options = sampling.draw_options(vocab_size)
    yield best_kernel, [logits, floats, int32, *sizes], options
    yield draw_kernel, [logits, floats, parameters, int32, *sizes], options
    yield gather_kernel, [logits, floats, parameters, *gathered, *sizes], options
    yield draw_candidates_kernel, [parameters, *gathered, int32, vocab_size], options
    for kind in ("penalise", "bias", "exclude"):
        arguments = [logits, int64, floats, 3, logits.stride(0)]
        yield logit_rules.rule_kernel, arguments, logit_rules.rule_options(kind)
    arguments = [logits, int64, bits, bits.shape[1], *sizes]
    yield logit_rules.mask_kernel, arguments, logit_rules.mask_options()


if __name__ == "__main__":
    for compiled in compile_all(int(sys.argv[1])):
        print(json.dumps(asdict(compiled)), flush=True)
