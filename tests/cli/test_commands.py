"""generate, models and bench: what they print, what they send, how they fail."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from cli import connection
from protos.quire.inference.v1 import inference_pb2
from tests.cli.conftest import Quire
from tests.cli.fake_server import FakeServer


def test_generate_streams_the_text_and_tells_the_figures(server: FakeServer, quire: Quire) -> None:
    ended = quire("generate", "hello there", "--max-tokens", "4", "--server", server.address)
    assert ended.code == 0
    assert ended.out == "w0 w1 w2 w3 \n"
    assert "4 tokens in" in ended.err and "tokens/s" in ended.err and "MAX_TOKENS" in ended.err


def test_generate_sends_only_the_options_that_were_given(server: FakeServer, quire: Quire) -> None:
    quire("generate", "x", "--seed", "7", "--top-p", "0.5", "--stop", "a", "--stop", "b",
          "--server", server.address)  # fmt: skip
    (request,) = server.requests
    assert request.text == "x"
    assert request.sampling.seed == 7 and request.sampling.top_p == 0.5
    assert not request.sampling.HasField("temperature") and not request.sampling.HasField("top_k")
    assert list(request.stopping.stop_strings) == ["a", "b"]
    assert not request.stopping.HasField("max_tokens")
    assert not request.stopping.HasField("ignore_eos")


def test_generate_sends_the_rules_of_tokens(server: FakeServer, quire: Quire) -> None:
    quire("generate", "x", "--typical-p", "0.5", "--repetition-penalty", "1.5",
          "--presence-penalty", "-1", "--frequency-penalty", "0.25", "--bad-word", "a",
          "--bad-word", "b", "--min-tokens", "2", "--server", server.address)  # fmt: skip
    (request,) = server.requests
    expected = inference_pb2.SamplingParams(
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.25,
        bad_words=["a", "b"],
    )
    assert request.sampling == expected
    assert request.stopping.min_tokens == 2
    assert not request.HasField("response")


def test_generate_tells_log_probabilities_as_json(server: FakeServer, quire: Quire) -> None:
    ended = quire("generate", "x", "--logprobs", "2", "--max-tokens", "2", "--json",
                  "--server", server.address)  # fmt: skip
    assert json.loads(ended.out)["logprobs"] == [
        {
            "log_prob": -float(place),
            "rank": 1 + place,
            "top": [{"token_id": place + rank, "log_prob": -0.5} for rank in range(2)],
        }
        for place in range(2)
    ]


def test_generate_chat_sends_a_conversation(server: FakeServer, quire: Quire) -> None:
    quire("generate", "--chat", "why?", "--server", server.address)
    (message,) = server.requests[0].chat.messages
    assert (message.role, message.content) == ("user", "why?")


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--json-schema", "FILE"], "json_schema", '{"type": "ünion"}'),
        (["--json-object"], "json_object", True),
        (["--regex", "a+"], "regex", "a+"),
        (["--grammar", "FILE"], "grammar", '{"type": "ünion"}'),
        (
            ["--choice", "yes", "--choice", "no"],
            "choice",
            inference_pb2.Choices(options=["yes", "no"]),
        ),
    ],
    ids=lambda options: options[0] if isinstance(options, list) else "",
)
def test_generate_sends_a_constraint(
    server: FakeServer, quire: Quire, tmp_path: Path, options: list[str], field: str, value: object
) -> None:
    file = tmp_path / "file"
    file.write_text('{"type": "ünion"}', encoding="utf-8")
    options = [str(file) if option == "FILE" else option for option in options]
    quire("generate", "x", *options, "--server", server.address)
    (request,) = server.requests
    assert request.WhichOneof("constraint") == field
    assert getattr(request, field) == value


def test_generate_takes_one_constraint_that_it_can_read(server: FakeServer, quire: Quire) -> None:
    two = quire("generate", "x", "--regex", "", "--choice", "a", "--server", server.address)
    missing = quire("generate", "x", "--json-schema", "nowhere", "--server", server.address)
    for ended, text in ((two, "one of"), (missing, "nowhere")):
        assert ended.code == 2 and text in ended.err
    assert not server.requests


def test_generate_reads_the_prompt_from_standard_input(
    server: FakeServer, quire: Quire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    quire("generate", "-", "--server", server.address)
    assert server.requests[0].text == "from a pipe"


def test_generate_json_is_one_object(server: FakeServer, quire: Quire) -> None:
    ended = quire("generate", "a b", "--max-tokens", "2", "--json", "--server", server.address)
    figures = json.loads(ended.out)
    assert figures["text"] == "w0 w1 "
    assert figures["token_ids"] == [0, 1]
    assert figures["finish_reason"] == "MAX_TOKENS"
    assert (figures["num_prompt_tokens"], figures["num_output_tokens"]) == (2, 2)


def test_generate_asks_for_choices_or_beams(server: FakeServer, quire: Quire) -> None:
    ended = quire("generate", "a", "--n", "2", "--max-tokens", "2", "--server", server.address)
    assert ended.out == "[0] w0 w1 \n"
    ended = quire("generate", "a", "--beams", "4", "--json", "--server", server.address)
    [shown] = json.loads(ended.out)["sequences"]
    assert shown["token_ids"] == [0, 1, 2] and shown["finish_reason"] == "MAX_TOKENS"
    choices, search = server.requests
    assert choices.sampling.n == 2
    assert (search.beam.width, search.beam.num_return) == (4, 4)
    mixed = quire("generate", "a", "--beams", "4", "--seed", "1", "--server", server.address)
    assert mixed.code == 2 and "--beams" in mixed.err


def test_the_token_is_shown_to_the_server(server: FakeServer, quire: Quire, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    token_file.chmod(0o644)
    open_to_all = quire("generate", "x", "--client-token-file", str(token_file))
    assert open_to_all.code == 2 and "chmod 600" in open_to_all.err
    token_file.chmod(0o600)
    quire("generate", "x", "--client-token-file", str(token_file), "--server", server.address)
    assert server.metadata[0]["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "bad"), "it is bad"),
        (("generate", "x", "--model", "other"), "no model 'other' is served"),
        (("bench", "--model", "other"), "no model 'other' is served"),
        (("bench", "--prompt-words", "2", "--shared-words", "3"), "--shared-words is larger"),
        (("bench", "--rate", "0"), "--rate must be"),
        (("generate", "x", "--client-token-file", "/nonexistent"), "cannot read /nonexistent"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_exit_code_2(
    server: FakeServer, quire: Quire, arguments: tuple[str, ...], sentence: str
) -> None:
    ended = quire(*arguments, "--server", server.address)
    assert ended.code == 2
    assert sentence in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize("command", [("generate", "x"), ("models",), ("chat",), ("bench",)])
def test_without_a_server_the_sentence_says_how_to_start_one(
    quire: Quire, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.2)
    ended = quire(*command, "--server", "127.0.0.1:1")
    assert ended.code == 1
    assert "no server answers at 127.0.0.1:1" in ended.err and "quire serve" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x", "--unknown"),
        ("generate",),
        ("nosuch",),
        ("serve", "--model", "m", "--workers", "0"),
        ("bench", "--clients", "many"),
    ],
)
def test_wrong_usage_is_exit_code_2(quire: Quire, arguments: tuple[str, ...]) -> None:
    ended = quire(*arguments)
    assert ended.code == 2 and "Error:" in ended.err


def test_models_lists_what_is_served(server: FakeServer, quire: Quire) -> None:
    assert "parrot" in quire("models", "--server", server.address).out
    (model,) = json.loads(quire("models", "--json", "--server", server.address).out)
    assert model["name"] == "parrot" and model["context_length"] == 128


@pytest.mark.parametrize("loop", [("--clients", "3"), ("--rate", "500")])
def test_bench_measures_exactly_the_requests_asked_for(
    server: FakeServer, quire: Quire, tmp_path: Path, loop: tuple[str, ...]
) -> None:
    figures_file = tmp_path / "figures.json"
    ended = quire("bench", "--requests", "6", "--warmup", "1", "--prompt-words", "5",
                  "--shared-words", "2", "--max-tokens", "4", *loop, "--json", str(figures_file),
                  "--server", server.address, "--admin", server.address)  # fmt: skip
    assert ended.code == 0
    assert len(server.requests) == 7
    assert all(request.stopping.ignore_eos for request in server.requests)
    measured = server.requests[1:]
    assert len({" ".join(request.text.split()[:2]) for request in measured}) == 1
    assert len({request.text for request in measured}) == 6
    figures = json.loads(figures_file.read_text())
    assert (figures["num_requests"], figures["num_failed"]) == (6, 0)
    assert figures["num_output_tokens"] == 24 and figures["num_prompt_tokens"] == 30
    assert figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p99"] <= figures["request_ms"]["max"]
    assert figures["scheduler"]["share"] == pytest.approx(0.05)
    for label in ("tokens/s", "time to first token", "between tokens", "p50", "p99", "scheduling"):
        assert label in ended.out


def test_explain_tells_the_story_of_a_request(server: FakeServer, quire: Quire) -> None:
    ended = quire("explain", "r1", "--admin", server.address)
    assert ended.code == 0
    assert ended.out.splitlines() == [
        "(2 earlier events were not kept)",
        "    +0.250 s  runs",
        "    +1.500 s  [1] preempted",
        "It has not ended.",
    ]


def test_explain_of_an_unknown_request_is_one_sentence(server: FakeServer, quire: Quire) -> None:
    ended = quire("explain", "r2", "--admin", server.address)
    assert ended.code != 0
    assert "r2" in ended.err
