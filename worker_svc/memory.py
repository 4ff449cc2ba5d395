"""How many KV blocks fit: on the CPU by what the system can give, on CUDA by what is measured."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from shared.errors import ConfigError
from shared.model_spec import ModelSpec
from worker_svc.config import GIB, EngineConfig

CPU_POOL_SHARE = 0.25
"""Of the free memory, for the device pool on the CPU; at most CPU_POOL_BYTES."""
CPU_POOL_BYTES = 2 * GIB
CUDA_POOL_SHARE = 0.9
"""Of the memory that weights and the largest step leave."""
HOST_POOL_SHARE = 0.125
"""Of the free memory, for the host pool; at most HOST_POOL_BYTES."""
HOST_POOL_BYTES = {"cpu": GIB, "cuda": 16 * GIB}
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
CGROUP_STAT = Path("/sys/fs/cgroup/memory.stat")


def num_device_blocks(
    spec: ModelSpec, config: EngineConfig, device: torch.device, block_bytes: int
) -> int:
    """Blocks of the device pool. Call it on CUDA when the weights are there and the largest step
    has run once, so that torch holds what a step needs.

    Raises ConfigError when not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    num_bytes = config.kv_bytes
    if num_bytes is None and device.type == "cuda":
        # A step's temporaries stay reserved by torch, so what is free now is free for good.
        num_bytes = int(torch.cuda.mem_get_info(device)[0] * CUDA_POOL_SHARE)
    elif num_bytes is None:
        num_bytes = min(CPU_POOL_BYTES, int(free_host_bytes() * CPU_POOL_SHARE))
    num_blocks = num_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"a KV cache of {num_bytes / GIB:.3f} GiB holds no block of {block_bytes} bytes: "
            "raise --kv-memory or lower --block-size"
        )
    return min(num_blocks, most_useful_blocks(spec, config))


def num_host_blocks(
    spec: ModelSpec, config: EngineConfig, device: torch.device, block_bytes: int
) -> int:
    """Blocks of the host pool; may be 0."""
    num_bytes = config.host_bytes
    if num_bytes is None:
        limit = HOST_POOL_BYTES[device.type]
        num_bytes = min(limit, int(free_host_bytes() * HOST_POOL_SHARE))
    return min(num_bytes // block_bytes, most_useful_blocks(spec, config))


def most_useful_blocks(spec: ModelSpec, config: EngineConfig) -> int:
    """What the most sequences at full context take."""
    return config.max_num_seqs * -(-spec.context_length // config.block_size)


def free_host_bytes() -> int:
    """Memory that this process may still take: of the machine, or of its container if less."""
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    assert match is not None, "Linux has told MemAvailable since 3.14"
    free = int(match[1]) * 1024
    if CGROUP_LIMIT.exists() and (limit := CGROUP_LIMIT.read_text().strip()) != "max":
        used = int(CGROUP_USED.read_text()) - _cached_file_bytes()
        free = min(free, max(0, int(limit) - used))
    return free


def _cached_file_bytes() -> int:
    """The container's cached file pages, which the system takes back when memory is wanted."""
    found = re.findall(r"^(?:in)?active_file (\d+)$", CGROUP_STAT.read_text(), re.MULTILINE)
    return sum(map(int, found))
