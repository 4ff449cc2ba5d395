"""Which new requests may wait: refused at once are those that can never run, and those beyond a
queue limit."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import NewRequest
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.errors import InvalidArgument, ResourceExhausted, Unavailable


def check_new_request(
    request: NewRequest,
    usable: Collection[Replica],
    waiting: WaitingQueue,
    config: SchedulerConfig,
) -> None:
    """Raises Unavailable without `usable` replicas, InvalidArgument when none of them could hold
    the prompt and one token more, ResourceExhausted when too much waits already."""
    num_prompt, count = len(request.prompt_token_ids), request.num_sequences
    assert num_prompt and count >= 1 and request.max_tokens >= 1, "the front validates requests"
    if not usable:
        raise Unavailable("no worker is ready", config.retry_after_s)
    if not any(replica.can_ever_hold(num_prompt + 1) for replica in usable):
        most = max(replica.kv.num_pool_tokens for replica in usable) - 1
        raise InvalidArgument(
            "prompt", f"it has {num_prompt} tokens; the workers' caches hold at most {most}"
        )
    if len(waiting) + count > config.max_waiting:
        raise ResourceExhausted(
            "max_waiting", f"{len(waiting)} sequences wait already", config.retry_after_s
        )
    if waiting.num_tokens + count * num_prompt > config.max_waiting_tokens:
        raise ResourceExhausted(
            "max_waiting_tokens",
            f"{waiting.num_tokens} prompt tokens wait already",
            config.retry_after_s,
        )
