"""Renders a conversation by the model's chat template.

A template comes with the model file and is a stranger's code. It runs in Jinja's immutable sandbox:
no attributes that start with an underscore, no change of what it is given, no files, no imports.
Two more bounds keep a template from holding a server:

- time: RENDER_TIMEOUT_S, checked at every line of the template that runs, loops included;
- size: MAX_RENDERED_CHARS of output, MAX_TEMPLATE_CHARS of source, 100,000 numbers in a range (the
  sandbox's own), MAX_REPEATED_ITEMS in the result of `*`, and `**` is not there.

What a single built-in filter allocates is not bounded. Rendering takes a thread for as long as it
runs; callers keep it off the event loop.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidArgument, ModelLoadError

RENDER_TIMEOUT_S = 5.0
MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 16 << 20
MAX_REPEATED_ITEMS = 1 << 20
MAX_REASON_CHARS = 300
FIELD = "chat.messages"


class ChatTemplate:
    """A compiled template; may render in several threads at once."""

    def __init__(
        self, source: str, tokens: Mapping[str, str], timeout_s: float = RENDER_TIMEOUT_S
    ) -> None:
        """`tokens` are the special tokens by the names that templates use, such as bos_token.

        Raises ModelLoadError when the template does not compile.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelLoadError(
                f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters"
            )
        self._tokens = dict(tokens)
        self._timeout_s = timeout_s
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ModelLoadError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt for the next answer to `messages`, pairs of role and content, oldest first.

        Raises InvalidArgument for an empty list and for whatever the template refuses.
        """
        if not messages:
            raise InvalidArgument(FIELD, "a conversation needs at least one message")
        parts: list[str] = []
        num_chars = 0
        try:
            with _deadline(time.monotonic() + self._timeout_s, self._template.filename):
                for part in self._template.generate(
                    messages=[{"role": role, "content": content} for role, content in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self._tokens,
                ):
                    num_chars += len(part)
                    if num_chars > MAX_RENDERED_CHARS:
                        raise SecurityError(f"more than {MAX_RENDERED_CHARS} characters")
                    parts.append(part)
        except Exception as error:  # a template can raise whatever Python can
            reason = str(error)[:MAX_REASON_CHARS] or type(error).__name__
            raise InvalidArgument(FIELD, f"the chat template refuses them: {reason}") from error
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with `*` and `**` bounded; also when Jinja folds constants."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            raise SecurityError("the operator ** is not available")
        for items, count in ((left, right), (right, left)):
            if (
                isinstance(items, str | bytes | list | tuple)
                and isinstance(count, int)
                and len(items) * count > MAX_REPEATED_ITEMS
            ):
                raise SecurityError(f"a repetition of more than {MAX_REPEATED_ITEMS} items")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    """An environment with what transformers offers to chat templates."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@contextmanager
def _deadline(deadline_s: float, filename: str | None) -> Iterator[None]:
    """Raise TimeoutError in the code of `filename` once the clock passes `deadline_s`.

    A trace function of this thread alone: the one hook that sees each turn of a template's loops.
    """

    def trace_lines(_frame: FrameType, _event: str, _argument: object) -> Any:
        if time.monotonic() > deadline_s:
            raise TimeoutError("it took too long")
        return trace_lines

    def trace_calls(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != filename:
            return None
        return trace_lines(frame, event, argument)

    previous = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        yield
    finally:
        sys.settrace(previous)
