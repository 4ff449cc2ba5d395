"""Refuses JSON schemas with keywords that nobody would obey.

JSON Schema lets an implementation ignore what it doesn't know. Here that would break the promise
that the text fulfils the schema, and a misspelled keyword would go unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shared.errors import InvalidArgument

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema", "$id"}
)
_OF_VALUES = frozenset(
    {"type", "enum", "const", "$ref", "required", "minProperties", "maxProperties"}
    | {"minItems", "maxItems", "minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_OF_SCHEMA = frozenset({"additionalProperties", "items"})
_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_OF_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_KNOWN = _ANNOTATIONS | _OF_VALUES | _OF_SCHEMA | _OF_SCHEMAS | _OF_NAMED_SCHEMAS


_Place = tuple["_Place", str] | None
"""The place above, and a step of a JSON pointer: so a long name is held once, whatever is below."""


def check_keywords(field: str, schema: dict[str, Any]) -> None:
    """Raises InvalidArgument for the first unknown keyword in `schema` and below it; it tells the
    place as a JSON pointer (RFC 6901)."""
    left: list[tuple[_Place, Any]] = [(None, schema)]
    while left:
        place, item = left.pop()
        if not isinstance(item, dict):
            continue  # true, false, or what the compiler refuses
        for keyword in item:
            if keyword not in _KNOWN:
                raise InvalidArgument(field, f"at {_pointer(place)}: {keyword!r} is not supported")
        left.extend(_below(place, item))


def _below(place: _Place, schema: dict[str, Any]) -> Iterator[tuple[_Place, Any]]:
    for keyword, value in schema.items():
        below = (place, keyword)
        if keyword in _OF_SCHEMA and not isinstance(value, list):
            yield below, value
        elif keyword in _OF_SCHEMA | _OF_SCHEMAS and isinstance(value, list):
            yield from (((below, str(index)), one) for index, one in enumerate(value))
        elif keyword in _OF_NAMED_SCHEMAS and isinstance(value, dict):
            yield from (((below, name), one) for name, one in value.items())


def _pointer(place: _Place) -> str:
    steps = []
    while place is not None:
        place, step = place
        steps.append("/" + step.replace("~", "~0").replace("/", "~1"))
    return "".join(reversed(steps)) or "/"
