"""Payloads: opaque server state as bytes plus a codec tag (storage section 2).

What `encode` accepts comes back from `decode` equal in type, value and key order, or it is refused at once
with the path to the culprit. Accepted: None, bool, int of any size, float with its bits, str of any code
points, bytes, list, and dict with str keys; exactly these types, no subclasses (so no enum, no named tuple),
nested at most `MAX_DEPTH` deep. Refused: everything else, tuples above all, which would come back as lists.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
import ormsgpack

from gym_ckpt_grpc.protocol.errors import StateCorrupt

MAX_DEPTH = 400
"""Deepest nesting that is stored; every reader of this project can follow it."""

MAX_PAYLOAD = 2**31 - 1
"""Largest payload, in bytes."""

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")

# orjson refuses subclasses, bytes, non-text keys; ormsgpack refuses enums, UUIDs, tuples and Fragment. What
# both accept is exact. Neither is enough alone: orjson writes NaN as null, so its output is thrown away.
_CHECK = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
_WRITE = (
    ormsgpack.OPT_PASSTHROUGH_UUID
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
)


class Codec(enum.IntEnum):
    """How the bytes of a payload are decoded; the numbers of `gymckpt.v1.Codec`."""

    MSGPACK = 1
    JSON = 2
    RAW = 3


@dataclass(frozen=True, slots=True)
class Payload:
    """Encoded state. content_type: of RAW bytes only. origin: file and record it came from, for errors."""

    codec: Codec
    data: bytes
    content_type: str = ""
    origin: str = field(default="", compare=False, repr=False)
    _digest: bytes | None = field(default=None, init=False, compare=False, repr=False)

    def digest(self) -> bytes:
        """sha256 of the bytes, computed once: what was encoded ahead can be digested ahead too, in any thread."""
        if self._digest is None:
            object.__setattr__(self, "_digest", hashlib.sha256(self.data).digest())
        assert self._digest is not None
        return self._digest


class PayloadRefused(ValueError):
    """A value that cannot be kept exactly. path: where in the value, such as `$.messages[3].when`.

    Whoever exports state turns it into EXPORT_FAILED naming the episode.
    """

    def __init__(self, where: str, path: str, problem: str) -> None:
        super().__init__(f"{where + ': ' if where else ''}{path} {problem}")
        self.where = where
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[PayloadRefused], tuple[str, str, str]]:
        return (PayloadRefused, (self.where, self.path, self.problem))


def raw(data: bytes, content_type: str) -> Payload:
    """Bytes that the server encoded itself; they are stored as they are. Raises PayloadRefused."""
    if type(data) is not bytes:
        raise PayloadRefused("", "$", f"is {type(data).__name__}, not bytes")
    if not 1 <= len(content_type) <= 128 or not content_type.isascii() or not content_type.isprintable():
        raise PayloadRefused("", "$", f"has no usable content type: {content_type[:80]!r}")
    return Payload(Codec.RAW, _bounded(data, ""), content_type)


def encode(value: Any, *, where: str = "") -> Payload:
    """Encode a value exactly. where: whose it is, for the error. Raises PayloadRefused."""
    try:
        orjson.dumps(value, option=_CHECK)
        data = ormsgpack.packb(value, option=_WRITE)
    except (TypeError, ValueError, RecursionError):
        return _encode_carefully(value, where)
    return Payload(Codec.MSGPACK, _bounded(data, where))


def decode(payload: Payload, *, where: str = "") -> Any:
    """Decode what `encode` made; RAW bytes come back as they are.

    where: file and record, for the error; the payload's origin by default. Raises StateCorrupt.
    """
    try:
        if payload.codec is Codec.MSGPACK:
            return msgspec.msgpack.decode(payload.data)
        if payload.codec is Codec.JSON:
            return json.loads(
                payload.data.decode("ascii"),
                object_pairs_hook=_restore_object,
                parse_constant=_refuse_constant,
            )
        if payload.codec is Codec.RAW:
            return payload.data
    except (ValueError, TypeError, RecursionError, msgspec.DecodeError, struct.error) as error:
        place = where or payload.origin or "payload"
        raise StateCorrupt(f"{place} cannot be decoded as {payload.codec.name}: {error}") from error
    raise StateCorrupt(f"{where or payload.origin or 'payload'} has an unknown codec {payload.codec!r}")


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > MAX_PAYLOAD:
        raise PayloadRefused(where, "$", f"takes {len(data)} bytes, more than {MAX_PAYLOAD}")
    return data


def _encode_carefully(value: Any, where: str) -> Payload:
    """For what the fast pair refuses: MessagePack if it is exact after all (bytes), else tagged JSON."""
    try:
        plain = _plain(value, [], 1)
    except _Refusal as refusal:
        raise PayloadRefused(where, refusal.path, refusal.problem) from None
    except RecursionError:
        raise PayloadRefused(where, "$", "is nested too deep for the stack of the calling thread") from None
    try:
        return Payload(Codec.MSGPACK, _bounded(ormsgpack.packb(value, option=_WRITE), where))
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(plain, allow_nan=False, separators=(",", ":"), default=bytes.hex)
    return Payload(Codec.JSON, _bounded(text.encode("ascii"), where))


class _Refusal(Exception):
    def __init__(self, trail: list[str | int], problem: str) -> None:
        super().__init__(problem)
        self.path = "$" + "".join(_step(step) for step in trail)
        self.problem = problem


def _step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if step.isidentifier() and len(step) <= 64 else f"[{step[:64]!r}]"


def _plain(value: Any, trail: list[str | int], depth: int) -> Any:
    """The tagged form of a value (see storage.proto). Raises _Refusal with the path to what is refused."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if _is_text(value) else {"$text": value.encode("utf-8", "surrogatepass").hex()}
    if kind is int:
        return value if _MIN_INT <= value <= _MAX_INT else {"$int": format(value, "x")}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"$bytes": value}  # turned into hex only if it really becomes JSON
    if kind is not list and kind is not dict:
        raise _Refusal(trail, f"is of type {kind.__module__}.{kind.__qualname__}, which cannot be kept exactly")
    if depth > MAX_DEPTH:
        raise _Refusal(trail[:8], f"... is nested deeper than {MAX_DEPTH}")
    return _plain_list(value, trail, depth) if kind is list else _plain_dict(value, trail, depth)


def _plain_list(value: list[Any], trail: list[str | int], depth: int) -> list[Any]:
    items = []
    for at, item in enumerate(value):
        trail.append(at)
        items.append(_plain(item, trail, depth + 1))
        trail.pop()
    return items


def _plain_dict(value: dict[Any, Any], trail: list[str | int], depth: int) -> dict[str, Any]:
    # A tagged object nests three levels where the value has one: it must fit the limit all the same.
    odd = any(type(key) is str and (key.startswith("$") or not _is_text(key)) for key in value)
    deeper = depth + (3 if odd else 1)
    items: dict[str, Any] = {}
    for key, item in value.items():
        if type(key) is not str:
            raise _Refusal(trail, f"has a key of type {type(key).__qualname__}; keys must be str")
        trail.append(key)
        items[key] = _plain(item, trail, deeper)
        trail.pop()
    if not odd:
        return items
    return {"$dict": [[_plain(key, trail, deeper), item] for key, item in items.items()]}


def _is_text(text: str) -> bool:
    return text.isascii() or _SURROGATE.search(text) is None


def _restore_object(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0].startswith("$"):
        return _restore_tagged(*pairs[0])
    restored = dict(pairs)
    if len(restored) != len(pairs) or any(key.startswith("$") for key in restored):
        raise ValueError("an object has a key twice, or a tag among other keys")
    return restored


def _restore_tagged(tag: str, inner: Any) -> Any:
    if tag == "$int":
        return int(inner, 16)
    if tag == "$float":
        (number,) = struct.unpack(">d", bytes.fromhex(inner))
        return number
    if tag == "$text":
        return bytes.fromhex(inner).decode("utf-8", "surrogatepass")
    if tag == "$bytes":
        return bytes.fromhex(inner)
    if tag == "$dict":
        restored = dict(inner)
        if len(restored) != len(inner) or any(type(key) is not str for key in restored):
            raise ValueError("a tagged object has a key twice or one that is no text")
        return restored
    raise ValueError(f"unknown tag {tag[:40]!r}")


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
