"""Kernel tests run on the device where there is one, and in Triton's interpreter elsewhere
(`tests/conftest.py` chooses)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

INTERPRETED = not torch.cuda.is_available()


def _dot_in_float32(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
    """The interpreter keeps bfloat16 as bare bits, and its product multiplies the bits."""
    widened = [
        builder.create_fp_ext(operand, interpreter.tl.float32)
        if operand.dtype.scalar == interpreter.tl.bfloat16
        else operand
        for operand in (left, right)
    ]
    return _create_dot(builder, *widened, *rest)


def _launch(executor: Any, *arguments: Any, **options: Any) -> None:
    _patched.clear()
    _run_grid(executor, *arguments, **options)


def _call_patched_once(function: Any, *arguments: Any, **options: Any) -> Any:
    """The interpreter patches Triton's modules anew for each call of a function by a kernel, which
    takes longer than the call; once a launch is enough."""
    modules = [value for value in function.fn.__globals__.values() if inspect.ismodule(value)]
    languages = frozenset(id(module) for module in modules)
    if languages not in _patched:
        interpreter._patch_lang(function.fn)
        _patched.add(languages)
    return function.rewrite()(*arguments, **options)


if INTERPRETED:
    _create_dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = _dot_in_float32
    _patched: set[frozenset[int]] = set()
    _run_grid = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = _launch
    interpreter.InterpretedFunction.__call__ = _call_patched_once


@pytest.fixture(
    params=[
        pytest.param(
            "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the device runs the same")
        ),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="no CUDA device")],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where tensors live: with the interpreter on the CPU, or on the CUDA device."""
    return torch.device(request.param)
