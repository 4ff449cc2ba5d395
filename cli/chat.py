"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer
from rich.console import Console

from cli.answer import TimedAnswer
from cli.call_errors import from_call_error
from cli.connection import (
    DEFAULT_SERVER,
    ModelOption,
    ServerOption,
    TlsCaOption,
    TokenFileOption,
    connect,
    server_config,
)
from cli.models import served_model
from cli.sampling_options import (
    MaxTokensOption,
    SeedOption,
    TemperatureOption,
    TopPOption,
    sampling_params,
    stopping_params,
)
from protos.quire.inference.v1 import inference_pb2
from quire_client import CallError, Client

with contextlib.suppress(ImportError):  # line editing and history, where Python was built with it
    import readline  # noqa: F401

HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"


class Conversation:
    """The turns so far. A turn that failed is taken back, so that the next one starts clean."""

    def __init__(self, system: str | None) -> None:
        self._system = system
        self.messages: list[inference_pb2.ChatMessage] = []
        self.reset()

    def reset(self) -> None:
        self.messages = []
        if self._system:
            self._add("system", self._system)

    def ask(self, text: str) -> None:
        self._add("user", text)

    def answered(self, text: str) -> None:
        self._add("assistant", text)

    def take_back(self) -> None:
        """Forgets the last question."""
        self.messages.pop()

    def _add(self, role: str, content: str) -> None:
        self.messages.append(inference_pb2.ChatMessage(role=role, content=content))


def chat(
    server: ServerOption = DEFAULT_SERVER,
    tls_ca: TlsCaOption = None,
    client_token_file: TokenFileOption = None,
    model: ModelOption = "",
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
) -> None:
    """Talk with the model in the terminal."""
    template = inference_pb2.GenerateRequest(
        model=model,
        sampling=sampling_params(temperature, None, top_p, None, seed),
        stopping=stopping_params(max_tokens, None),
    )
    console = Console(highlight=False)
    conversation = Conversation(system)
    with connect(server_config(server, tls_ca, client_token_file)) as client:
        name = served_model(client, model).name
        console.print(f"[bold]{name}[/bold] at {server}. {HELP}.", style="dim")
        while (line := _read_line(console)) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                conversation.reset()
                console.print("The conversation is forgotten.", style="dim")
            elif line.startswith("/"):
                console.print(HELP, style="dim")
            elif line:
                conversation.ask(line)
                _turn(console, conversation, client, template)


def _read_line(console: Console) -> str | None:
    """The next line; "" after Ctrl-C, None at the end of input."""
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        console.print()
        return ""
    except EOFError:
        console.print()
        return None


def _turn(
    console: Console,
    conversation: Conversation,
    client: Client,
    template: inference_pb2.GenerateRequest,
) -> None:
    """Streams one answer. What was said before Ctrl-C stays in the conversation."""
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(template)
    request.chat.messages.extend(conversation.messages)
    timed = TimedAnswer(client, request)
    try:
        for piece in timed.texts():
            console.print(piece, end="", markup=False, soft_wrap=True)
        console.print(f"\n[{timed.summary()}]", style="dim", markup=False)
    except KeyboardInterrupt:
        console.print("\n[stopped]", style="dim", markup=False)
    except CallError as error:
        conversation.take_back()
        console.print(f"\n{from_call_error(error)}", style="red", markup=False)
        return
    if timed.answer.text:
        conversation.answered(timed.answer.text)
    else:
        conversation.take_back()
