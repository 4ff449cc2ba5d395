"""What happened to each request, and why, in sentences: for the operator who asks.

Notes are made on events alone (a start, a preemption, an end), never for a steady step. Each
request keeps its last so many, and the stories of the last so many ended requests stay.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.core.request import Request, Sequence
from shared.ids import RequestId


class StoryEvent(NamedTuple):
    """One thing that happened."""

    at_s: float
    sequence_index: int | None
    """None when it happened to the whole request."""
    text: str


@dataclass(slots=True, eq=False)
class Story:
    """The events of one request."""

    request_id: RequestId
    submitted_s: float
    events: deque[StoryEvent]
    """The last ones, in order."""
    num_events: int = 0
    """All there were, those that made room for later ones included."""
    is_live: bool = True

    @property
    def num_dropped(self) -> int:
        return self.num_events - len(self.events)


class Stories:
    """The stories of live requests and of the last ones that ended. `now` is the time of what
    happens next; the scheduler sets it with each event that has a time."""

    def __init__(self, max_events: int, max_finished: int) -> None:
        self.now = 0.0
        self._max_events = max_events
        self._max_finished = max_finished
        self._live: dict[RequestId, Story] = {}
        self._finished: OrderedDict[RequestId, Story] = OrderedDict()

    def begin(self, request: Request, text: str) -> None:
        """`request` is submitted."""
        self._live[request.id] = Story(request.id, self.now, deque(maxlen=self._max_events))
        self.tell(request, text)

    def note(self, seq: Sequence, text: str) -> None:
        """Something happened to one sequence of a live request."""
        index = seq.index if len(seq.request.sequences) > 1 else None
        self._add(seq.request.id, StoryEvent(self.now, index, text))

    def tell(self, request: Request, text: str) -> None:
        """Something happened to a live request as a whole."""
        self._add(request.id, StoryEvent(self.now, None, text))

    def _add(self, request_id: RequestId, event: StoryEvent) -> None:
        story = self._live[request_id]
        story.events.append(event)
        story.num_events += 1

    def end(self, request: Request) -> None:
        """`request` has ended; an older one of its id is forgotten."""
        story = self._live.pop(request.id)
        story.is_live = False
        self._finished.pop(request.id, None)
        self._finished[request.id] = story
        if len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)

    def find(self, request_id: RequestId) -> Story | None:
        """The story of the live request of this id, or else of the last one that ended."""
        return self._live.get(request_id) or self._finished.get(request_id)
