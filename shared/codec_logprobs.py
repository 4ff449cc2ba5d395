"""Maps log-probabilities to the worker plane's messages and back; see `shared.codec`."""

from __future__ import annotations

from protos.quire.worker.v1 import worker_pb2
from shared.codec_checks import require, require_same_length
from shared.logprobs import NO_LOGPROBS, LogprobRows


def encode_logprobs(rows: LogprobRows) -> worker_pb2.LogprobRows | None:
    """The message of some log-probabilities; None where there are none."""
    if not rows.handles:
        return None
    return worker_pb2.LogprobRows(
        handles=rows.handles,
        num_places=rows.num_places,
        num_tops=rows.num_tops,
        log_probs=rows.log_probs,
        ranks=rows.ranks,
        top_token_ids=rows.top_token_ids,
        top_log_probs=rows.top_log_probs,
    )


def decode_logprobs(message: worker_pb2.LogprobRows) -> LogprobRows:
    """The log-probabilities of a message; ProtocolError when its lists don't fit each other, or
    hold what is no log-probability or no rank."""
    if not message.handles:
        return NO_LOGPROBS
    require_same_length("places of log-probabilities", message.handles, message.num_places)
    require_same_length("numbers of log-probabilities", message.handles, message.num_tops)
    require(0 not in message.num_places, "a sequence has log-probabilities at no place")
    require(len(set(message.handles)) == len(message.handles), "a sequence has them twice")
    require(len(message.log_probs) == sum(message.num_places), "log-probabilities are missing")
    require_same_length("ranks", message.log_probs, message.ranks)
    num_tops = zip(message.num_places, message.num_tops, strict=True)
    require(
        len(message.top_token_ids) == sum(places * tops for places, tops in num_tops),
        "the likeliest tokens don't fit the places",
    )
    require_same_length("likeliest tokens", message.top_token_ids, message.top_log_probs)
    # False for NaN.
    for log_probs in (message.log_probs, message.top_log_probs):
        require(all(value <= 0 for value in log_probs), "a log-probability is above 0")
    require(0 not in message.ranks, "a rank is 0")
    return LogprobRows(
        tuple(message.handles),
        tuple(message.num_places),
        tuple(message.num_tops),
        tuple(message.log_probs),
        tuple(message.ranks),
        tuple(message.top_token_ids),
        tuple(message.top_log_probs),
    )
