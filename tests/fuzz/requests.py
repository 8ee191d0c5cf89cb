"""Odd requests of every kind: raw bytes, damaged messages, and well-formed messages with impossible fields."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

TEXTS: Sequence[str] = (
    "",
    "c1",
    "r-a1",
    "r-a01",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "a\nb",
    "a\0b",
    "é",
    "-x",
    "x" * 128,
    "x" * 129,
    "x" * 257,
    "x" * 100_000,
    "file:///",
    "file:///etc/checkpoints/c1",
    "file:///tmp/../etc/checkpoints/c1",
    "file://host/tmp/checkpoints/c1",
    "s3://bucket/checkpoints/c1",
    "%2e%2e/%2e%2e",
    "0" * 64,
    "A" * 64,
)
NUMBERS: Sequence[int] = (0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**63 - 1)
SIGNED: Sequence[int] = (*NUMBERS[:3], -1, -(2**31), 2**31 - 1)
DEADLINES: Sequence[float | None] = (None, 5.0, 5.0, 5.0, 0.05, 0.0, -1.0, 1e9)


def fill(message: Message, rng: random.Random, depth: int = 0) -> Message:
    """Set random fields of a message to odd values, the nested ones too."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.25:
            continue
        if field.is_repeated:
            _fill_list(message, field, rng, depth)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            fill(getattr(message, field.name), rng, depth + 1)
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, _scalar(field, rng))
    return message


def _fill_list(message: Message, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    values: Any = getattr(message, field.name)
    count = rng.choice((0, 1, 2, 3, 50, 1001 if depth < 3 else 2))
    for _ in range(count):
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            fill(values.add(), rng, depth + 1)
        else:
            values.append(_scalar(field, rng))


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(TEXTS) if field.type == FieldDescriptor.TYPE_STRING else rng.randbytes(rng.randrange(40))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_ENUM):
        return rng.choice(SIGNED)
    if kind == FieldDescriptor.CPPTYPE_UINT32:
        return rng.choice([n for n in NUMBERS if n < 2**32])
    if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64):
        return rng.choice(NUMBERS)
    return rng.choice((0.0, -1.0, float("nan"), float("inf")))


def odd_bytes(valid: Callable[[], Message], rng: random.Random) -> bytes:
    """One request as bytes: noise, a damaged valid one, an odd one, or a valid one."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    message = valid()
    if kind < 7:
        fill(message, rng)
    raw = bytearray(message.SerializeToString())
    if kind in (7, 8) and raw:
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def odd_metadata(rng: random.Random) -> list[tuple[str, str | bytes]]:
    """Headers beside the request; some of them twice, long or binary."""
    choices: list[list[tuple[str, str | bytes]]] = [
        [],
        [],
        [("x-odd", "v" * 2000)],
        [("x-odd-bin", rng.randbytes(30))],
        [("authorization", "Bearer " + "x" * 500)],
        [("authorization", "Basic eA=="), ("authorization", "Bearer y")],
        [("grpc-tags-bin", b"\0\1"), ("x-odd", " ")],
    ]
    return rng.choice(choices)
