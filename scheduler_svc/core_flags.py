"""The flags of the scheduler's core."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.messages import DEFAULT_TENANT
from scheduler_svc.core.policy import PolicyKind
from scheduler_svc.security_config import TENANT_NAME
from shared.errors import ConfigError
from shared.flags import Flag, member_of, non_negative_float, one_of, positive_float, positive_int


def _tenant_weights(text: str) -> dict[str, float]:
    """ "a=2,b=0.5" by name."""
    weights = {}
    for item in text.split(","):
        name, separator, weight = item.partition("=")
        if not separator or not TENANT_NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(f"{item!r} is no NAME=WEIGHT")
        weights[name] = positive_float(weight)
    return weights


_CORE = SchedulerConfig()

CORE_FLAGS = (
    Flag(
        "--max-num-batched-tokens", positive_int, _CORE.max_num_batched_tokens, "tokens in one step"
    ),
    Flag("--max-num-seqs", positive_int, _CORE.max_num_seqs, "sequences in one step"),
    Flag("--max-waiting", positive_int, _CORE.max_waiting, "sequences that may wait"),
    Flag("--max-waiting-tokens", positive_int, _CORE.max_waiting_tokens, "prompt tokens that wait"),
    Flag(
        "--no-replica-grace-s",
        non_negative_float,
        _CORE.no_replica_grace_s,
        "seconds to wait for a replica",
    ),
    Flag(
        "--prefix-cache",
        one_of(("on", "off")),
        "on",
        "on or off: whether requests take over what others with the same beginning computed",
    ),
    Flag(
        "--run-ahead",
        one_of(("on", "off")),
        "on",
        "on or off: whether a worker gets its next step while the last one runs",
    ),
    Flag(
        "--preemption",
        member_of(PreemptionMode),
        _CORE.preemption_mode.value,
        "recompute, swap (to host memory) or auto (the cheaper), when KV blocks run out",
    ),
    Flag(
        "--policy",
        member_of(PolicyKind),
        _CORE.policy.value,
        "who goes first: fcfs, priority, or fair to tenants",
    ),
    Flag(
        "--tenant-weight",
        _tenant_weights,
        None,
        "under --policy fair: NAME=WEIGHT, several with commas; 1 for a tenant not named",
    ),
    Flag(
        "--target-itl-ms",
        non_negative_float,
        1000 * (_CORE.target_itl_s or 0),
        "milliseconds between tokens that prompts beside may bring about; 0: no target",
    ),
)


def core_config(args: argparse.Namespace, tenants: Iterable[str]) -> SchedulerConfig:
    """What CORE_FLAGS say; ConfigError for a weight of a tenant that `tenants` doesn't name."""
    weights: dict[str, float] = args.tenant_weight or {}
    for name in weights.keys() - {DEFAULT_TENANT, *tenants}:
        raise ConfigError(f"--tenant-weight: no line of --token-file names {name!r}")
    return SchedulerConfig(
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        max_waiting=args.max_waiting,
        max_waiting_tokens=args.max_waiting_tokens,
        no_replica_grace_s=args.no_replica_grace_s,
        enable_prefix_cache=args.prefix_cache == "on",
        run_ahead=args.run_ahead == "on",
        preemption_mode=args.preemption,
        policy=args.policy,
        tenant_weights=weights,
        target_itl_s=args.target_itl_ms / 1000 or None,
    )
