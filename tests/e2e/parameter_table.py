"""Requests in which every value of each parameter meets every value of every other one.

The table is made greedily: a row begins with a pair of values that no row has yet, and each further
parameter takes the value that brings the most new pairs; of some such rows the best is taken (after
Cohen et al., "The AETG system", 1997). The same seed gives the same table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

from protos.quire.inference.v1 import inference_pb2
from quire_client import generate_request
from tests.api.tiny_model import EOS

Values = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By parameter: its values by name, each as fields of generate_request."""
Row = dict[str, str]
"""By parameter: the name of its value."""
Choice = tuple[str, str]
Pair = frozenset[Choice]

OFF: Mapping[str, Mapping[str, Any]] = {"off": {}}
CONSTRAINT, MIN_TOKENS = "constraint", "min_tokens"
NUM_TOKENS = 40
NUM_TRIES = 20
SHARED_PROMPT = "Once upon a time, all of them began "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 9, "maxLength": 12},
        "size": {"type": "integer", "minimum": 10000, "maximum": 99999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
OPTIONS = ["a long way from here to the sea", "a long way from there", "no way around it at all"]
PRINTABLE = range(32, 127)

SAMPLED: Values = {
    "temperature": {"greedy": {"temperature": 0.0}, **OFF, "hot": {"temperature": 2.5}},
    "top_k": {**OFF, "12": {"top_k": 12}},
    "top_p": {**OFF, "0.8": {"top_p": 0.8}},
    "min_p": {**OFF, "0.05": {"min_p": 0.05}},
    "typical_p": {**OFF, "0.7": {"typical_p": 0.7}},
    "repetition": {**OFF, "1.5": {"repetition_penalty": 1.5}},
    "presence": {**OFF, "2": {"presence_penalty": 2.0}},
    "frequency": {**OFF, "-1": {"frequency_penalty": -1.0}},
    "bias": {**OFF, "some": {"logit_bias": {EOS: 2.0, ord("e"): 3.0, ord(" "): -5.0}}},
    "allowed": {**OFF, "printable": {"allowed_token_ids": [*PRINTABLE, EOS]}},
    "banned": {**OFF, "some": {"banned_token_ids": [*b"KQZ", 0xFF]}},
    "bad words": {**OFF, "some": {"bad_words": ["E", "qq", "x?"]}},
    "seed": {"one": {"seed": 1}, "later choice": {"seed": 2**63, "first_choice": 5}},
    MIN_TOKENS: {**OFF, "20": {"min_tokens": 20}},
    "ignore_eos": {**OFF, "on": {"ignore_eos": True}},
    "stop strings": {
        **OFF,
        "cut": {"stop_strings": ["ee", "t", "an", "\n"]},
        "kept": {"stop_strings": ["t", "oo", "e e"], "include_stop_string": True},
    },
    "stop ids": {**OFF, "some": {"stop_token_ids": [ord("r"), 0xC3, 7]}},
    "logprobs": {**OFF, "own": {"num_logprobs": 0}, "3": {"num_logprobs": 3}},
    "prompt_logprobs": {**OFF, "2": {"num_prompt_logprobs": 2}},
    CONSTRAINT: {
        **OFF,
        "schema": {"json_schema": json.dumps(SCHEMA)},
        "regex": {"regex": "[a-p]{12,30}-[0-9]{4}( way)?"},
        "choice": {"choice": inference_pb2.Choices(options=OPTIONS)},
    },
    "n": {"1": {"n": 1}, "3": {"n": 3}},
}
SEARCHED: Values = {
    "width": {"2": {"width": 2}, "4": {"width": 4, "num_return": 4}},
    "length_penalty": {**OFF, "-1": {"length_penalty": -1.0}, "2": {"length_penalty": 2.0}},
    "early_stopping": {
        name: {"early_stopping": number}
        for name, number in inference_pb2.EarlyStopping.items()
        if number
    },
    "ignore_eos": SAMPLED["ignore_eos"],
    "stop ids": SAMPLED["stop ids"],
}
BEAM_FIELDS = frozenset(inference_pb2.BeamParams.DESCRIPTOR.fields_by_name)


def is_refused(pair: Pair) -> bool:
    """Whether the contract has no request with both values."""
    chosen = dict(pair)
    return chosen.get(CONSTRAINT, "off") != "off" and chosen.get(MIN_TOKENS, "off") != "off"


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of values that a row brings together."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def every_pair(values: Values) -> set[Pair]:
    """All that a request may bring together."""
    return {
        frozenset({(one, one_value), (other, other_value)})
        for one, other in combinations(values, 2)
        for one_value in values[one]
        for other_value in values[other]
        if not is_refused(frozenset({(one, one_value), (other, other_value)}))
    }


def make_table(values: Values, seed: int) -> list[Row]:
    """Rows that have every pair at least once."""
    rng = Random(seed)
    left = every_pair(values)
    rows = []
    while left:
        tries = [_make_row(values, left, rng) for _ in range(NUM_TRIES)]
        best = max(tries, key=lambda row: len(pairs_of(row) & left))
        rows.append(best)
        left -= pairs_of(best)
    return rows


def _make_row(values: Values, left: set[Pair], rng: Random) -> Row:
    row: Row = dict(rng.choice(sorted(sorted(pair) for pair in left)))
    others = [name for name in values if name not in row]
    for name in rng.sample(others, len(others)):
        meets = {
            value: [frozenset({(name, value), chosen}) for chosen in row.items()]
            for value in rng.sample(sorted(values[name]), len(values[name]))
        }
        possible = [value for value in meets if not any(map(is_refused, meets[value]))]
        row[name] = max(possible, key=lambda value: len(left.intersection(meets[value])))
    return row


def sampled_request(row: Row, number: int) -> inference_pb2.GenerateRequest:
    """The request of a row of SAMPLED; its prompt begins as all do and is no other's."""
    fields = {k: v for name, value in row.items() for k, v in SAMPLED[name][value].items()}
    return generate_request(f"{SHARED_PROMPT}{number}", max_tokens=NUM_TOKENS, **fields)


def searched_request(row: Row, number: int) -> inference_pb2.GenerateRequest:
    """The request of a row of SEARCHED."""
    fields = {k: v for name, value in row.items() for k, v in SEARCHED[name][value].items()}
    beam = {name: fields.pop(name) for name in BEAM_FIELDS & fields.keys()}
    return generate_request(
        f"{SHARED_PROMPT}b{number}",
        max_tokens=NUM_TOKENS // 2,
        beam=inference_pb2.BeamParams(**beam),
        **fields,
    )


def missing_pairs(rows: Sequence[Row], values: Values) -> set[Pair]:
    """What no row has."""
    return every_pair(values).difference(*map(pairs_of, rows))
