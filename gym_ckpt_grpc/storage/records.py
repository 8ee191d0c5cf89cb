"""`Record`: one piece of a participant's state, as owners hand it to storage and get it back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.payloads import Payload, decode

MAX_FIELDS = 64 << 10
"""Largest encoded `fields` of a record, in bytes."""

MAX_LABEL = 256
"""Longest schema, owner, payload name, in characters."""

Scalar = None | bool | int | float | str
FieldValue = Scalar | list[Any] | tuple[Any, ...]
"""A scalar, or a list of scalars. Tuples come back as lists; ints have 64 bits; floats are finite."""


class EpisodeSelection(Protocol):
    """What a read is limited to: an EpisodeScope, a RestoreScope, a set of ids."""

    def __contains__(self, episode: EpisodeId, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Record:
    """A piece of state of one episode.

    schema, schema_version: what its fields and payloads mean; version 1 and up. owner: routing id of the
    worker that held it, or empty. revision: the author's own counter of changes, 0 and up, or None. fields:
    small facts that readers see without decoding state (FieldValue, at most 64 KiB encoded, key order kept).
    payloads: named state. Storage keeps the order of records and does not ask whether an episode has several.
    """

    episode: EpisodeId
    schema: str
    schema_version: int = 1
    owner: str = ""
    revision: int | None = None
    fields: Mapping[str, FieldValue] = field(default_factory=dict)
    payloads: Mapping[str, Payload] = field(default_factory=dict)

    def decode(self, name: str) -> Any:
        """Decode one payload. Raises StateCorrupt naming file, record and payload; also if there is none."""
        payload = self.payloads.get(name)
        if payload is None:
            raise StateCorrupt(f"the {self.schema} record of {self.episode} has no {name!r}", episodes=[self.episode])
        try:
            return decode(payload)
        except StateCorrupt as error:
            raise StateCorrupt(error.message, episodes=[self.episode]) from error.__cause__


def check_record(record: Record) -> bytes:
    """Check a record; returns its encoded fields. Raises InvalidArgument naming episode and field."""
    whose = f"the {record.schema[:80]} record of {record.episode}"
    labels = [record.schema, record.owner, *record.payloads]
    if not record.schema or not all(len(label) <= MAX_LABEL and _is_text(label) for label in labels):
        raise InvalidArgument(f"{whose} has an unusable schema, owner or payload name", episodes=[record.episode])
    if not 1 <= record.schema_version < 2**32:
        raise InvalidArgument(f"{whose} has schema_version {record.schema_version}", episodes=[record.episode])
    if record.revision is not None and not 0 <= record.revision < 2**64 - 1:
        raise InvalidArgument(f"{whose} has revision {record.revision}", episodes=[record.episode])
    if not record.fields:
        return b"{}"
    for name, value in record.fields.items():
        if problem := _field_problem(name, value):
            raise InvalidArgument(f"{whose}: field {ascii(name)[:80]} {problem}", episodes=[record.episode])
    data = orjson.dumps(dict(record.fields))
    if len(data) > MAX_FIELDS:
        raise InvalidArgument(
            f"{whose} has fields of {len(data)} bytes, more than {MAX_FIELDS}; put them into a payload",
            episodes=[record.episode],
        )
    return data


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
