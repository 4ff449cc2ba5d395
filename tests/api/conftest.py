"""Runs the coroutine tests of this folder on one uvloop, as the process does."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from scheduler_svc.text.tokenizer import TextModel
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec
from tests.api.tiny_model import write_tiny_model

TEST_LIMIT_S = 15.0


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


@pytest.fixture(autouse=True)
def _loop(runner: asyncio.Runner) -> asyncio.Runner:
    return runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    runner = pyfuncitem.funcargs["_loop"]
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    timeout = pyfuncitem.get_closest_marker("timeout")
    limit_s = TEST_LIMIT_S if timeout is None else float(timeout.args[0])

    async def run() -> None:
        await asyncio.wait_for(pyfuncitem.obj(**arguments), limit_s)

    assert isinstance(runner, asyncio.Runner)
    runner.run(run())
    return True


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def spec(model_folder: Path) -> ModelSpec:
    return read_model_spec(model_folder)


@pytest.fixture(scope="session")
def text_model(spec: ModelSpec) -> TextModel:
    return TextModel.load(spec)
