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


def check_keywords(field: str, schema: dict[str, Any]) -> None:
    """Raises InvalidArgument for the first unknown keyword in `schema` and below it; it tells the
    place as a JSON pointer (RFC 6901)."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        place, item = left.pop()
        if not isinstance(item, dict):
            continue  # true, false, or what the compiler refuses
        for keyword in item:
            if keyword not in _KNOWN:
                raise InvalidArgument(field, f"at {place or '/'}: {keyword!r} is not supported")
        left.extend(_below(place, item))


def _below(place: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in _OF_SCHEMA and not isinstance(value, list):
            yield f"{place}/{keyword}", value
        elif keyword in _OF_SCHEMA | _OF_SCHEMAS and isinstance(value, list):
            yield from ((f"{place}/{keyword}/{index}", one) for index, one in enumerate(value))
        elif keyword in _OF_NAMED_SCHEMAS and isinstance(value, dict):
            for name, one in value.items():
                yield f"{place}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", one
