"""Whatever a model draws of the masks, the text fulfils the constraint; what can't be had is
refused with its field."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema
import pytest

from scheduler_svc.core.constraint import ConstraintBroken, TokenConstraint
from scheduler_svc.text import grammar
from scheduler_svc.text.compile_guard import OutOfTime
from scheduler_svc.text.constraint_compiler import ConstraintCompiler
from scheduler_svc.text.tokenizer import TextModel
from scheduler_svc.text.vocabulary import Vocabulary
from shared.errors import InvalidArgument
from tests.masks import ids_of
from tests.schemas import SCHEMAS

EOS = 2


@pytest.fixture(scope="module")
def compiler(smollm: TextModel) -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(smollm.vocabulary)
    yield compiler
    compiler.close()


def walk(constraint: TokenConstraint, model: TextModel, rng: Random) -> str:
    """The text of tokens drawn at random, short ones preferred, up to an end."""
    token_ids: list[int] = []
    for _ in range(400):
        allowed = ids_of(constraint.mask)
        token = min(rng.choices(allowed, k=3))
        if token == EOS:
            break
        token_ids.append(token)
        if not constraint.accept(token):
            break
    else:
        pytest.fail(f"it never ends: {model.decode(token_ids, False)}")
    return model.decode(token_ids, skip_special_tokens=True)


def compiled(compiler: ConstraintCompiler, source: str) -> TokenConstraint:
    return compiler.compile("field", source, [EOS])


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_walk_is_json_of_the_schema(
    name: str, compiler: ConstraintCompiler, smollm: TextModel
) -> None:
    schema = SCHEMAS[name]
    check = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    constraint = compiled(compiler, grammar.of_json_schema(json.dumps(schema)))
    for seed in range(3):
        text = walk(constraint.copy(), smollm, Random(seed))
        check.validate(json.loads(text))


@pytest.mark.parametrize("pattern", ["[a-c]{3}/\\d{2}", "(yes|no)!?", 'é+\\n"x"', "a{2,4}b*"])
def test_every_walk_matches_the_pattern(
    pattern: str, compiler: ConstraintCompiler, smollm: TextModel
) -> None:
    constraint = compiled(compiler, grammar.of_regex(pattern))
    for seed in range(5):
        text = walk(constraint.copy(), smollm, Random(seed))
        assert re.fullmatch(pattern, text), text


def test_a_choice_is_one_of_the_texts(compiler: ConstraintCompiler, smollm: TextModel) -> None:
    """One may begin with another; then the model says where it ends."""
    options = ["yes", "yes sir", "nö 🙂", 'quote " and \\', "two\nlines", "/slash/", "a\u2028b"]
    constraint = compiled(compiler, grammar.of_choice(options))
    assert {walk(constraint.copy(), smollm, Random(seed)) for seed in range(60)} == set(options)


def test_a_grammar_gives_its_texts(compiler: ConstraintCompiler, smollm: TextModel) -> None:
    source = 'start: sum\nsum: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]?/'
    constraint = compiled(compiler, grammar.of_lark(source))
    for seed in range(5):
        text = walk(constraint.copy(), smollm, Random(seed))
        assert re.fullmatch(r"\d\d?(\+\d\d?){1,3}", text)


def test_any_object_is_json(compiler: ConstraintCompiler, smollm: TextModel) -> None:
    constraint = compiled(compiler, grammar.of_json_object())
    for text in ('{"a": [1, {"b":null}], "c": "ü"}', "{}"):
        one = constraint.copy()
        token_ids = smollm.encode(text, add_special_tokens=False)
        goes_on = [one.accept(token) for token in token_ids]
        assert goes_on == [True] * (len(token_ids) - 1) + [False]


def test_the_end_is_allowed_where_the_text_is_complete_and_only_there(
    compiler: ConstraintCompiler, smollm: TextModel
) -> None:
    source = grammar.of_regex("ab?c?")
    a, b, c = (smollm.encode(letter)[0] for letter in "abc")
    for ends, others in (([EOS], [0, 1]), ([], [0, 1, EOS]), ([EOS, 0], [1])):
        constraint = compiler.compile("regex", source, ends)
        assert not {*ends, *others} & set(ids_of(constraint.mask))
        assert constraint.accept(a)
        assert set(ends) < set(ids_of(constraint.mask))
        assert not set(others) & set(ids_of(constraint.mask))
        assert constraint.copy().accept(b)
        assert not constraint.accept(c), "nothing can follow"


def test_a_token_that_the_mask_has_not_breaks_it(
    compiler: ConstraintCompiler, smollm: TextModel
) -> None:
    constraint = compiled(compiler, grammar.of_regex("abc"))
    with pytest.raises(ConstraintBroken):
        constraint.accept(smollm.encode("x")[0])


def test_a_grammar_that_leads_nowhere_breaks(
    compiler: ConstraintCompiler, smollm: TextModel
) -> None:
    constraint = compiled(compiler, grammar.of_lark('start: "a" x\nx: x "b"'))
    with pytest.raises(ConstraintBroken, match="no text fulfils it"):
        constraint.accept(smollm.encode("a")[0])


def test_a_constraint_that_becomes_too_complex_breaks(
    compiler: ConstraintCompiler, smollm: TextModel
) -> None:
    """FIELD-FAILURES part 4: a bad pattern. This one needs ever more states."""
    constraint = compiled(compiler, grammar.of_regex("(.*a.{20}|.*b.{18}|.*c.{22})"))
    rng = Random(1)
    with pytest.raises(ConstraintBroken):
        for _ in range(2000):
            assert constraint.accept(rng.choice(ids_of(constraint.mask)))


def test_ids_that_stand_for_nothing_are_never_allowed(smollm: TextModel) -> None:
    """Vocabularies are padded, and may lack bytes of a text; then nothing can follow."""
    letters = Vocabulary(
        smollm.vocabulary.encoder, [b"a", b"", b"b", b"<s>", b""], frozenset({3}), False, None, {}
    )
    compiler = ConstraintCompiler(letters)
    try:
        constraint = compiler.compile("regex", grammar.of_regex("[ab]{2}c?"), [3])
        assert ids_of(constraint.mask) == [0, 2]
        assert constraint.accept(0)
        assert not constraint.accept(2), "no token spells a c: the text is complete"
        with pytest.raises(InvalidArgument, match="no text"):
            compiler.compile("regex", grammar.of_regex("c"), [3])
    finally:
        compiler.close()


def chain(length: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


HOSTILE = {
    "no JSON": lambda: grammar.of_json_schema("{"),
    "no object": lambda: grammar.of_json_schema("[]"),
    "always false": lambda: grammar.of_json_schema("false"),
    "deep JSON": lambda: grammar.of_json_schema('{"items":' * 5000 + "true" + "}" * 5000),
    "deeper JSON": lambda: grammar.of_json_schema("[" * 60_000),
    "unknown keyword": lambda: grammar.of_json_schema('{"maxlength": 3}'),
    "unknown keyword below": lambda: grammar.of_json_schema('{"anyOf": [{"items": {"if": {}}}]}'),
    "options of the library": lambda: grammar.of_json_schema('{"x-guidance": {"lenient": true}}'),
    "unsupported": lambda: grammar.of_json_schema('{"not": {"type": "string"}}'),
    "unknown format": lambda: grammar.of_json_schema('{"type": "string", "format": "moon"}'),
    "contradiction": lambda: grammar.of_json_schema('{"type": "integer", "enum": ["a"]}'),
    "endless reference": lambda: grammar.of_json_schema('{"$ref": "#"}'),
    "foreign reference": lambda: grammar.of_json_schema('{"$ref": "http://localhost/x"}'),
    "product of choices": lambda: grammar.of_json_schema(
        json.dumps({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(20)]})
    ),
    "patterns at once": lambda: grammar.of_json_schema(
        json.dumps(
            {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}$"} for i in range(9, 19)]}
        )
    ),
    "bad pattern": lambda: grammar.of_json_schema('{"type": "string", "pattern": "("}'),
    "look-ahead": lambda: grammar.of_regex("(?=a)b"),
    "back-reference": lambda: grammar.of_regex("(a)\\1"),
    "deep pattern": lambda: grammar.of_regex("(" * 20_000 + "a" + ")" * 20_000),
    "empty text alone": lambda: grammar.of_regex("()"),
    "no grammar": lambda: grammar.of_lark("start: ("),
    "deep grammar": lambda: grammar.of_lark("start: " + "(" * 20_000),
    "unknown rule": lambda: grammar.of_lark("start: x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_ones_are_refused_with_their_field(name: str, compiler: ConstraintCompiler) -> None:
    """FIELD-FAILURES part 4: a bad pattern in a schema."""
    with pytest.raises(InvalidArgument) as refusal:
        compiled(compiler, HOSTILE[name]())
    assert refusal.value.field in ("field", "json_schema")
    assert 0 < len(refusal.value.description) < 400


@pytest.mark.parametrize(
    "source",
    [
        chain(3000),  # uses up a stack
        "start: A\nA: " + " & ".join(f"/.*a.{{{i % 20}}}/" for i in range(50)),  # takes seconds
    ],
    ids=["stack", "time"],
)
def test_what_costs_too_much_is_refused_and_the_next_one_compiles(
    source: str, compiler: ConstraintCompiler
) -> None:
    with pytest.raises((OutOfTime, InvalidArgument)):
        compiler.compile_quickly("field", grammar.of_lark(source), [EOS])
    with pytest.raises(InvalidArgument, match="too much time or memory"):
        compiled(compiler, grammar.of_lark(source))
    again = compiler.compile_quickly("field", grammar.of_regex("a+b"), [EOS])
    assert again.mask == compiled(compiler, grammar.of_regex("a+b")).mask


def test_costly_looking_ones_that_are_not_compile(compiler: ConstraintCompiler) -> None:
    """FIELD-FAILURES part 4: patterns that ruin backtracking engines cost this one nothing."""
    for pattern in (
        "(a+)+b",
        "(a|aa)+",
        "((a{1,100}){1,100}){1,100}",
        "(.*)(.*)(.*)x",
        "a{1,60000}",
    ):
        assert compiled(compiler, grammar.of_regex(pattern)).mask is not None


def test_keywords_name_their_place() -> None:
    schema = {"properties": {"a/b": {"prefixItems": [True, {"nullable": True}]}}}
    with pytest.raises(InvalidArgument, match="at /properties/a~1b/prefixItems/1: 'nullable'"):
        grammar.of_json_schema(json.dumps(schema))


def test_a_long_name_with_much_below_it_takes_no_more_memory() -> None:
    below: dict[str, Any] = {f"{i}": {} for i in range(3300)}
    schema = json.dumps({"properties": {"a" * 32_000: {"properties": below}}})
    tracemalloc.start()
    try:
        grammar.of_json_schema(schema)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100 * len(schema)
