"""`python -m scheduler_svc.replay FILE`: drives a fresh core through what `--record` wrote.

Says whether the very same plans come out, and at which line the first one differs. A defect that
ended the scheduler is raised again, with its traceback. Exit codes: 0 when all plans are the same,
1 when one differs, 2 when the file is no record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.constraint import ConstraintBroken
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.story import Story
from scheduler_svc.recorder import CONSTRAINTS, FORMAT, INPUTS, VERSION, plan_digest
from scheduler_svc.value_json import from_json
from shared.errors import QuireError
from shared.ids import RequestId
from shared.plan import StepPlan

HASH_KEY = b"replay"


class BrokenRecord(Exception):
    """A file that no recorder wrote; the sentence says where."""


class PlanDiffers(Exception):
    """The replay left the record."""

    def __init__(self, line_number: int, plan: StepPlan | None) -> None:
        super().__init__(f"line {line_number}: the plan differs; made now: {plan}")


class ReplayedConstraint:
    """Answers as a constraint did then; it allows every token, as plans' masks aren't compared."""

    mask = None

    def __init__(self, answers: deque[bool | str]) -> None:
        """`answers` are those of all constraints to the event at hand, in the order of asking."""
        self._answers = answers

    def accept(self, token_id: int) -> bool:
        if not self._answers:
            raise BrokenRecord(f"a constraint is asked about token {token_id}, and wasn't then")
        answer = self._answers.popleft()
        if isinstance(answer, str):
            raise ConstraintBroken(answer)
        return answer

    def copy(self) -> ReplayedConstraint:
        return self


@dataclass(slots=True)
class Replay:
    """A core in the state that a record leads to."""

    scheduler: Scheduler
    answers: deque[bool | str] = field(default_factory=deque)
    num_events: int = 0
    num_plans: int = 0


def replay(lines: Iterable[bytes]) -> Replay:
    """Drives a core through `lines`. Raises BrokenRecord and PlanDiffers, and whatever the core
    raises that is a defect; refusals were part of what happened, and go on."""
    numbered = _parsed(lines)
    _, header = next(numbered, (1, []))
    if header[:2] != [FORMAT, VERSION] or len(header) != 3:
        raise BrokenRecord(f"line 1 is not the head of a {FORMAT} of version {VERSION}")
    try:
        config = from_json(SchedulerConfig, header[2])
    except (TypeError, ValueError, KeyError) as error:
        raise BrokenRecord(f"line 1: {error!r}") from error
    done = Replay(Scheduler(config, HASH_KEY))
    made: StepPlan | None = None
    for number, name, arguments, answers in _with_answers(numbered):
        if name == "plan":
            if made is None or [plan_digest(made)] != arguments:
                raise PlanDiffers(number, made)
            done.num_plans += 1
            made = None
            continue
        if made is not None:
            raise PlanDiffers(number - 1, made)
        made = _handle(done, number, name, arguments, answers)
        done.num_events += 1
    return done


def _handle(
    done: Replay, number: int, name: str, arguments: Sequence[Any], answers: Sequence[Any] | None
) -> StepPlan | None:
    """Gives the plan when the event is a schedule that made one. `answers` are those that
    constraints gave, None where none was asked."""
    try:
        kinds = INPUTS[name]
        values = [from_json(*pair) for pair in zip(kinds, arguments, strict=True)]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BrokenRecord(f"line {number}: {error!r}") from error
    done.answers.clear()
    done.answers.extend(answers or ())
    if name == "submit" and answers is not None:
        values[0] = replace(values[0], constraint=ReplayedConstraint(done.answers))
    try:
        result = getattr(done.scheduler, name)(*values)
    except QuireError:
        return None
    return result[0] if name == "schedule" else None


def _with_answers(
    numbered: Iterable[tuple[int, list[Any]]],
) -> Iterator[tuple[int, str, list[Any], list[Any] | None]]:
    """Each event with what the line after it says of constraints, if it does."""
    event: tuple[int, str, list[Any]] | None = None
    for number, (name, *arguments) in numbered:
        if name == CONSTRAINTS:
            if event is None or len(arguments) != 1 or not _are_answers(arguments[0]):
                raise BrokenRecord(f"line {number}: these are no answers of constraints")
            yield (*event, arguments[0])
            event = None
            continue
        if event is not None:
            yield (*event, None)
        event = (number, name, arguments)
    if event is not None:
        yield (*event, None)


def _are_answers(items: object) -> bool:
    return isinstance(items, list) and all(isinstance(item, bool | str) for item in items)


def _parsed(lines: Iterable[bytes]) -> Iterator[tuple[int, list[Any]]]:
    """Each line with its number; a last one that a crash cut off is left out."""
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        try:
            items = json.loads(line)
        except ValueError as error:
            raise BrokenRecord(f"line {number}: {error}") from error
        if not isinstance(items, list) or not items or not isinstance(items[0], str):
            raise BrokenRecord(f"line {number} is no list that begins with a name")
        yield number, items


def _print_story(story: Story) -> None:
    for event in story.events:
        which = "" if event.sequence_index is None else f"[{event.sequence_index}] "
        print(f"{event.at_s - story.submitted_s:+10.3f} s  {which}{event.text}")


def main(argv: Sequence[str]) -> int:
    """Runs the replay and says how it ended; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="what the scheduler's --record wrote")
    parser.add_argument("--story", help="then tell the story of the request of this id")
    args = parser.parse_args(argv)
    try:
        with args.file.open("rb") as lines:
            done = replay(lines)
    except (OSError, BrokenRecord) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 2
    except PlanDiffers as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 1
    print(f"{done.num_events} events, {done.num_plans} plans, all the same")
    if args.story is not None:
        story = done.scheduler.story(RequestId(args.story))
        if story is None:
            print(f"no request named {args.story!r} is known at its end", file=sys.stderr)
            return 2
        _print_story(story)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
