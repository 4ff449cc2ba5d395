"""What each tenant may have: requests and tokens at a time, and per minute.

    enter(tenant) --> Lease --> charge(tokens) ... the request lives ... --> close(tokens it used)

A request is charged for the most that it may come to, its prompt and max_tokens of each choice, and
gets back what it did not use. Limits per minute are token buckets that hold one minute's worth: a
tenant that was idle may use that at once. One request that is larger than a bucket passes when the
bucket is full, and what follows waits the longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic

from shared.errors import InvalidArgument, ResourceExhausted

SECONDS_PER_MINUTE = 60.0
LIFE_MEMORY = 0.9
"""What the mean life of a tenant's requests so far weighs beside one that ends."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
"""Bounds of the advice when a request of the tenant must end first."""


@dataclass(frozen=True, slots=True)
class Quota:
    """One tenant's limits; None is none."""

    requests: int | None = None
    """Requests that wait or run; one of n choices or n beams counts n."""
    tokens: int | None = None
    """Tokens that the requests that wait or run may come to."""
    requests_per_min: int | None = None
    """Requests of a minute, counted in the same way, also those that are refused later; each call
    of the tokenizer is one."""
    tokens_per_min: int | None = None
    """Tokens used in a minute, prompts and answers."""


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """Quotas by tenant."""

    named: Mapping[str, Quota] = field(default_factory=dict)
    others: Quota = field(default_factory=Quota)
    """Of each tenant that is not named."""

    def of(self, tenant: str) -> Quota:
        return self.named.get(tenant, self.others)


class TokenBucket:
    """Fills at `per_min` a minute, up to `per_min`."""

    def __init__(self, per_min: int, now: float) -> None:
        self._size = float(per_min)
        self._level = self._size
        self._per_s = per_min / SECONDS_PER_MINUTE
        self._filled_s = now

    def delay_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` may be taken; 0 when it may be now."""
        filled = self._level + (now - self._filled_s) * self._per_s
        self._level, self._filled_s = min(self._size, filled), now
        return max(0.0, min(float(amount), self._size) - self._level) / self._per_s

    def add(self, amount: int) -> None:
        """Puts `amount` in, or takes it out if it is below 0: also more than there is."""
        self._level = min(self._size, self._level + amount)


class _Tenant:
    """What one tenant has now."""

    def __init__(self, quota: Quota, now: float) -> None:
        self.quota = quota
        self.num_requests = 0
        self.num_tokens = 0
        self.mean_life_s = 1.0
        per_min = quota.requests_per_min
        self.request_rate = None if per_min is None else TokenBucket(per_min, now)
        per_min = quota.tokens_per_min
        self.token_rate = None if per_min is None else TokenBucket(per_min, now)

    def next_end_s(self) -> float:
        """About when the next of its requests ends, by how long they took lately."""
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self.mean_life_s / max(1, self.num_requests)))


class Lease:
    """One request's share of its tenant's quota, until it is closed."""

    def __init__(self, tenant: _Tenant, num_sequences: int, clock: Callable[[], float]) -> None:
        self._tenant = tenant
        self._num_sequences = num_sequences
        self._clock = clock
        self._began_s = clock()
        self._num_tokens = 0
        self._is_open = True
        tenant.num_requests += num_sequences

    def charge(self, num_tokens: int) -> None:
        """Takes the tokens that the request may come to.

        Raises InvalidArgument when the quota is below that, ResourceExhausted when it is used up.
        """
        tenant, quota = self._tenant, self._tenant.quota
        if quota.tokens is not None and num_tokens > quota.tokens:
            raise InvalidArgument(
                "stopping.max_tokens",
                f"prompt and answer may come to {num_tokens} tokens; your quota is {quota.tokens}",
            )
        if quota.tokens is not None and tenant.num_tokens + num_tokens > quota.tokens:
            raise ResourceExhausted(
                "tenant_tokens",
                f"your requests may come to {tenant.num_tokens} tokens already, of {quota.tokens}",
                tenant.next_end_s(),
            )
        if tenant.token_rate is not None:
            delay_s = tenant.token_rate.delay_s(num_tokens, self._clock())
            if delay_s > 0:
                raise ResourceExhausted(
                    "tenant_tokens_per_min", "your tokens of this minute are used up", delay_s
                )
            tenant.token_rate.add(-num_tokens)
        tenant.num_tokens += num_tokens
        self._num_tokens = num_tokens

    def close(self, num_used_tokens: int) -> None:
        """The request has ended, after so many tokens of prompt and answers. Once is enough."""
        if not self._is_open:
            return
        self._is_open = False
        tenant = self._tenant
        life_s = self._clock() - self._began_s
        tenant.mean_life_s += (1 - LIFE_MEMORY) * (life_s - tenant.mean_life_s)
        tenant.num_requests -= self._num_sequences
        tenant.num_tokens -= self._num_tokens
        if tenant.token_rate is not None:
            tenant.token_rate.add(self._num_tokens - num_used_tokens)


class TenantQuotas:
    """Every tenant's account. There are as many as tokens name, so that none need be forgotten."""

    def __init__(self, config: QuotaConfig, clock: Callable[[], float] = monotonic) -> None:
        self._config = config
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, name: str, num_sequences: int, field: str) -> Lease:
        """Lets a request of `num_sequences` sequences in; `field` is what asks for so many.

        Raises InvalidArgument when the quota is below that, ResourceExhausted when it is used up.
        """
        tenant = self._tenant(name)
        most = tenant.quota.requests
        if most is not None and num_sequences > most:
            raise InvalidArgument(
                field, f"it counts as {num_sequences} requests; you may have {most}"
            )
        if most is not None and tenant.num_requests + num_sequences > most:
            raise ResourceExhausted(
                "tenant_requests",
                f"{tenant.num_requests} of your requests wait or run, of {most}",
                tenant.next_end_s(),
            )
        self._count(tenant, num_sequences)
        return Lease(tenant, num_sequences, self._clock)

    def count_call(self, name: str) -> None:
        """Lets a call in that ends soon, and counts as one request of the minute.

        Raises ResourceExhausted when the quota is used up.
        """
        self._count(self._tenant(name), 1)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            quota = self._config.of(name)
            tenant = self._tenants[name] = _Tenant(quota, self._clock())
        return tenant

    def _count(self, tenant: _Tenant, num_requests: int) -> None:
        if tenant.request_rate is None:
            return
        delay_s = tenant.request_rate.delay_s(num_requests, self._clock())
        if delay_s > 0:
            raise ResourceExhausted(
                "tenant_requests_per_min", "your requests of this minute are used up", delay_s
            )
        tenant.request_rate.add(-num_requests)
