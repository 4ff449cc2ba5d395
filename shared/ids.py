"""Names for the plain numbers and strings that travel between modules."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""A client's name for a request; unique among live requests."""

SequenceHandle = NewType("SequenceHandle", int)
"""A small number that names a sequence on one replica while it runs there; reused later."""

BlockId = NewType("BlockId", int)
"""Index of a block in a replica's device pool or host pool."""

WorkerId = NewType("WorkerId", str)
"""A worker's name; stable over its restarts."""

ReplicaId = NewType("ReplicaId", int)
"""A replica for one membership; equals the epoch it was given, so it is never reused."""

StepId = NewType("StepId", int)
"""Number of a step plan within an epoch; the first is 1."""
