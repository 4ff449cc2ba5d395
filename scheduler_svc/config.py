"""The scheduler's configuration: frozen, composed, resolved once from flags and environment.

Each option is a flag; `--max-num-seqs` may also come as QUIRE_MAX_NUM_SEQS, and the flag wins.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.messages import DEFAULT_TENANT
from scheduler_svc.core.policy import PolicyKind
from shared.endpoint import Endpoint
from shared.errors import ConfigError
from shared.logs import LEVELS, LogFormat
from shared.secret_file import read_secret
from shared.transport import MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class ClientToken:
    """A bearer token, and whose it is."""

    secret: bytes
    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may call the gRPC ports."""

    tls_cert: bytes | None = None
    """PEM certificate chain; None serves plaintext."""
    tls_key: bytes | None = None
    """PEM private key of `tls_cert`."""
    tls_client_ca: bytes | None = None
    """PEM authorities; when set, clients must show a certificate that these signed."""
    tokens: tuple[ClientToken, ...] = ()
    """Bearer tokens, any of which is good; empty asks for none."""


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
    listen: str = "127.0.0.1:50051"
    admin_listen: str = "127.0.0.1:50052"
    max_streams: int = 4096
    """Generate calls open at once; further ones get RESOURCE_EXHAUSTED."""
    record: Path | None = None
    """A new file for all that goes into the core, prompts included; None records nothing."""
    shutdown_grace_s: float = 30.0
    """How long open streams may go on after SIGTERM."""
    log_level: str = "info"
    log_format: LogFormat = "text"
    security: SecurityConfig = field(default_factory=SecurityConfig)
    workers: WorkerPlaneConfig = field(default_factory=WorkerPlaneConfig)
    core: SchedulerConfig = field(default_factory=SchedulerConfig)


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _preemption_mode(text: str) -> PreemptionMode:
    try:
        return PreemptionMode(text)
    except ValueError:
        modes = ", ".join(mode.value for mode in PreemptionMode)
        raise argparse.ArgumentTypeError(f"must be one of {modes}") from None


def _policy(text: str) -> PolicyKind:
    try:
        return PolicyKind(text)
    except ValueError:
        kinds = ", ".join(kind.value for kind in PolicyKind)
        raise argparse.ArgumentTypeError(f"must be one of {kinds}") from None


def _tenant_weights(text: str) -> dict[str, float]:
    """ "a=2,b=0.5" by name."""
    weights = {}
    for item in text.split(","):
        name, separator, weight = item.partition("=")
        if not separator or not TENANT_NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(f"{item!r} is no NAME=WEIGHT")
        weights[name] = _positive_float(weight)
    return weights


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def _non_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or a number above it")
    return value


TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_CORE = SchedulerConfig()
_WORKERS = WorkerPlaneConfig()

_OPTIONS: tuple[tuple[str, Callable[[str], Any], Any, str], ...] = (
    ("--model", Path, None, "GGUF file, or folder with config.json and safetensors"),
    ("--model-name", str, None, "the model's name for clients; default: the file's"),
    ("--listen", str, "127.0.0.1:50051", "host:port of the gRPC API"),
    ("--admin-listen", str, "127.0.0.1:50052", "host:port of the operator's API"),
    ("--worker-endpoint", str, _WORKERS.endpoint, "tcp:// or ipc:// address for workers"),
    ("--worker-secret-file", Path, None, "file with the secret shared with the workers"),
    ("--tls-cert", Path, None, "PEM certificate chain of the gRPC ports"),
    ("--tls-key", Path, None, "PEM private key of --tls-cert"),
    ("--tls-client-ca", Path, None, "PEM authorities that must have signed client certificates"),
    ("--token-file", Path, None, "accepted bearer tokens, one a line: TOKEN or TENANT:TOKEN"),
    ("--max-num-batched-tokens", _positive_int, _CORE.max_num_batched_tokens, "tokens in one step"),
    ("--max-num-seqs", _positive_int, _CORE.max_num_seqs, "sequences in one step"),
    ("--max-waiting", _positive_int, _CORE.max_waiting, "requests that may wait"),
    (
        "--max-waiting-tokens",
        _positive_int,
        _CORE.max_waiting_tokens,
        "prompt tokens that wait",
    ),
    (
        "--preemption",
        _preemption_mode,
        _CORE.preemption_mode.value,
        "recompute, swap (to host memory) or auto (the cheaper), when KV blocks run out",
    ),
    ("--policy", _policy, _CORE.policy.value, "who goes first: fcfs, priority, or fair to tenants"),
    (
        "--tenant-weight",
        _tenant_weights,
        None,
        "under --policy fair: NAME=WEIGHT, several with commas; 1 for a tenant not named",
    ),
    (
        "--target-itl-ms",
        _non_negative_float,
        1000 * (_CORE.target_itl_s or 0),
        "milliseconds between tokens that prompts beside may bring about; 0: no target",
    ),
    ("--record", Path, None, "write what goes into the core, prompts included, to this new file"),
    ("--max-streams", _positive_int, 4096, "Generate calls open at once"),
    ("--heartbeat-interval-ms", _positive_int, 500, "milliseconds between heartbeats"),
    (
        "--hang-timeout-s",
        _positive_float,
        _WORKERS.hang_timeout_s,
        "seconds a step may take",
    ),
    (
        "--load-timeout-s",
        _positive_float,
        _WORKERS.load_timeout_s,
        "seconds a worker may load",
    ),
    (
        "--no-replica-grace-s",
        _non_negative_float,
        _CORE.no_replica_grace_s,
        "seconds to wait for a replica",
    ),
    ("--shutdown-grace-s", _non_negative_float, 30.0, "seconds that streams may take at the end"),
    ("--log-level", str, "info", "debug, info, warning or error"),
    ("--log-format", str, "text", "text or json"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> SchedulerServiceConfig:
    """Resolves the configuration from flags, then environment, then defaults.

    Raises ConfigError with one sentence when a value, a file or their combination is wrong.
    """
    args = _parse_options(argv, environ)
    if args.model is None:
        raise ConfigError("no model given: use --model PATH or QUIRE_MODEL")
    security = _read_security(args)
    config = SchedulerServiceConfig(
        model_path=args.model,
        model_name=args.model_name,
        listen=args.listen,
        admin_listen=args.admin_listen,
        max_streams=args.max_streams,
        shutdown_grace_s=args.shutdown_grace_s,
        log_level=_log_level(args.log_level),
        log_format=_log_format(args.log_format),
        record=args.record,
        security=security,
        workers=WorkerPlaneConfig(
            endpoint=args.worker_endpoint,
            secret=args.worker_secret_file and read_secret(args.worker_secret_file),
            heartbeat_interval_s=args.heartbeat_interval_ms / 1000,
            hang_timeout_s=args.hang_timeout_s,
            load_timeout_s=args.load_timeout_s,
        ),
        core=SchedulerConfig(
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            max_waiting=args.max_waiting,
            max_waiting_tokens=args.max_waiting_tokens,
            no_replica_grace_s=args.no_replica_grace_s,
            preemption_mode=args.preemption,
            policy=args.policy,
            tenant_weights=_checked_weights(args.tenant_weight or {}, security),
            target_itl_s=args.target_itl_ms / 1000 or None,
        ),
    )
    _check_binds(config, allow_plaintext=args.allow_plaintext)
    return config


def _parse_options(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m scheduler_svc",
        description="Quire's scheduler. Each flag may come as QUIRE_<FLAG> in the environment.",
        allow_abbrev=False,
    )
    for flag, kind, default, text in _OPTIONS:
        # argparse converts string defaults by `type`, and reports them by the flag's name.
        value = environ.get(_variable(flag), default)
        shown = "" if default is None else f" [{default}]"
        parser.add_argument(flag, type=kind, default=value, help=text + shown)
    parser.add_argument(
        "--allow-plaintext",
        action="store_true",
        default=environ.get("QUIRE_ALLOW_PLAINTEXT", "").lower() in ("1", "true", "yes"),
        help="gRPC beyond loopback without TLS and tokens, as in a container whose port is "
        "published to loopback alone",
    )
    return parser.parse_args(argv)


def _variable(flag: str) -> str:
    return "QUIRE_" + flag.removeprefix("--").replace("-", "_").upper()


def _log_level(value: str) -> str:
    if value not in LEVELS:
        raise ConfigError(f"--log-level is {value!r}: it must be one of {', '.join(LEVELS)}")
    return value


def _log_format(value: str) -> LogFormat:
    if value not in ("text", "json"):
        raise ConfigError(f"--log-format is {value!r}: it must be text or json")
    return "json" if value == "json" else "text"


def _read_file(flag: str, path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
    if not data.strip():
        raise ConfigError(f"{flag}: {path} is empty")
    return data


def _read_security(args: argparse.Namespace) -> SecurityConfig:
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together: give both or neither")
    if args.tls_client_ca is not None and args.tls_cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
    tokens: tuple[ClientToken, ...] = ()
    if args.token_file is not None:
        lines = _read_file("--token-file", args.token_file).splitlines()
        tokens = tuple(_client_token(line.strip()) for line in lines if line.strip())
    return SecurityConfig(
        tls_cert=args.tls_cert and _read_file("--tls-cert", args.tls_cert),
        tls_key=args.tls_key and _read_file("--tls-key", args.tls_key),
        tls_client_ca=args.tls_client_ca and _read_file("--tls-client-ca", args.tls_client_ca),
        tokens=tokens,
    )


def _client_token(line: bytes) -> ClientToken:
    """TOKEN or TENANT:TOKEN; a colon can't be part of a bearer token (RFC 6750, section 2.1)."""
    name, separator, secret = line.rpartition(b":")
    if not separator:
        return ClientToken(line)
    tenant = name.decode("ascii", errors="replace").strip()
    if not TENANT_NAME.fullmatch(tenant) or not secret.strip():
        raise ConfigError("--token-file: a line with a colon must be TENANT:TOKEN")
    return ClientToken(secret.strip(), tenant)


def _checked_weights(weights: Mapping[str, float], security: SecurityConfig) -> Mapping[str, float]:
    tenants = {DEFAULT_TENANT, *(token.tenant for token in security.tokens)}
    for name in weights:
        if name not in tenants:
            raise ConfigError(f"--tenant-weight: no line of --token-file names {name!r}")
    return weights


def _check_binds(config: SchedulerServiceConfig, *, allow_plaintext: bool) -> None:
    security = config.security
    for flag, address in (("--listen", config.listen), ("--admin-listen", config.admin_listen)):
        open_to_others = not _is_local(address)
        if open_to_others and not allow_plaintext and not (security.tls_cert and security.tokens):
            raise ConfigError(
                f"{flag} {address} is open beyond this machine: give --tls-cert, --tls-key and "
                "--token-file, or --allow-plaintext if the port is published to loopback alone"
            )
    try:
        Endpoint.parse(config.workers.endpoint).require_secret(config.workers.secret)
    except ConfigError as error:
        raise ConfigError(f"--worker-endpoint, --worker-secret-file: {error}") from error


def _is_local(address: str) -> bool:
    """Whether only this machine can reach `address` ("host:port" or "unix:path")."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
