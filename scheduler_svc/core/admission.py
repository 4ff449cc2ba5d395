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
    the prompt and one token more in each beam, ResourceExhausted when too much waits already.

    The queue's limits are for what waits beside others: when nothing waits they let any request
    in, so that none is told for ever to try again.
    """
    num_prompt = len(request.prompt_token_ids)
    count = max(request.num_sequences, request.num_beams)
    assert num_prompt and count >= 1 and request.max_tokens >= 1, "the front validates requests"
    if not usable:
        raise Unavailable("no worker is ready", config.retry_after_s)
    if request.num_beams > max(replica.max_num_seqs for replica in usable):
        most = max(replica.max_num_seqs for replica in usable)
        raise InvalidArgument("beam.width", f"the workers run at most {most} sequences at a time")
    if not any(replica.can_ever_hold(request, num_prompt + 1) for replica in usable):
        most = max(replica.most_computed(request) for replica in usable) - 1
        raise InvalidArgument(
            "prompt", f"it has {num_prompt} tokens; the workers' caches hold at most {most}"
        )
    if not len(waiting):
        return
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
