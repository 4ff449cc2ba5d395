"""What became of constraints that were compiled lately: clients mostly send the same few, also of
those that are refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from hashlib import blake2b

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.text.matcher import MatcherConstraint
from shared.errors import InvalidArgument

MAX_COMPILED = 32
MAX_REFUSED = 256


class ConstraintCache:
    """The last of each kind; for one thread at a time."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[bytes, MatcherConstraint] = OrderedDict()
        self._refused: OrderedDict[bytes, InvalidArgument] = OrderedDict()

    def get(self, key: bytes) -> MatcherConstraint | None:
        """A constraint that took no token yet; None when it has to be compiled.

        Raises the InvalidArgument that it was refused with.
        """
        if (refusal := self._refused.get(key)) is not None:
            self._refused.move_to_end(key)
            raise InvalidArgument(refusal.field, refusal.description)
        if (constraint := self._compiled.get(key)) is None:
            return None
        self._compiled.move_to_end(key)
        return constraint.copy()

    def keep(self, key: bytes, constraint: MatcherConstraint) -> None:
        """Keeps a constraint, which must never take a token."""
        self._compiled[key] = constraint
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)

    def refuse(self, key: bytes, refusal: InvalidArgument) -> None:
        """Keeps why a constraint was refused."""
        self._refused[key] = refusal
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)


def key_of(
    message: inference_pb2.GenerateRequest, eos_token_ids: Collection[int], tenant: str
) -> bytes:
    """The same for a tenant's constraints of the same text that may end with the same tokens."""
    field = message.WhichOneof("constraint")
    assert field is not None
    alone = inference_pb2.GenerateRequest()
    if field == "choice":
        alone.choice.CopyFrom(message.choice)
    else:
        setattr(alone, field, getattr(message, field))
    context = repr((tenant, sorted(eos_token_ids))).encode()
    return blake2b(context + alone.SerializeToString(deterministic=True), digest_size=32).digest()
