"""Who may import whom: the layers that keep the scheduler free of torch and the core pure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.tree import PACKAGES, ROOT, Import, imports_of, python_files

OURS = frozenset({*PACKAGES, "protos"})
VALUE_TYPES = frozenset(
    {"shared.errors", "shared.ids", "shared.logprobs", "shared.plan", "shared.sampling"}
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Files under `scope`, but those under `exempt`, import nothing of `forbidden` and, of our own
    packages, only `ours` (None: any). A name stands for itself and all below it. With
    `only_stdlib_and`, third-party modules are limited to these."""

    scope: str
    why: str
    forbidden: frozenset[str] = frozenset()
    ours: frozenset[str] | None = None
    only_stdlib_and: frozenset[str] | None = None
    exempt: frozenset[str] = field(default=frozenset())

    def covers(self, file: Path) -> bool:
        return _under(file.as_posix(), self.scope, "/") and not any(
            _under(file.as_posix(), exempt, "/") for exempt in self.exempt
        )

    def violated_by(self, imported: Import) -> bool:
        name, top = imported.module, imported.module.split(".", maxsplit=1)[0]
        if any(_under(name, forbidden) for forbidden in self.forbidden):
            return True
        if top in OURS:
            return self.ours is not None and not any(
                _under(name, allowed) or _under(allowed, name) for allowed in self.ours
            )
        if self.only_stdlib_and is None or top in sys.stdlib_module_names:
            return False
        return top not in self.only_stdlib_and


IMPURE = frozenset(
    {"asyncio", "time", "random", "os", "io", "logging", "socket", "threading", "multiprocessing"}
    | {"subprocess", "concurrent", "datetime", "secrets", "uuid", "sys", "signal", "selectors"}
    | {"tempfile", "pathlib", "shutil"}
)

RULES = (
    Rule(
        "scheduler_svc/core",
        "the core is pure: the clock and every random choice come in as arguments",
        forbidden=IMPURE | {"numpy.random"},
        ours=VALUE_TYPES | {"scheduler_svc.core"},
        only_stdlib_and=frozenset({"numpy"}),
    ),
    Rule(
        "scheduler_svc",
        "the scheduler owns no tensor",
        forbidden=frozenset({"torch", "triton", "safetensors", "gguf", "zmq"}),
        ours=frozenset({"shared", "protos", "scheduler_svc"}),
    ),
    Rule(
        "worker_svc",
        "a worker is a plain synchronous loop that decides nothing about scheduling",
        forbidden=frozenset({"grpc", "asyncio", "zmq"}),
        ours=frozenset({"shared", "protos.quire.worker", "kernels", "worker_svc"}),
    ),
    Rule(
        "kernels",
        "kernels know tensors, and no request",
        forbidden=frozenset({"grpc", "zmq", "asyncio"}),
        ours=frozenset({"kernels", "shared.model_spec", "shared.errors"}),
    ),
    Rule(
        "kernels",
        "triton stays in one folder",
        forbidden=frozenset({"triton"}),
        exempt=frozenset({"kernels/triton"}),
    ),
    Rule(
        "shared",
        "shared stands below everything",
        forbidden=frozenset({"torch", "grpc"}),
        ours=frozenset({"shared"}),
        exempt=frozenset(
            {"shared/codec.py", "shared/codec_logprobs.py", "shared/codec_sampling.py"}
        ),
    ),
    Rule("shared/codec.py", "the codec maps values", ours=frozenset({"shared", "protos"})),
    Rule(
        "shared",
        "the transport is the only user of zmq",
        forbidden=frozenset({"zmq"}),
        exempt=frozenset({"shared/transport.py"}),
    ),
    Rule(
        "quire_client",
        "the client needs nothing of the server",
        ours=frozenset({"protos.quire.inference", "quire_client"}),
        only_stdlib_and=frozenset({"grpc", "google"}),
    ),
    Rule(
        "cli",
        "the command is an ordinary client",
        forbidden=frozenset({"torch", "zmq"}),
        ours=frozenset({"shared", "protos", "bench", "cli", "quire_client"}),
    ),
    Rule(
        "bench",
        "the load generator is an ordinary client",
        forbidden=frozenset({"torch", "zmq"}),
        ours=frozenset({"shared", "protos", "bench"}),
        exempt=frozenset(
            {"bench/kernels.py", "bench/quality.py", "bench/scheduler.py"}
            | {"bench/peers/vllm_convert.py"}  # runs in the virtual environment of a peer
        ),
    ),
)


def _under(name: str, prefix: str, separator: str = ".") -> bool:
    return name == prefix or name.startswith(prefix + separator)


def _violations(file: Path, source: str) -> Iterator[str]:
    rules = [rule for rule in RULES if rule.covers(file)]
    for imported in imports_of(file, source):
        for rule in rules:
            if rule.violated_by(imported):
                yield f"{imported}: {rule.why}"


def test_every_file_keeps_the_import_rules() -> None:
    packages = [package for package in PACKAGES if package != "tests"]
    found = [
        violation
        for file in python_files(*packages)
        for violation in _violations(file, (ROOT / file).read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("scheduler_svc/core/planted.py", "import time"),
        ("scheduler_svc/core/planted.py", "from numpy import random"),
        ("scheduler_svc/core/planted.py", "def f():\n    import logging"),
        ("scheduler_svc/core/planted.py", "from protos.quire.worker.v1 import worker_pb2"),
        ("scheduler_svc/core/planted.py", "from ..engine import Engine"),
        ("scheduler_svc/planted.py", "import torch.nn"),
        ("scheduler_svc/servicers/planted.py", "from worker_svc import worker"),
        ("worker_svc/planted.py", "import grpc"),
        ("worker_svc/models/planted.py", "from scheduler_svc.core import states"),
        ("kernels/planted.py", "import triton.language as tl"),
        ("kernels/planted.py", "from shared import plan"),
        ("shared/planted.py", "from protos.quire.worker.v1 import worker_pb2"),
        ("shared/planted.py", "import zmq"),
        ("cli/planted.py", "from scheduler_svc import config"),
        ("quire_client/planted.py", "from shared.errors import QuireError"),
        ("quire_client/planted.py", "import numpy"),
    ],
)
def test_a_planted_violation_is_found(file: str, source: str) -> None:
    assert list(_violations(Path(file), source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("scheduler_svc/core/planted.py", "import numpy as np\nfrom shared.plan import StepPlan"),
        ("scheduler_svc/core/planted.py", "from .states import State\nimport hashlib"),
        ("kernels/triton/planted.py", "import triton"),
        ("shared/transport.py", "import zmq.asyncio"),
        ("worker_svc/planted.py", "from shared.transport import DealerLink"),
    ],
)
def test_what_is_allowed_passes(file: str, source: str) -> None:
    assert not list(_violations(Path(file), source))


@pytest.mark.parametrize(
    ("started", "unloaded"),
    [
        ("import scheduler_svc.__main__", "torch triton transformers"),
        ("from cli.__main__ import command_line; command_line(['serve'])", "torch grpc asyncio"),
        ("import worker_svc.__main__", "torch zmq"),
        ("import worker_svc.engine, worker_svc.worker, kernels.cpu", "gguf yaml triton grpc"),
    ],
)
def test_no_process_loads_at_its_start_what_it_may_never_need(started: str, unloaded: str) -> None:
    """By what really gets loaded, which sees through third-party packages too: the scheduler never
    needs torch; `quire serve` starts processes without gRPC, a worker tells of wrong flags without
    torch, and on the CPU never needs what decodes a file's blocks for torch."""
    code = (
        f"import sys; {started}\n"
        f"bad = set({unloaded!r}.split()) & set(sys.modules)\n"
        "sys.exit(f'loaded: {bad}' if bad else 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
