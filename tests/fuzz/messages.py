"""Random messages of any type of the contracts, and bytes that are nearly one."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (0, 1, 2, 3, 16, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -(2**31))
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-45, 1e38, float("nan"), float("inf"), -float("inf"))
TEXTS = (
    "",
    "a",
    "hello",
    "tiny",
    "user",
    "\0",
    "\U0001f600" * 3,
    "ä" * 70,
    "x" * 300,
    "{}",
    "[a-z]+",
)
LENGTHS = (0, 1, 1, 2, 3, 20, 600)
MAX_DEPTH = 4
BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def perturb(message: Message, chance: random.Random, part: float, depth: int = 0) -> None:
    """Sets about `part` of the fields to something."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() >= part:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE and depth == MAX_DEPTH:
            continue
        if field.is_repeated:
            _fill_list(message, field, chance, depth)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            inner.SetInParent()
            perturb(inner, chance, max(part, 0.3), depth + 1)
        else:
            setattr(message, field.name, _value(field, chance))


def _fill_list(message: Message, field: Any, chance: random.Random, depth: int) -> None:
    items = getattr(message, field.name)
    for _ in range(chance.choice(LENGTHS)):
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                continue
            perturb(items.add(), chance, 0.5, depth + 1)
        else:
            items.append(_value(field, chance))


def _value(field: Any, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return chance.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = chance.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice((0, 1, 2, 3, 77))
    low, high = BITS[kind]
    return min(max(chance.choice(INTEGERS), low), high)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Bytes with some harm done to them: cut, flipped, doubled, or with something put in."""
    harmed = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(harmed) + 1)
        match chance.randrange(4):
            case 0:
                del harmed[at:]
            case 1 if harmed:
                harmed[at % len(harmed)] ^= 1 << chance.randrange(8)
            case 2:
                harmed[at:at] = harmed[: chance.randrange(len(harmed) + 1)]
            case _:
                harmed[at:at] = chance.randbytes(chance.randrange(8))
    return bytes(harmed)
