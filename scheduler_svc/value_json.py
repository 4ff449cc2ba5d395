"""Plain values of the core to and from JSON, by their types' annotations: dataclasses, enums by
name, bytes as hexadecimal, sequences, sets, mappings by text, and what JSON has itself."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from types import UnionType
from typing import Any


def to_json(value: object) -> Any:
    """Something that `json` can write. Raises TypeError for what is none of the above."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in _fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, AbstractSet):
        return sorted(to_json(item) for item in value)
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} is no plain value")


def from_json(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `to_json` wrote. Raises TypeError, ValueError or KeyError for
    what can't be one."""
    kind = getattr(kind, "__supertype__", kind)  # NewType
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        if data is None:
            return None
        return from_json(next(item for item in arguments if item is not type(None)), data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_json(hints[name], item) for name, item in data.items()})
    if origin is not None and issubclass(origin, Mapping):
        return {name: from_json(arguments[1], item) for name, item in data.items()}
    if origin is frozenset:
        return frozenset(from_json(arguments[0], item) for item in data)
    if origin is not None:
        return tuple(from_json(arguments[0], item) for item in data)
    if issubclass(kind, Enum):
        return kind[data]
    return bytes.fromhex(data) if kind is bytes else kind(data)


def _fields(value: object) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(typing.cast(Any, value))
