"""`Record`: one piece of a participant's state, as owners hand it to storage and get it back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import orjson

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.payloads import Payload, decode

MAX_FIELDS = 64 << 10
"""Largest encoded `fields` of a record, in bytes."""

MAX_LABEL = 256
"""Longest schema, owner, payload name, in characters."""

# Of these orjson keeps every value exactly or refuses it; keys it takes only if they are of exactly the type str.
_PLAIN = frozenset({str, int, bool, type(None)})
_FIELDS = orjson.OPT_PASSTHROUGH_SUBCLASS

Scalar = None | bool | int | float | str
FieldValue = Scalar | list[Any] | tuple[Any, ...]
"""A scalar, or a list of scalars. Tuples come back as lists; ints have 64 bits; floats are finite."""


class EpisodeSelection(Protocol):
    """What a read is limited to: an EpisodeScope, a RestoreScope, a set of ids."""

    def __contains__(self, episode: EpisodeId, /) -> bool: ...


class Record(msgspec.Struct, frozen=True, eq=False):
    """A piece of state of one episode. To change a copy: `msgspec.structs.replace`.

    schema, schema_version: what its fields and payloads mean; version 1 and up. owner: routing id of the
    worker that held it, or empty. revision: the author's own counter of changes, 0 and up, or None. fields:
    small facts that readers see without decoding state (FieldValue, at most 64 KiB encoded, key order kept).
    payloads: named state. Storage keeps the order of records and does not ask whether an episode has several.

    Two are equal that say the same. source does not count: the file it was read from and its position there, for
    errors.
    """

    episode: EpisodeId
    schema: str
    schema_version: int = 1
    owner: str = ""
    revision: int | None = None
    fields: Mapping[str, FieldValue] = msgspec.field(default_factory=dict)
    payloads: Mapping[str, Payload] = msgspec.field(default_factory=dict)
    source: tuple[str, int] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return self._said() == other._said()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = ", ".join(f"{name} ({len(payload.data or b'')} bytes)" for name, payload in self.payloads.items())
        return f"Record({self.episode}, {self.schema!r} {self.schema_version}, {dict(self.fields)!r}, {names})"

    def _said(self) -> tuple[object, ...]:
        what = (self.schema, self.schema_version, self.owner, self.revision, self.fields, self.payloads)
        return (self.episode, *what)

    def decode(self, name: str) -> Any:
        """Decode one payload; each call gives a value of its own, which the caller may change.

        Of a record that was read `decoded` it can be called once per payload; ValueError after that. Raises
        StateCorrupt naming file, record and payload; also if there is none of that name.
        """
        payload = self.payloads.get(name)
        if payload is None:
            raise StateCorrupt(f"the {self.schema} record of {self.episode} has no {name!r}", episodes=[self.episode])
        try:
            return decode(payload)
        except StateCorrupt:
            pass
        whose = f"the {self.schema} record"
        if self.source is not None:
            path, at = self.source
            whose = f"{path!r}, record {at}"
        try:
            return decode(payload, where=f"{whose} of {self.episode}, payload {name!r}")
        except StateCorrupt as error:
            raise StateCorrupt(error.message, episodes=[self.episode]) from error.__cause__


class RecordChecks:
    """Checks records a batch at a time, as one writer does. What was found usable once is not looked at again."""

    def __init__(self) -> None:
        self._heads: set[tuple[str, int, str]] = set()
        self._names: set[str] = set()
        self._content_types: set[str] = set()

    def check(self, records: Sequence[Record]) -> list[bytes]:
        """The encoded fields of each. Raises InvalidArgument naming the first episode and what is wrong with it."""
        payloads = [record.payloads for record in records]
        names, heads = set(chain.from_iterable(payloads)), set(map(HEAD, records))
        if not (names <= self._names and heads <= self._heads):
            for record in records:
                _check_head(record)
            self._names |= names
            self._heads |= heads
        content_types = {payload.content_type for each in payloads for payload in each.values()}
        if not content_types <= self._content_types:
            _check_content_types(records)
            self._content_types |= content_types
        for record in records:
            if record.revision is not None and not 0 <= record.revision < 2**64 - 1:
                raise _refusal(record, f"has revision {record.revision}")
        return _encoded_fields(records)


HEAD: Callable[[Record], tuple[str, int, str]] = attrgetter("schema", "schema_version", "owner")
"""What most records of a part have in common."""


def _check_head(record: Record) -> None:
    if not record.schema or not all(map(_is_label, (record.schema, record.owner, *record.payloads))):
        raise _refusal(record, "has an unusable schema, owner or payload name")
    if not 1 <= record.schema_version < 2**32:
        raise _refusal(record, f"has schema_version {record.schema_version}")


def _encoded_fields(records: Sequence[Record]) -> list[bytes]:
    fields = [record.fields if type(record.fields) is dict else dict(record.fields) for record in records]
    if _PLAIN.issuperset(map(type, chain.from_iterable(each.values() for each in fields))):
        with suppress(TypeError, ValueError):
            # Copied: what orjson returns keeps the 4 KiB that it was written into.
            encoded = [bytes(memoryview(orjson.dumps(each, None, _FIELDS))) for each in fields]
            if max(map(len, encoded), default=0) <= MAX_FIELDS:
                return encoded
    return [_encode_fields(*one) for one in zip(records, fields, strict=True)]


def _check_content_types(records: Sequence[Record]) -> None:
    for record in records:
        for name, payload in record.payloads.items():
            if not _is_label(payload.content_type):
                raise _refusal(record, f"has an unusable content type of its payload {name[:80]!r}")


def _encode_fields(record: Record, fields: dict[str, FieldValue]) -> bytes:
    """One by one, for what is not plain, and to name what is wrong."""
    for name, value in fields.items():
        if problem := _field_problem(name, value):
            raise _refusal(record, f"has a field {ascii(name)[:80]} that {problem}")
    data = bytes(memoryview(orjson.dumps(fields, option=_FIELDS)))
    if len(data) > MAX_FIELDS:
        raise _refusal(record, f"has fields of {len(data)} bytes, more than {MAX_FIELDS}; put them into a payload")
    return data


def _refusal(record: Record, problem: str) -> InvalidArgument:
    return InvalidArgument(f"the {record.schema[:80]} record of {record.episode} {problem}", episodes=[record.episode])


def _is_label(label: str) -> bool:
    return len(label) <= MAX_LABEL and _is_text(label)


def _field_problem(name: Any, value: Any) -> str | None:
    if type(name) is not str or not _is_text(name):
        return "is not named by a text"
    if type(value) is list or type(value) is tuple:
        return next((problem for item in value if (problem := _scalar_problem(item))), None)
    return _scalar_problem(value)


def _scalar_problem(value: Any) -> str | None:
    kind = type(value)
    if value is None or kind is bool:
        return None
    if kind is int:
        return None if -(2**63) <= value < 2**64 else "is an integer beyond 64 bits"
    if kind is float:
        return None if math.isfinite(value) else f"is {value}"
    if kind is str:
        return None if _is_text(value) else "has a surrogate"
    return f"is of type {kind.__qualname__}, not a scalar or a list of scalars"


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
