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

from kernels.triton import attention, block_copy, kv_write
from kernels.triton.attention_decode import decode_kernel, merge_kernel
from kernels.triton.attention_prefill import prefill_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SHAPES: tuple[tuple[int, int, int, int, torch.dtype, tuple[int, ...]], ...] = (
    # heads, KV heads, head_dim, block_size, type, capabilities
    (32, 8, 128, 16, BF16, (80, 90)),
    (8, 2, 256, 32, BF16, (80,)),
    (9, 3, 64, 16, FP16, (90,)),
    (9, 3, 64, 16, FP32, (80,)),
)
"""Every type; the widest heads where shared memory is tightest; an odd group."""

_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.int32: "i32", torch.int64: "i64"}


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
    return Compiled(
        kernel=kernel.fn.__name__,
        shape=shape,
        capability=capability,
        cubin_bytes=len(compiled.asm["cubin"]),
        shared_bytes=compiled.metadata.shared,
        has_async_copy="cp.async" in compiled.asm["ptx"],
        has_tensor_core=re.search(r"\bw?g?mma\.", compiled.asm["ptx"]) is not None,
    )


def compile_all(capability: int) -> Iterator[Compiled]:
    """Every kernel and shape for this capability: 80 or 90."""
    for num_heads, num_kv_heads, head_dim, block_size, dtype, capabilities in SHAPES:
        if capability not in capabilities:
            continue
        query = torch.empty(4, num_heads, head_dim, dtype=dtype, device="meta")
        cache_shape = (4, 2, 2, num_kv_heads, block_size, head_dim)
        kv_cache = torch.empty(cache_shape, dtype=dtype, device="meta")
        shape = f"{num_heads}/{num_kv_heads} heads of {head_dim} {_NAMES[dtype]}"
        for kernel, arguments, options in _launches(query, kv_cache):
            yield compile_kernel(kernel, arguments, options, capability, shape)


def _launches(
    query: torch.Tensor, kv_cache: torch.Tensor
) -> Iterator[tuple[Any, list[Any], Mapping[str, Any]]]:
    """(kernel, its arguments in order, its options), as the launchers pass them."""
    keys = kv_cache[:, 0, 0]
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


if __name__ == "__main__":
    for compiled in compile_all(int(sys.argv[1])):
        print(json.dumps(asdict(compiled)), flush=True)
