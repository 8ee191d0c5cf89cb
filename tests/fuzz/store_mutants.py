"""Changing the files of a checkpoint at random: bytes, fields of an index, JSON; with digests put right or not.

What a digest covers is changed in two ways: plainly, so that the digest must tell; and with every digest above it put
right, so that what lies behind is reached, as if whoever can write the files meant harm.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from gym_ckpt_grpc.storage.record_format import FOOTER_SIZE, HEADER_SIZE, Footer, pack_footer, unpack_footer
from gymckpt.v1 import storage_pb2

WILD = (0, 1, 2, 15, 16, 17, 127, 255, 65_535, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1)
_LIMITS = {
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_ENUM: 2**31 - 1,
    FieldDescriptor.CPPTYPE_INT32: 2**31 - 1,
}
DEEP = 100_000

MSGPACK = (
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xdb\xff\xff\xff\xff",  # text of 4 GiB
    b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
    b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\xd4\x05a",  # an extension
    b"\x91" * DEEP,
    b"\x81\xa1a" * DEEP,
    b"\x81\xc0\xc0",  # a key that is no text
    b"\x81\x01\x02",
    b"\x82\xa1a\x01\xa1a\x02",  # a key twice
    b"\x81\x91\x01\x02",  # a list as key
    b"\xa1\xff",  # no UTF-8
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x0a\xbc",
    b"\xc0\xc0",  # something after the end
)
TAGGED = (
    b"",
    b"[" * DEEP,
    b'{"a":' * DEEP,
    b'{"$dict":[["a",' * 10_000,
    b'{"$int":"' + b"f" * 200_000 + b'"}',
    b'{"$int":"zz"}',
    b'{"$int":5}',
    b'{"$int":null}',
    b'{"$float":"00"}',
    b'{"$float":"7ff8000000000000", "a": 1}',
    b'{"$text":"ff"}',
    b'{"$bytes":"0"}',
    b'{"$dict":[["a"]]}',
    b'{"$dict":[["a",1],["a",2]]}',
    b'{"$dict":{"ab":"cd"}}',
    b'{"$dict":[[[],1]]}',
    b'{"$dict":7}',
    b'{"$x":1}',
    b'{"a":1,"a":2}',
    b"NaN",
    b"Infinity",
    b"1e999",
    b"9" * 10_000,
    b'"\\ud800"',
    b"\xff",
)

_CODECS: tuple[Any, ...] = (1, 2, 3, 3, 0, 4)
_PAYLOADS: list[tuple[Any, bytes]] = [*((1, data) for data in MSGPACK), *((2, data) for data in TAGGED)]


def wild(rng: random.Random, near: int = 0, limit: int = 2**64 - 1) -> int:
    """A number that a length, count or offset should not be."""
    value = rng.choice(
        (rng.choice(WILD), near + rng.choice((-1, 1, 8, -8)), near * 2, rng.getrandbits(rng.choice((8, 32, 64))))
    )
    return max(0, min(value, limit))


# ---- bytes


def scrambled(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The bytes with a few flipped, cut out, doubled, zeroed, moved, or taken from another file."""
    if not data:
        return rng.randbytes(rng.randrange(20))
    first, second = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    kind = rng.randrange(9)
    if kind <= 2:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 3:
        return data[: rng.choice((first, len(data) - 1, len(data) // 2, FOOTER_SIZE, HEADER_SIZE))]
    if kind == 4:
        return data[:first] + data[second:]
    if kind == 5:
        return data[:second] + data[first:]
    if kind == 6:
        return data[:first] + bytes(second - first) + data[second:]
    if kind == 7 and others:
        other = rng.choice(others)
        return data[:first] + other[min(first, len(other)) : min(second, len(other))] + data[second:]
    return data[:first] + rng.randbytes(rng.choice((1, 4, 16, 100))) + data[first:]


# ---- a records file


def parted(data: bytes) -> tuple[bytes, storage_pb2.RecordsIndex] | None:
    """Header and chunks of a records file, and its index; None if it is none any more."""
    footer = unpack_footer(data[-FOOTER_SIZE:]) if len(data) >= FOOTER_SIZE else None
    if footer is None:
        return None
    try:
        index = storage_pb2.RecordsIndex.FromString(data[footer.offset : footer.offset + footer.length])
    except DecodeError:
        return None
    return data[: footer.offset], index


def sealed(body: bytes, index: bytes) -> bytes:
    """A file of header and chunks, an index, and the footer for it."""
    return body + index + pack_footer(Footer(len(body), len(index), hashlib.sha256(index).digest()))


def changed_records(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The file with its index, its chunks or its footer changed, and the digests below the root put right."""
    parts = parted(data)
    if parts is None:
        return scrambled(rng, data, others)
    body, index = parts
    kind = rng.randrange(8)
    if kind <= 2:
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            change_message(rng, index)
        return sealed(body, index.SerializeToString())
    if kind == 3:
        return sealed(body, scrambled(rng, index.SerializeToString(), [other[-400:] for other in others]))
    if kind == 4:
        return body + index.SerializeToString() + wild_footer(rng, len(body), index.SerializeToString())
    if kind == 5:
        return sealed(_scrambled_body(rng, body, others), index.SerializeToString())
    try:
        return with_payload(rng, body, index) if kind == 6 else with_chunk(rng, body, index)
    except (IndexError, ValueError):  # changed before, so that nothing in it fits any more
        return scrambled(rng, data, others)


def wild_footer(rng: random.Random, offset: int, index: bytes) -> bytes:
    digest = hashlib.sha256(index).digest() if rng.random() < 0.8 else rng.randbytes(32)
    return pack_footer(Footer(wild(rng, offset), wild(rng, len(index)), digest))


def _scrambled_body(rng: random.Random, body: bytes, others: Sequence[bytes]) -> bytes:
    if rng.random() < 0.3:
        return scrambled(rng, body[:HEADER_SIZE]) + body[HEADER_SIZE:]
    return body[:HEADER_SIZE] + scrambled(rng, body[HEADER_SIZE:], others)


def change_message(rng: random.Random, message: Message) -> None:
    """Change one field somewhere in a message."""
    field: Any = rng.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.is_repeated:
        _change_repeated(rng, message, field, value)
    elif field.message_type is not None:
        if rng.random() < 0.05:
            message.ClearField(field.name)
        else:
            change_message(rng, value)
    else:
        setattr(message, field.name, _changed_scalar(rng, field, value))


def _change_repeated(rng: random.Random, message: Message, field: FieldDescriptor, values: Any) -> None:
    kind, count = rng.randrange(8), len(values)
    if count == 0 or kind == 0:
        if field.message_type is not None:
            change_message(rng, values.add())
        else:
            values.append(_changed_scalar(rng, field, values[-1] if count else field.default_value or _zero(field)))
    elif kind == 1:
        del values[rng.randrange(count)]
    elif kind == 2:
        at = rng.randrange(count)
        values.extend([values[at]] * rng.choice((1, 1, 1, 1000)))
    elif kind == 3:
        first, second = rng.randrange(count), rng.randrange(count)
        items = list(values)
        items[first], items[second] = items[second], items[first]
        message.ClearField(field.name)
        getattr(message, field.name).extend(items)
    elif kind == 4 and rng.random() < 0.3:
        message.ClearField(field.name)
    elif field.message_type is not None:
        change_message(rng, rng.choice(values))
    else:
        at = rng.randrange(count)
        values[at] = rng.choice((_changed_scalar(rng, field, values[at]), values[rng.randrange(count)]))


def _zero(field: FieldDescriptor) -> Any:
    return {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}.get(field.type, 0)


def _changed_scalar(rng: random.Random, field: FieldDescriptor, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(("", "x" * 300, "..", "../../etc", "a/b", "\x00", value + "x", value[:-1], "é" * 100))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice((b"", rng.randbytes(32), scrambled(rng, value), b"{" * 1000, b"[]", b"null", b"x" * 70_000))
    return wild(rng, value, _LIMITS[field.cpp_type])


def with_payload(rng: random.Random, body: bytes, index: storage_pb2.RecordsIndex) -> bytes:
    """The file with one payload that no `encode` made, or another codec, where it is alone in a plain chunk."""
    payloads = index.payloads
    if not payloads.lengths:
        return sealed(body, index.SerializeToString())
    at = rng.randrange(len(payloads.lengths))
    if rng.random() < 0.2:
        payloads.codecs[at] = rng.choice(_CODECS)
        return sealed(body, index.SerializeToString())
    codec, data = rng.choice(_PAYLOADS)
    payloads.codecs[at] = codec
    return _replaced(body, index, payloads.chunks[at], data, single=at)


@cache
def bomb(size: int, *, told: bool) -> bytes:
    """Zeros in a frame, that tells their number or not."""
    stream = zstandard.ZstdCompressor(level=1, write_content_size=told).compressobj(size=size if told else -1)
    piece = bytes(min(size, 1 << 20))
    return (
        b"".join(stream.compress(piece) for _ in range(size // len(piece)))
        + stream.compress(bytes(size % len(piece)))
        + stream.flush()
    )


def with_chunk(rng: random.Random, body: bytes, index: storage_pb2.RecordsIndex) -> bytes:
    """The file with the stored bytes of one chunk changed, or compressed in some bad way, its digest put right."""
    if not index.chunks:
        return sealed(body, index.SerializeToString())
    number = rng.randrange(len(index.chunks))
    chunk = index.chunks[number]
    stored = body[chunk.offset : chunk.offset + chunk.stored_length]
    kind = rng.randrange(5)
    if kind == 0:
        return _replaced(body, index, number, scrambled(rng, stored))
    chunk.compression = storage_pb2.COMPRESSION_ZSTD
    if kind == 1:  # a bomb: what it declares is true, too little, or too much
        size = rng.choice((1, 100_000, 3 << 20, 200 << 20, 200 << 20))
        frame = bomb(size, told=rng.random() < 0.7)
        return _replaced(
            body, index, number, frame, raw_length=rng.choice((chunk.raw_length, chunk.raw_length, size, size + 1))
        )
    if kind == 2:  # two frames, or one and something after it
        frame = zstandard.ZstdCompressor().compress(stored)
        return _replaced(body, index, number, frame + rng.choice((frame, b"x", bytes(16))), raw_length=chunk.raw_length)
    if kind == 3:  # the head of a frame: window, size and dictionary in its first bytes
        frame = zstandard.ZstdCompressor().compress(bytes(range(256)) * 40)
        head = bytes([frame[0], frame[1], frame[2], frame[3], rng.randrange(256)]) + rng.randbytes(rng.randrange(12))
        return _replaced(body, index, number, head + frame[5:], raw_length=wild(rng, 10_240, 2**31 - 1))
    frame = scrambled(rng, zstandard.ZstdCompressor(level=1).compress(stored))
    return _replaced(body, index, number, frame, raw_length=chunk.raw_length)


def _replaced(
    body: bytes, index: storage_pb2.RecordsIndex, number: int, stored: bytes, *, single: int = -1, raw_length: int = -1
) -> bytes:
    """Other stored bytes for a chunk; `single`: a payload that is all of it. Digests and places are put right."""
    if number >= len(index.chunks):
        return sealed(body, index.SerializeToString())
    chunk = index.chunks[number]
    new = body[: chunk.offset] + stored + body[chunk.offset + chunk.stored_length :]
    moved = len(stored) - chunk.stored_length
    for later in index.chunks[number + 1 :]:
        later.offset += moved
    chunk.stored_length, chunk.digest = len(stored), hashlib.sha256(stored).digest()
    chunk.raw_length = len(stored) if raw_length < 0 else raw_length
    payloads = index.payloads
    inside = [at for at, place in enumerate(payloads.chunks) if place == number]
    if chunk.compression == storage_pb2.COMPRESSION_NONE and inside:
        _fit(payloads, inside, stored, single)
    return sealed(new, index.SerializeToString())


def _fit(payloads: storage_pb2.PayloadColumns, inside: list[int], stored: bytes, single: int) -> None:
    """Let the payloads of a plain chunk fill it again: `single` all of it, else the last one what is left."""
    digests, used = bytearray(payloads.digests), 0
    for at in inside:
        rest = len(stored) - used
        if single in inside:
            length = rest if at == single else 0
        else:
            length = rest if at == inside[-1] else min(payloads.lengths[at], rest)
        payloads.offsets[at], payloads.lengths[at] = used, length
        digests[at * 32 : at * 32 + 32] = hashlib.sha256(stored[used : used + length]).digest()
        used += length
    payloads.digests = bytes(digests)


# ---- JSON


def changed_json(rng: random.Random, data: bytes) -> bytes:
    """A JSON document with one value, key or character changed."""
    if rng.random() < 0.3:
        return _changed_text(rng, data)
    document = json.loads(data)
    _change_value(rng, document)
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _changed_text(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return scrambled(rng, data)
    if kind == 1:
        return b"[" * DEEP
    if kind == 2:
        return b'{"a":' * DEEP
    if kind == 3:  # deep below a field
        at = data.rfind(b"}")
        return data[:at] + b', "extra": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    if kind == 4:  # a key twice
        at = data.find(b",")
        return data[:1] + data[1 : at + 1] + data[1:]
    return rng.choice(
        (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"NaN", b"\xef\xbb\xbf" + data, data + b"x", bytes(100))
    )


def _change_value(rng: random.Random, container: Any) -> None:
    keys: list[Any] = list(container) if isinstance(container, dict) else list(range(len(container)))
    if not keys:
        return
    key = rng.choice(keys)
    inner = container[key]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
        _change_value(rng, inner)
        return
    changes: list[Callable[[], Any]] = [
        lambda: container.__delitem__(key),
        lambda: container.__setitem__(key, _other(rng, inner)),
        lambda: container.__setitem__(key, _other(rng, inner)),
    ]
    if isinstance(container, dict):
        changes.append(lambda: container.__setitem__("another", 1))
    else:
        changes.append(lambda: container.append(inner))
    rng.choice(changes)()


def _other(rng: random.Random, value: Any) -> Any:
    if type(value) is int and rng.random() < 0.8:
        return rng.choice((-1, wild(rng, value), 2**70, 1.5, str(value), True, None))
    if type(value) is str and rng.random() < 0.8:
        return rng.choice(
            ("", "..", "../x", "/etc/passwd", value + "\n", value[:-1], value.upper(), "\x00", "\ud800", 7)
        )
    return rng.choice((None, [], {}, [value], {"a": value}, "text", 0, 1e308, [[[[]]]]))
