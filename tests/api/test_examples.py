"""The examples of docs/API.md run, in order, against a server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shlex

import pytest

from cli.__main__ import command_line
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import joined
from tests.api.serving import answer, request, serving
from tests.api_document import examples


async def test_the_python_examples_run(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            code = "".join(examples("python"))
            code = code.replace("127.0.0.1:50051", served.server.address)
            code = code.replace("127.0.0.1:50052", served.server.admin_address)
            compiled = compile(code, "docs/API.md", "exec")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                await asyncio.to_thread(exec, compiled, {"__name__": "example"})
            await asyncio.wait_for(worker.left.wait(), 5)  # the last example drains it
    assert "ended by FINISH_REASON_MAX_TOKENS" in output.getvalue()
    assert "sampling.top_p" in output.getvalue()


async def test_the_commands_run(
    spec: ModelSpec, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        await answer(served, request(request_id="long"))
        monkeypatch.setenv("QUIRE_SERVER", served.server.address)
        monkeypatch.setenv("QUIRE_ADMIN", served.server.admin_address)
        for line in "".join(examples("sh")).splitlines():
            program, *arguments = shlex.split(line)
            assert program == "quire", line
            await asyncio.to_thread(command_line(arguments), arguments, standalone_mode=False)
