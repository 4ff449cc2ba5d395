"""Whatever the scheduler does to make room or to share work, each request gets the tokens that it
gets alone with an ample pool.

A few worlds that have every way in them run with the other tests; `make nightly` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.cluster import PATIENCE_S, Cluster, eventually
from tests.e2e.conftest import FLOAT32, PATIENT, started
from tests.e2e.prompts import TEXTS

Tokens = list[list[int]]
NUM_TOKENS = 32
NUM_BEAM_TOKENS = 12
POOL_BLOCKS = {1: 15, 2: 9}
"""By the number of workers: what starts fits, what it grows to does not."""


@dataclass(frozen=True)
class World:
    """How one cluster is run."""

    preemption: str
    has_host_pool: bool
    has_prefix_cache: bool
    budget: int
    num_workers: int

    def __str__(self) -> str:
        return "-".join(
            (
                self.preemption,
                "host" if self.has_host_pool else "no_host",
                "cache" if self.has_prefix_cache else "no_cache",
                f"budget_{self.budget}",
                f"workers_{self.num_workers}",
            )
        )

    def scheduler_flags(self) -> tuple[str, ...]:
        return (
            *("--preemption", self.preemption),
            *("--prefix-cache", "on" if self.has_prefix_cache else "off"),
            *("--max-num-batched-tokens", str(self.budget)),
        )

    def worker_flags(self) -> tuple[str, ...]:
        host = () if self.has_host_pool else ("--host-memory", "0")
        pool = ("--num-blocks", str(POOL_BLOCKS[self.num_workers]))
        return (*FLOAT32, *pool, *host, "--max-num-batched-tokens", str(self.budget))


EVERY_WORLD = [
    World(*choice)
    for choice in product(
        ("swap", "recompute", "auto"), (True, False), (True, False), (8, 64, 2048), (1, 2)
    )
]
FEW_WORLDS = [
    World("swap", True, True, 64, 1),
    World("swap", False, True, 2048, 1),
    World("recompute", True, False, 8, 1),
    World("auto", True, True, 2048, 2),
]


def _requests(*, alone: bool) -> Iterator[inference_pb2.GenerateRequest]:
    """Greedy answers, two of which begin alike, four seeded choices, and a beam search."""
    stopping = inference_pb2.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    once = TEXTS["story"]
    for text in (once, once + " a fisherman", TEXTS["c"], TEXTS["letter"]):
        yield inference_pb2.GenerateRequest(
            text=text,
            sampling=inference_pb2.SamplingParams(temperature=0),
            stopping=stopping,
            bypass_prefix_cache=alone,
        )
    yield inference_pb2.GenerateRequest(
        text=once,
        sampling=inference_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=5, n=4),
        stopping=stopping,
        bypass_prefix_cache=alone,
    )
    yield _search(alone=alone)


def _search(*, alone: bool, max_tokens: int = NUM_BEAM_TOKENS) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text=TEXTS["fact"],
        beam=inference_pb2.BeamParams(width=3, num_return=3),
        stopping=inference_pb2.StoppingParams(max_tokens=max_tokens),
        bypass_prefix_cache=alone,
    )


@pytest.fixture(scope="module")
def expected(plain: Cluster) -> list[Tokens]:
    """Each request alone, without a prefix cache, in an ample pool."""
    return [
        [answer.token_ids for answer in plain.sequences(request)]
        for request in _requests(alone=True)
    ]


def _check(model_path: Path, world: World, expected: list[Tokens]) -> None:
    cluster = Cluster(model_path, (*world.scheduler_flags(), *PATIENT), world.worker_flags())
    with started(cluster, world.num_workers):
        requests = list(_requests(alone=False))
        with ThreadPoolExecutor(len(requests)) as pool:
            streams = list(pool.map(cluster.sequences, requests))
        counters = cluster.state().counters
        assert cluster.is_idle()
    assert [[answer.token_ids for answer in answers] for answers in streams] == expected
    told = [answer.finished for answers in streams for answer in answers]
    assert counters["preemptions"] > 0, "the pool held everything"
    assert any(end is not None and end.timings.num_preemptions for end in told)
    if world.preemption == "swap":
        assert (counters["swaps_out"] > 0) == world.has_host_pool
    if world.preemption == "recompute" or not world.has_host_pool:
        assert counters["swaps_out"] == 0
    assert (counters["prefix_hit_tokens"] > 0) or not world.has_prefix_cache


@pytest.mark.parametrize("world", FEW_WORLDS, ids=str)
def test_each_request_gets_what_it_gets_alone(
    model_path: Path, world: World, expected: list[Tokens]
) -> None:
    _check(model_path, world, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("world", EVERY_WORLD, ids=str)
def test_each_request_gets_what_it_gets_alone_in_every_world(
    model_path: Path, world: World, expected: list[Tokens]
) -> None:
    _check(model_path, world, expected)


def test_a_search_whose_worker_is_killed_comes_to_the_same_beams(
    two_workers: Cluster,
) -> None:
    request = _search(alone=True, max_tokens=24)
    undisturbed = two_workers.sequences(request)
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(two_workers.sequences, request)
        runs_on: set[str] = set()

        def is_well_under_way() -> bool:
            running = [one for one in two_workers.state().replicas if one.num_running == 3]
            runs_on.update(one.worker_id for one in running)
            return bool(running) and not search.done()

        eventually(is_well_under_way, PATIENCE_S, "three beams run", two_workers.tail)
        [name] = runs_on
        two_workers.workers[int(name.removeprefix("worker-"))].kill()
        answers = search.result()
    assert [a.token_ids for a in answers] == [a.token_ids for a in undisturbed]
    assert [a.finished and a.finished.beam_score for a in answers] == [
        a.finished and a.finished.beam_score for a in undisturbed
    ]
    assert sum(answer.num_recoveries for answer in answers) > 0
    assert two_workers.num_ready() == 1 and two_workers.is_idle()
