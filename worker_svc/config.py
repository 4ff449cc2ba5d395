"""The worker's configuration: frozen, composed, resolved once from flags and environment."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.endpoint import Endpoint
from shared.errors import ConfigError
from shared.flags import Flag, Switch, one_of, parse_flags, positive_int
from shared.logs import LEVELS, LogFormat
from shared.secret_file import read_secret
from worker_svc.cpus import parse_cpus

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8")
BACKENDS = ("auto", "native", "torch")
MAX_WORKER_ID_BYTES = 64
MAX_BLOCK_SIZE = 4096
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the model is loaded and how much one step may hold; None is chosen by the device."""

    model_path: Path
    device: str = "auto"
    """One of DEVICES; auto takes CUDA where there is one."""
    dtype: str = "auto"
    """One of DTYPES: of the arithmetic. auto: on the CPU the file's own quantised blocks, by the
    native kernels, else float32; on CUDA bfloat16."""
    kv_dtype: str = "auto"
    """One of KV_DTYPES: of the KV cache. auto follows the arithmetic, and is bfloat16 beside
    quantised weights. int8, on the CPU alone, has a scale for each position and KV head."""
    backend: str = "auto"
    """One of BACKENDS, on the CPU: own native kernels or torch; auto prefers native."""
    block_size: int = 16
    """Token slots in a KV block: a multiple of 8."""
    num_blocks: int | None = None
    """Blocks of the device pool; None sizes it by `kv_bytes`."""
    kv_bytes: int | None = None
    """Memory of the device pool; None takes a part of what is free."""
    host_bytes: int | None = None
    """Memory of the host pool, for swapped sequences; None takes a part of what is free."""
    max_num_batched_tokens: int | None = None
    """Tokens in one step; None: 512 on the CPU, 8192 on CUDA."""
    max_num_seqs: int = 256
    """Sequences in one step."""
    num_threads: int = 1
    """Threads that compute, on the CPU."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything `python -m worker_svc` needs to know."""

    engine: EngineConfig
    worker_id: str
    """Unique among workers, stable over restarts; at most 64 bytes."""
    scheduler_endpoint: str = "tcp://127.0.0.1:50053"
    secret: bytes | None = None
    """Shared with the scheduler; demanded beyond loopback and ipc."""
    cpus: frozenset[int] | None = None
    """Cores that the process keeps to; None: those that it was given."""
    exit_with_parent: bool = False
    """Whether the process ends when the one that started it does."""
    log_level: str = "info"
    log_format: LogFormat = "text"


def _gib(text: str) -> int:
    value = float(text)
    if not 0 <= value < 1 << 20:
        raise argparse.ArgumentTypeError("must be a number of GiB, 0 or above")
    return round(value * GIB)


def _block_size(text: str) -> int:
    value = positive_int(text)
    if value % 8 or value > MAX_BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"must be a multiple of 8, at most {MAX_BLOCK_SIZE}")
    return value


def _worker_id(text: str) -> str:
    if not text or len(text.encode()) > MAX_WORKER_ID_BYTES or not text.isprintable():
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_WORKER_ID_BYTES} printable bytes")
    return text


_FLAGS = (
    Flag("--model", Path, None, "GGUF file, or folder with config.json and safetensors"),
    Flag("--scheduler-endpoint", str, "tcp://127.0.0.1:50053", "the scheduler's tcp:// or ipc://"),
    Flag("--worker-secret-file", Path, None, "file with the secret shared with the scheduler"),
    Flag("--worker-id", _worker_id, None, "unique name; default: host and process id"),
    Flag("--device", one_of(DEVICES), "auto", ", ".join(DEVICES)),
    Flag("--dtype", one_of(DTYPES), "auto", "arithmetic: " + ", ".join(DTYPES)),
    Flag("--kv-cache-dtype", one_of(KV_DTYPES), "auto", "KV cache: " + ", ".join(KV_DTYPES)),
    Flag("--backend", one_of(BACKENDS), "auto", "on the CPU: " + ", ".join(BACKENDS)),
    Flag("--block-size", _block_size, 16, "token slots in a KV block"),
    Flag("--num-blocks", positive_int, None, "KV blocks on the device, instead of --kv-memory"),
    Flag("--kv-memory", _gib, None, "GiB of KV cache on the device; default: by free memory"),
    Flag("--host-memory", _gib, None, "GiB of host memory for swapped sequences; default: by free"),
    Flag(
        "--max-num-batched-tokens",
        positive_int,
        None,
        "tokens in one step; default: 512 on the CPU, 8192 on CUDA",
    ),
    Flag("--max-num-seqs", positive_int, 256, "sequences in one step"),
    Flag("--cpus", parse_cpus, None, 'cores to keep to, like "0-3,8"; default: those it was given'),
    Flag("--threads", positive_int, None, "computing threads; default: the cores it may use"),
    Flag("--log-level", one_of(LEVELS), "info", ", ".join(LEVELS)),
    Flag("--log-format", one_of(("text", "json")), "text", "text or json"),
    Switch("--exit-with-parent", "end when the process that started this one ends"),
)


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> WorkerConfig:
    """Resolve the configuration from flags, then environment, then defaults.

    Raises ConfigError with one sentence when a value, a file or their combination is wrong.
    """
    args = parse_flags("worker_svc", "Quire's worker.", _FLAGS, argv, environ)
    if args.model is None:
        raise ConfigError("no model given: use --model PATH or QUIRE_MODEL")
    if args.backend == "native" and args.dtype in ("bfloat16", "float16"):
        raise ConfigError(f"--backend native computes in auto or float32, not in {args.dtype}")
    if args.backend == "native" and args.kv_cache_dtype == "float16":
        raise ConfigError("--backend native keeps the KV cache in float32, bfloat16 or int8")
    secret = args.worker_secret_file and read_secret(args.worker_secret_file)
    try:
        Endpoint.parse(args.scheduler_endpoint).require_secret(secret)
    except ConfigError as error:
        raise ConfigError(f"--scheduler-endpoint, --worker-secret-file: {error}") from error
    return WorkerConfig(
        engine=EngineConfig(
            model_path=args.model,
            device=args.device,
            dtype=args.dtype,
            kv_dtype=args.kv_cache_dtype,
            backend=args.backend,
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            kv_bytes=args.kv_memory,
            host_bytes=args.host_memory,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            num_threads=args.threads or len(args.cpus or os.sched_getaffinity(0)),
        ),
        worker_id=args.worker_id or f"{socket.gethostname()[:48]}-{os.getpid()}",
        scheduler_endpoint=args.scheduler_endpoint,
        secret=secret,
        cpus=args.cpus,
        exit_with_parent=args.exit_with_parent,
        log_level=args.log_level,
        log_format=args.log_format,
    )
