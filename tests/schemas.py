"""Fifty JSON schemas of many kinds, each with texts that are short enough to be generated."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(**properties: Any) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def a_list(of: Any, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": of, "minItems": least, "maxItems": most}


def number(lowest: float, highest: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": lowest, "maximum": highest}


POINT = record(x=number(-9, 9), y=number(-9, 9))
SCHEMAS: dict[str, Schema] = {
    # values
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "digit": number(0, 9),
    "negative": number(-120, -100),
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 40},
    "fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
    "number": number(0, 1, "number") | {"multipleOf": 0.001},
    "const": {"const": {"answer": [42, None, "π"]}},
    "word": text(8, minLength=2),
    "empty string": text(0),
    # enums and unicode
    "colour": {"enum": ["red", "green", "blue"]},
    "mixed enum": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "unicode enum": {"enum": ["grün", "青", "красный", "🟥", "e\u0301"]},
    "escapes": {"enum": ['quote " here', "back\\slash", "line\nbreak", "tab\there", "\u0007"]},
    "shared beginnings": {"enum": ["a", "ab", "abc", "abcd"]},
    "unicode names": record(größe=number(1, 3), 名前=text(4)),
    "names to escape": record(**{'a "b"': {"type": "boolean"}, "c\\d": {"type": "null"}}),
    # strings
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "loose pattern": {"type": "string", "pattern": "[0-9]", "maxLength": 6},
    "unicode pattern": {"type": "string", "pattern": "^[äöüß]{1,4}$"},
    "alternatives": {"type": "string", "pattern": "^(cat|dog|bird)s?$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time", "maxLength": 14},
    "date-time": {"type": "string", "format": "date-time", "maxLength": 25},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email", "maxLength": 20},
    # arrays
    "digits": a_list(number(0, 9), 5),
    "booleans": a_list({"type": "boolean"}, 4, 2),
    "empty array": a_list(True, 0),
    "words": a_list(text(6, minLength=1), 3, 1),
    "matrix": a_list(a_list(number(0, 9), 2, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [number(0, 9), text(4)], "items": False}
    | {"minItems": 2},
    # objects
    "empty object": record(),
    "person": record(name=text(12), age=number(0, 130)),
    "optional": {"type": "object", "properties": {"a": number(0, 9), "b": number(0, 9)}}
    | {"required": ["b"], "additionalProperties": False},
    "nested": record(a=record(b=record(c=record(d={"type": "boolean"})))),
    "points": a_list(POINT, 2, 1),
    "book": record(title=text(16), tags=a_list({"enum": ["new", "old", "rare"]}, 2), price=POINT),
    "named by pattern": {"type": "object", "patternProperties": {"^k[0-9]$": number(0, 9)}}
    | {"additionalProperties": False, "minProperties": 1, "maxProperties": 2},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 0},
    # combinations
    "any of types": {"type": ["boolean", "null"]},
    "anyOf": {"anyOf": [number(0, 9), {"enum": ["none", "all"]}]},
    "anyOf objects": {"anyOf": [record(kind={"const": "a"}), record(kind={"const": "b"}, n=POINT)]},
    "allOf": {"allOf": [number(0, 50), {"minimum": 10}, {"multipleOf": 5}]},
    "oneOf": {"oneOf": [record(t={"const": "a"}), number(0, 9), {"type": "null"}]},
    # references
    "$ref": {"$defs": {"p": POINT}, **record(**{"from": {"$ref": "#/$defs/p"}})},
    "$ref of definitions": {
        "definitions": {"n": number(1, 3)},
        **a_list({"$ref": "#/definitions/n"}, 3),
    },
    "recursive": {
        "$defs": {"node": record(v=number(0, 9), n={"anyOf": [{"type": "null"}, {"$ref": "#"}]})},
        "$ref": "#/$defs/node",
    },
}
assert len(SCHEMAS) == 50
