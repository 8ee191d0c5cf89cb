"""Payloads: opaque server state as bytes plus a codec tag (storage section 2).

What `encode` accepts comes back from `decode` equal in type, value and key order, or it is refused at once
with the path to the culprit. Accepted: None, bool, int of any size, float with its bits, str of any code
points, bytes, list, and dict with str keys; exactly these types, no subclasses (so no enum, no named tuple),
nested at most `MAX_DEPTH` deep. Refused: everything else, tuples above all, which would come back as lists.

A value must not change while it is encoded. If another thread changes it all the same, then what is stored can be
read, and holds nothing but the types above; where the value was written by the fast pair it is the value as it was at
one moment, since that write is one call under the interpreter lock. A bytearray put in between check and write is the
one thing that comes back as another type, bytes.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
import struct
from typing import Any, cast

import msgspec
import orjson
import ormsgpack

from gym_ckpt_grpc.protocol.errors import StateCorrupt

MAX_DEPTH = 400
"""Deepest nesting that is stored; every reader of this project can follow it."""

MAX_PAYLOAD = 2**31 - 1
"""Largest payload, in bytes."""


_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
_EXACT = frozenset({bool, str, int, float, bytes})
_SURROGATE = re.compile("[\ud800-\udfff]")

# orjson refuses subclasses, non-text keys, bytearrays; ormsgpack refuses enums, UUIDs, tuples and Fragment. What
# both accept is exact. Neither is enough alone: orjson writes NaN as null, so its output is thrown away.
# Bytes, which orjson does not know, it hands to a function that takes nothing else; one written in C, so that no
# other thread runs in the middle of the check. Subclasses of bytes, which that lets pass, ormsgpack refuses.
_BYTES = bytes.__len__
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


_MSGPACK = Codec.MSGPACK  # looking up a member of an enum takes longer than making a payload


class Payload(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Encoded state. content_type: of RAW bytes only. known_digest: what `digest` gave, if it was asked.

    Equal to another of the same codec, bytes and content type.
    """

    codec: Codec
    data: bytes
    content_type: str = ""
    known_digest: bytes | None = None

    def digest(self) -> bytes:
        """sha256 of the bytes, computed once: what was encoded ahead can be digested ahead too, in any thread."""
        if self.known_digest is not None:
            return self.known_digest
        digest = hashlib.sha256(self.data).digest()
        msgspec.structs.force_setattr(self, "known_digest", digest)
        return digest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Payload):
            return NotImplemented
        return (self.codec, self.data, self.content_type) == (other.codec, other.data, other.content_type)

    def __hash__(self) -> int:
        return hash((self.codec, self.data, self.content_type))

    def __repr__(self) -> str:
        # Without its bytes: what a rollout said or holds is in no log, whoever logs an object that has one.
        return f"Payload({self.codec!r}, {self.content_type!r}) of {len(self.data)} bytes"


class DecodedPayload(Payload, frozen=True, eq=False):
    """A payload whose value a reader has made already, and whose bytes are gone: a restore holds its state once.

    It is decoded once: its value is whoever's asked first, to be changed at will. It cannot be stored or compared.
    """

    value: Any = None

    def take(self) -> Any:
        """The value. Raises ValueError the second time."""
        value = self.value
        if value is _TAKEN:
            raise ValueError("a value that was decoded while it was read is handed out once")
        msgspec.structs.force_setattr(self, "value", _TAKEN)
        return value

    def __repr__(self) -> str:
        return f"DecodedPayload({self.codec!r}, {self.content_type!r})"


_TAKEN = object()


def decoded_payload(payload: Payload, value: Any) -> Payload:
    """What is left of a payload, given what `decode` made of it. RAW ones stay: their bytes are their value."""
    if payload.codec is Codec.RAW:
        return payload
    return DecodedPayload(payload.codec, _GONE, payload.content_type, None, value)


_GONE = cast(bytes, None)
"""In place of bytes: whatever wants to store or measure them fails at once."""


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
        orjson.dumps(value, _BYTES, _CHECK)
        data = ormsgpack.packb(value, option=_WRITE)
    except (TypeError, ValueError, RecursionError):
        return _encode_carefully(value, where)
    if len(data) > MAX_PAYLOAD:
        _bounded(data, where)
    return Payload(_MSGPACK, data)


def decode(payload: Payload, *, where: str = "") -> Any:
    """Decode what `encode` made; RAW bytes come back as they are.

    where: file and record, for the error. Raises StateCorrupt; ValueError for a DecodedPayload that was taken.
    """
    if type(payload) is DecodedPayload:
        return payload.take()
    try:
        if payload.codec is _MSGPACK:
            return _unpack(payload.data)
        if payload.codec is Codec.JSON:
            return json.loads(
                payload.data.decode("ascii"),
                object_pairs_hook=_restore_object,
                parse_constant=_refuse_constant,
            )
        if payload.codec is Codec.RAW:
            return payload.data
    except (ValueError, TypeError, RecursionError, msgspec.DecodeError, struct.error) as error:
        raise StateCorrupt(f"{where or 'a payload'} cannot be decoded as {payload.codec.name}: {error}") from error
    raise StateCorrupt(f"{where or 'a payload'} has an unknown codec {payload.codec!r}")


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"it has an extension of type {code}")


_unpack = msgspec.msgpack.Decoder(ext_hook=_refuse_extension).decode


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > MAX_PAYLOAD:
        raise PayloadRefused(where, "$", f"takes {len(data)} bytes, more than {MAX_PAYLOAD}")
    return data


def _encode_carefully(value: Any, where: str) -> Payload:
    """For what the fast pair refuses: MessagePack if it is exact after all (deep nesting), else tagged JSON."""
    try:
        codec, data = _pack(_copy(value, [], 1))
    except _Refusal as refusal:
        raise PayloadRefused(where, refusal.path, refusal.problem) from None
    except RecursionError:
        raise PayloadRefused(where, "$", "is nested too deep for the stack of the calling thread") from None
    except RuntimeError as error:
        raise PayloadRefused(where, "$", f"was changed while it was encoded: {error}") from None
    return Payload(codec, _bounded(data, where))


def _pack(copy: Any) -> tuple[Codec, bytes]:
    try:
        return Codec.MSGPACK, ormsgpack.packb(copy, option=_WRITE)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(tagged(copy), allow_nan=False, separators=(",", ":"))
    return Codec.JSON, text.encode("ascii")


class _Refusal(Exception):
    def __init__(self, trail: list[str | int], problem: str) -> None:
        super().__init__(problem)
        self.path = "$" + "".join(_step(step) for step in trail)
        self.problem = problem


def _step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if step.isidentifier() and len(step) <= 64 else f"[{step[:64]!r}]"


def _copy(value: Any, trail: list[str | int], depth: int) -> Any:
    """The value, with lists and dicts that nobody else has. Raises _Refusal with the path to what is refused."""
    kind = type(value)
    if value is None or kind in _EXACT:
        return value
    if kind is not list and kind is not dict:
        raise _Refusal(trail, f"is of type {kind.__module__}.{kind.__qualname__}, which cannot be kept exactly")
    if depth > MAX_DEPTH:
        raise _Refusal(trail[:8], f"... is nested deeper than {MAX_DEPTH}")
    return _copy_list(value, trail, depth) if kind is list else _copy_dict(value, trail, depth)


def _copy_list(value: list[Any], trail: list[str | int], depth: int) -> list[Any]:
    items = []
    for at, item in enumerate(value):
        trail.append(at)
        items.append(_copy(item, trail, depth + 1))
        trail.pop()
    return items


def _copy_dict(value: dict[Any, Any], trail: list[str | int], depth: int) -> dict[str, Any]:
    # A tagged object nests three levels where the value has one: it must fit the limit all the same.
    deeper = depth + (3 if any(type(key) is str and _is_odd(key) for key in value) else 1)
    items: dict[str, Any] = {}
    for key, item in value.items():
        if type(key) is not str:
            raise _Refusal(trail, f"has a key of type {type(key).__qualname__}; keys must be str")
        trail.append(key)
        items[key] = _copy(item, trail, deeper)
        trail.pop()
    return items


def tagged(value: Any) -> Any:
    """A value that `encode` accepts, as the plain JSON that the head of storage.proto describes."""
    kind = type(value)
    if kind is str:
        return value if _is_text(value) else {"$text": value.encode("utf-8", "surrogatepass").hex()}
    if kind is int:
        return value if _MIN_INT <= value <= _MAX_INT else {"$int": format(value, "x")}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if kind is list:
        return [tagged(item) for item in value]
    if kind is not dict:
        return value
    if any(map(_is_odd, value)):
        return {"$dict": [[tagged(key), tagged(item)] for key, item in value.items()]}
    return {key: tagged(item) for key, item in value.items()}


def _is_odd(key: str) -> bool:
    """Whether a key cannot stand in plain JSON as it is."""
    return key.startswith("$") or not _is_text(key)


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
