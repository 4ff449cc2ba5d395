"""From traces to figures: throughput, time to first token, inter-token latency, scheduler share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from bench.load import Trace
from protos.quire.admin.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values_s: Iterable[float]) -> Spread | None:
        """None when there is no value."""
        values = sorted(1000.0 * value for value in values_s)
        if not values:
            return None
        mean = math.fsum(values) / len(values)
        return cls(mean, percentile(values, 50), percentile(values, 99), values[-1])


@dataclass(frozen=True, slots=True)
class SchedulerShare:
    """Where a step's time goes: means over the last thousand steps of each replica, by steps."""

    schedule_ms: float
    """In the scheduler: planning, and applying the result."""
    execute_ms: float
    """In the worker."""
    share: float
    """schedule_ms / (schedule_ms + execute_ms)."""

    @classmethod
    def of_state(cls, state: admin_pb2.GetEngineStateResponse) -> SchedulerShare | None:
        """None before the first step."""
        steps = sum(replica.num_steps for replica in state.replicas)
        if steps == 0:
            return None
        schedule_s = sum(replica.schedule_s * replica.num_steps for replica in state.replicas)
        execute_s = sum(replica.execute_s * replica.num_steps for replica in state.replicas)
        return cls(
            1000.0 * schedule_s / steps,
            1000.0 * execute_s / steps,
            schedule_s / (schedule_s + execute_s) if schedule_s else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run."""

    num_requests: int
    num_failed: int
    wall_s: float
    requests_s: float
    output_tok_s: float
    prompt_tok_s: float
    """Prompt tokens a second, cached ones among them."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_ms: Spread | None
    itl_ms: Spread | None
    request_ms: Spread | None
    scheduler: SchedulerShare | None
    first_error: str | None

    @classmethod
    def of_traces(
        cls,
        traces: Sequence[Trace],
        wall_s: float,
        state: admin_pb2.GetEngineStateResponse | None = None,
    ) -> Report:
        """Figures over the requests that succeeded, in `wall_s` seconds. `state` is the engine's
        after the run, if the admin port could be asked."""
        good = [trace for trace in traces if trace.error is None]
        failed = [trace.error for trace in traces if trace.error is not None]
        prompt_tokens = sum(trace.num_prompt_tokens for trace in good)
        output_tokens = sum(trace.num_output_tokens for trace in good)
        return cls(
            num_requests=len(traces),
            num_failed=len(failed),
            wall_s=wall_s,
            requests_s=len(good) / wall_s,
            output_tok_s=output_tokens / wall_s,
            prompt_tok_s=prompt_tokens / wall_s,
            num_prompt_tokens=prompt_tokens,
            num_cached_tokens=sum(trace.num_cached_tokens for trace in good),
            num_output_tokens=output_tokens,
            ttft_ms=Spread.of_seconds(trace.first_token_s for trace in good if trace.message_s),
            itl_ms=Spread.of_seconds(gap for trace in good for gap in trace.inter_token_s()),
            request_ms=Spread.of_seconds(trace.end_s - trace.due_s for trace in good),
            scheduler=SchedulerShare.of_state(state) if state is not None else None,
            first_error=failed[0] if failed else None,
        )

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the ordered, non-empty values do not exceed."""
    rank = math.ceil(percent / 100.0 * len(ordered))
    return ordered[max(rank, 1) - 1]
