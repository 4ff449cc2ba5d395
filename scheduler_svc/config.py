"""The scheduler's configuration: frozen, composed, resolved once from flags and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core_flags import CORE_FLAGS, core_config
from scheduler_svc.quota_file import read_quotas
from scheduler_svc.quotas import QuotaConfig
from scheduler_svc.security_config import (
    SECURITY_FLAGS,
    SecurityConfig,
    is_local,
    read_security,
)
from shared.endpoint import MAX_PORT, Endpoint
from shared.errors import ConfigError
from shared.flags import (
    Flag,
    Switch,
    non_negative_float,
    one_of,
    parse_flags,
    positive_float,
    positive_int,
)
from shared.logs import LEVELS, LogFormat
from shared.secret_file import read_secret
from shared.transport import MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class WorkerPlaneConfig:
    """The side towards the workers."""

    endpoint: str = "tcp://127.0.0.1:50053"
    """ZeroMQ address that workers connect to, tcp or ipc."""
    secret: bytes | None = None
    """Shared secret of scheduler and workers; demanded beyond loopback and ipc."""
    heartbeat_interval_s: float = 0.5
    """Both sides send one each interval; three missed ones mean death."""
    hang_timeout_s: float = 30.0
    """A worker with a plan in flight and no step begun or ended for so long is lost."""
    load_timeout_s: float = 600.0
    """A worker that is not ready so long after it registered is lost."""
    max_frame_bytes: int = MAX_FRAME_BYTES
    """Larger frames are dropped."""
    max_workers: int = 256
    """Further workers are refused."""


@dataclass(frozen=True, slots=True)
class SchedulerServiceConfig:
    """Everything `python -m scheduler_svc` needs to know."""

    model_path: Path
    model_name: str | None = None
    """What clients call the model; None takes the file's own name."""
    use_generation_config: bool = True
    """Whether a model folder's generation_config.json sets the defaults of sampling."""
    listen: str = "127.0.0.1:50051"
    admin_listen: str = "127.0.0.1:50052"
    max_streams: int = 4096
    """Generate and Attach calls open at once; further ones get RESOURCE_EXHAUSTED."""
    max_detached_tokens: int = 1 << 20
    """Tokens, of prompts and answers, of requests that can be attached to. An event of one token is
    kept in some 70 bytes."""
    record: Path | None = None
    """A new file for all that goes into the core, prompts included; None records nothing."""
    shutdown_grace_s: float = 30.0
    """How long open streams may go on after SIGTERM."""
    log_level: str = "info"
    log_format: LogFormat = "text"
    security: SecurityConfig = field(default_factory=SecurityConfig)
    workers: WorkerPlaneConfig = field(default_factory=WorkerPlaneConfig)
    core: SchedulerConfig = field(default_factory=SchedulerConfig)
    quotas: QuotaConfig | None = None
    """What tenants may have; None bounds none of them."""


_WORKERS = WorkerPlaneConfig()

_SERVER_FLAGS = (
    Flag("--model", Path, None, "GGUF file, or folder with config.json and safetensors"),
    Flag("--model-name", str, None, "the model's name for clients; default: the file's"),
    Switch("--ignore-generation-config", "take no sampling defaults from the model's folder"),
    Flag("--listen", str, "127.0.0.1:50051", "host:port of the gRPC API"),
    Flag("--admin-listen", str, "127.0.0.1:50052", "host:port of the operator's API"),
    Flag("--max-streams", positive_int, 4096, "Generate and Attach calls open at once"),
    Flag("--max-detached-tokens", positive_int, 1 << 20, "tokens of requests that may be detached"),
    Flag("--quota-file", Path, None, "tenants' quotas; a line is TENANT LIMIT=NUMBER ..."),
    Flag(
        "--shutdown-grace-s", non_negative_float, 30.0, "seconds that streams may take at the end"
    ),
    Flag("--record", Path, None, "new file for all that goes into the core, prompts included"),
    Flag("--log-level", one_of(LEVELS), "info", ", ".join(LEVELS)),
    Flag("--log-format", one_of(("text", "json")), "text", "text or json"),
)
_WORKER_FLAGS = (
    Flag("--worker-endpoint", str, _WORKERS.endpoint, "tcp:// or ipc:// address for workers"),
    Flag("--worker-secret-file", Path, None, "file with the secret shared with the workers"),
    Flag("--heartbeat-interval-ms", positive_int, 500, "milliseconds between heartbeats"),
    Flag("--hang-timeout-s", positive_float, _WORKERS.hang_timeout_s, "seconds a step may take"),
    Flag("--load-timeout-s", positive_float, _WORKERS.load_timeout_s, "seconds a worker may load"),
)


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> SchedulerServiceConfig:
    """Resolves the configuration from flags, then environment, then defaults.

    Raises ConfigError with one sentence when a value, a file or their combination is wrong.
    """
    flags = (*_SERVER_FLAGS, *_WORKER_FLAGS, *SECURITY_FLAGS, *CORE_FLAGS)
    args = parse_flags("scheduler_svc", "Quire's scheduler.", flags, argv, environ)
    if args.model is None:
        raise ConfigError("no model given: use --model PATH or QUIRE_MODEL")
    security = read_security(args)
    config = SchedulerServiceConfig(
        model_path=args.model,
        model_name=args.model_name,
        use_generation_config=not args.ignore_generation_config,
        listen=args.listen,
        admin_listen=args.admin_listen,
        max_streams=args.max_streams,
        max_detached_tokens=args.max_detached_tokens,
        shutdown_grace_s=args.shutdown_grace_s,
        log_level=args.log_level,
        log_format=args.log_format,
        record=args.record,
        security=security,
        workers=WorkerPlaneConfig(
            endpoint=args.worker_endpoint,
            secret=args.worker_secret_file and read_secret(args.worker_secret_file),
            heartbeat_interval_s=args.heartbeat_interval_ms / 1000,
            hang_timeout_s=args.hang_timeout_s,
            load_timeout_s=args.load_timeout_s,
        ),
        core=core_config(args, security.tenants),
        quotas=args.quota_file and read_quotas(args.quota_file, security.tenants),
    )
    _check_binds(config, allow_plaintext=args.allow_plaintext)
    return config


def _check_binds(config: SchedulerServiceConfig, *, allow_plaintext: bool) -> None:
    security = config.security
    for flag, address, tokens in (
        ("--listen", config.listen, security.tokens),
        ("--admin-listen", config.admin_listen, security.admin_tokens),
    ):
        port = address.rpartition(":")[2]
        if port.isdecimal() and int(port) > MAX_PORT:  # the library would wrap it
            raise ConfigError(f"{flag} {address}: ports end at {MAX_PORT}")
        if not is_local(address) and not allow_plaintext and not (security.tls_cert and tokens):
            raise ConfigError(
                f"{flag} {address} is open beyond this machine: give --tls-cert, --tls-key, "
                "--token-file and --admin-token-file, or --allow-plaintext if the port is "
                "published to loopback alone"
            )
    try:
        Endpoint.parse(config.workers.endpoint).require_secret(config.workers.secret)
    except ConfigError as error:
        raise ConfigError(f"--worker-endpoint, --worker-secret-file: {error}") from error
