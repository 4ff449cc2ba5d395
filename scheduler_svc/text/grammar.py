"""What a client constrains its text by, as one grammar in llguidance's form.

Every grammar comes out as Lark with `no_forcing`: where one text alone may follow, the model still
chooses by which tokens it is spelled, so that no mask has to tokenize anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

from scheduler_svc.text.schema_keywords import check_keywords
from shared.errors import InvalidArgument

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_JSON_STYLE = {
    # At most one space after a comma or a colon and no other space: as models write it, and no
    # model can go on with spaces for ever.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


def of_json_schema(schema: str) -> str:
    """JSON that fulfils a schema. Raises InvalidArgument for what is no object in JSON, and for
    keywords that would not be obeyed."""
    field = "json_schema"
    try:
        parsed = json.loads(schema)
    except RecursionError as error:
        raise InvalidArgument(field, "it is nested too deeply") from error
    except ValueError as error:
        raise InvalidArgument(field, f"it is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidArgument(field, "a schema must be an object")
    check_keywords(field, parsed)
    return _of_schema(parsed)


def of_json_object() -> str:
    """Any JSON object."""
    return _of_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """A text that matches a pattern as a whole."""
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return _of_lark(grammar["lark_grammar"])


def of_choice(options: Sequence[str]) -> str:
    """One of some texts, none of them empty."""
    return _of_lark("start: " + " | ".join(json.dumps(o, ensure_ascii=False) for o in options))


def of_lark(grammar: str) -> str:
    """A text of a Lark grammar."""
    return _of_lark(grammar)


def _of_schema(schema: dict[str, Any]) -> str:
    return _of_lark("start: %json " + json.dumps({**schema, "x-guidance": _JSON_STYLE}))


def _of_lark(lark: str) -> str:
    # The option comes last, so that errors tell the client's own lines.
    return json.dumps({"grammars": [{"lark_grammar": lark + _NO_FORCING}]})
