"""Random state of every kind that can be stored, and what cannot, from a seeded generator."""

from __future__ import annotations

import datetime
import decimal
import enum
import random
import struct
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record, encode, raw
from gym_ckpt_grpc.storage.payloads import MAX_DEPTH

_INTS = (0, 1, -1, 127, 128, -32, -33, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_HUGE = (2**64, -(2**63) - 1, 2**70, -(2**70), 10**400, -(10**1300))
_FLOATS = (0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1, 1e16, 2.0**53, -1.5)
_NANS = (0x7FF8000000000000, 0xFFF8000000000000, 0x7FF0000000000ABC, 0x7FFFFFFFFFFFFFFF, 0xFFF0000000000001)
_INFINITIES = (0x7FF0000000000000, 0xFFF0000000000000)
_TEXTS = (
    "",
    "a",
    "state",
    "$",
    "$int",
    "$dict",
    "$text",
    "$float",
    "$bytes",
    "\x00",
    "\x1f\x7f",
    '"\\/',
    "\ufeff",
    "\uffff",
)
_TEXTS_BEYOND = ("é", "e\u0301", "😀", "\U0010ffff", "\u2028\u2029", "日本語", "\u202eabc", "x" * 300)
_SURROGATES = ("\ud800", "\udfff", "\ud83d\ude00", "a\udc80b", "$\ud800")


def bits(number: int) -> float:
    """The float with these 64 bits."""
    value: float = struct.unpack(">d", struct.pack(">Q", number))[0]
    return value


class Values:
    """A generator of values that `encode` takes. Weights favour what lies at the edge of a codec."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.odd = 0.0
        """How often a scalar is one that MessagePack cannot carry."""

    def value(self) -> Any:
        """Any structure: mostly small, sometimes deep, wide or long."""
        roll = self.rng.random()
        self.odd = self.rng.choice((0.0, 0.0, 0.0, 0.05, 0.4))
        if roll < 0.06:
            return self.deep(self.rng.choice((10, 100, 253, 254, 255, 256, MAX_DEPTH // 3, MAX_DEPTH // 3 - 1)))
        if roll < 0.08:
            return self.long()
        if roll < 0.12:
            return self.scalar()
        return self.tree(self.rng.randint(1, 5))

    def tree(self, depth: int) -> Any:
        if depth == 0 or self.rng.random() < 0.25:
            return self.scalar()
        count = self.rng.choice((0, 1, 1, 2, 3, 5))
        if self.rng.random() < 0.4:
            return [self.tree(depth - 1) for _ in range(count)]
        return {self.text(): self.tree(depth - 1) for _ in range(count)}

    def deep(self, depth: int) -> Any:
        """Nested so deep; an odd key takes three levels, of which MAX_DEPTH leaves room for a third."""
        value = self.scalar()
        for _ in range(depth):
            value = [value] if self.rng.random() < 0.5 else {self.text(): value}
        return value

    def long(self) -> Any:
        """Long text, bytes, lists and objects, beyond the lengths that codecs write in one byte or two."""
        length = self.rng.choice((31, 32, 255, 256, 65_535, 65_536))
        kind = self.rng.randrange(4)
        if kind == 0:
            return self.rng.choice(("x", "é", "😀")) * length
        if kind == 1:
            return self.rng.randbytes(length)
        if kind == 2:
            return [self.rng.choice((None, True, 1.5, number)) for number in range(min(length, 3000))]
        return {f"key {number}": number for number in range(min(length, 3000))}

    def scalar(self) -> Any:
        if self.rng.random() < self.odd:
            return self.rng.choice((self.rng.choice(_HUGE), self.rng.choice(_SURROGATES), -self.rng.getrandbits(300)))
        kind = self.rng.randrange(8)
        if kind == 0:
            return self.rng.choice((None, True, False))
        if kind in (1, 2):
            return self.rng.choice((self.rng.choice(_INTS), self.rng.getrandbits(64), -self.rng.getrandbits(63)))
        if kind in (3, 4):
            return self.floating()
        if kind == 5:
            return self.rng.randbytes(self.rng.choice((0, 1, 3, 40)))
        return self.text()

    def floating(self) -> float:
        roll = self.rng.random()
        if roll < 0.4:
            return self.rng.choice(_FLOATS)
        if roll < 0.7:
            return bits(self.rng.choice((*_NANS, *_INFINITIES)))
        return bits(self.rng.getrandbits(64))

    def text(self) -> str:
        roll = self.rng.random()
        if roll < self.odd / 4:
            return self.rng.choice(_SURROGATES)
        if roll < 0.5:
            return self.rng.choice(_TEXTS)
        if roll < 0.7:
            return self.rng.choice(_TEXTS_BEYOND)
        return "".join(chr(self.rng.choice((self.rng.randrange(128), self.rng.randrange(0xD800)))) for _ in range(5))


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    pass


class Number(int):
    pass


class Blob(bytes):
    pass


class Items(list):  # type: ignore[type-arg]
    pass


_Pair = namedtuple("_Pair", "a b")

FOREIGN: tuple[Callable[[], Any], ...] = (
    tuple,
    lambda: (1, 2),
    lambda: _Pair(1, 2),
    lambda: datetime.datetime(2020, 1, 1),
    lambda: datetime.date(2020, 1, 1),
    lambda: datetime.timedelta(1),
    lambda: uuid.UUID(int=7),
    lambda: decimal.Decimal("1.5"),
    lambda: Colour.RED,
    lambda: Word("text"),
    lambda: Number(3),
    lambda: Blob(b"bytes"),
    lambda: Items([1]),
    lambda: OrderedDict(a=1),
    set,
    lambda: frozenset({1}),
    lambda: bytearray(b"x"),
    lambda: memoryview(b"x"),
    lambda: 1j,
    object,
    lambda: {1: "a"},
    lambda: {b"a": 1},
    lambda: {None: 1},
    lambda: {Word("a"): 1},
    lambda: {("a",): 1},
    lambda: range(3),
)
"""What must be refused wherever it stands."""


def spoiled(value: Any, foreign: Any, rng: random.Random) -> Any:
    """The value with something foreign at a random place in it."""
    if type(value) is list and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], spoiled(value[at], foreign, rng), *value[at + 1 :]]
    if type(value) is dict and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: spoiled(value[key], foreign, rng)}
    if type(value) is list:
        return [*value, foreign]
    return foreign


def record(values: Values, number: int) -> tuple[Record, dict[str, Any]]:
    """A record of up to three payloads, and the value of each."""
    rng = values.rng
    state: dict[str, Any] = {}
    payloads = {}
    for name in rng.sample(("state", "conversation", "é", "x" * 256), rng.choice((0, 1, 1, 2, 3))):
        if rng.random() < 0.1:
            state[name] = rng.randbytes(rng.choice((0, 1, 500)))
            payloads[name] = raw(state[name], "application/x-test")
        else:
            state[name] = values.value()
            payloads[name] = encode(state[name])
    made = Record(
        EpisodeId(f"roll-{number // 2}", number % 5),
        rng.choice(("agent_session", "s", "schéma")),
        rng.choice((1, 2, 2**32 - 1)),
        owner=rng.choice(("", "worker-1", "é")),
        revision=rng.choice((None, 0, 7, 2**64 - 2)),
        fields={"turn": rng.choice((None, 0, -(2**63), 2**64 - 1, 0.5, "text", [1, "a", None]))} if number % 3 else {},
        payloads=payloads,
    )
    return made, state
