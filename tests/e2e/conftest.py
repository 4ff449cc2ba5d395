"""Services that the end-to-end tests share: each is started once, when first asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.e2e.cluster import Cluster, model_file
from tests.e2e.reference import Continuation, load_model, read_greedy

FLOAT32 = ("--dtype", "float32")
SHORT_STEPS = ("--max-num-batched-tokens", "256")
"""So that a step of a busy machine still ends soon."""
PATIENT = ("--heartbeat-interval-ms", "5000")
"""For the scheduler, where workers are not the matter: a busy machine may keep one from its cores
for longer than a dead one is waited for."""


@pytest.fixture(scope="session")
def model_path() -> Path:
    path = model_file()
    if not path.exists():
        assert "QUIRE_TEST_MODEL" not in os.environ, f"QUIRE_TEST_MODEL names no file: {path}"
        pytest.skip(f"no model at {path}: run `make model`")
    return path


@pytest.fixture(scope="session")
def greedy_continuations() -> dict[str, Continuation]:
    return read_greedy()


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> LlamaForCausalLM:
    """The same model in transformers."""
    return load_model(model_path)


@contextmanager
def started(cluster: Cluster, num_workers: int = 1) -> Iterator[Cluster]:
    """The cluster with its workers ready; ended afterwards."""
    try:
        for _ in range(num_workers):
            cluster.add_worker()
        cluster.wait_ready(num_workers)
        yield cluster
    except BaseException:
        print(cluster.tail())  # pytest shows it with the failure
        raise
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def plain(model_path: Path) -> Iterator[Cluster]:
    """One worker, float32."""
    with started(Cluster(model_path, PATIENT, (*FLOAT32, *SHORT_STEPS))) as cluster:
        yield cluster


@pytest.fixture
def two_workers(model_path: Path) -> Iterator[Cluster]:
    """Two float32 workers of one thread, to be killed by the test."""
    flags = (*FLOAT32, "--threads", "1", "--num-blocks", "256")
    with started(Cluster(model_path, worker_flags=flags), num_workers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def one_worker(model_path: Path) -> Iterator[Cluster]:
    """One float32 worker, to be killed; each test leaves one ready worker behind."""
    flags = (*FLOAT32, "--num-blocks", "256")
    with started(Cluster(model_path, worker_flags=flags)) as cluster:
        yield cluster
