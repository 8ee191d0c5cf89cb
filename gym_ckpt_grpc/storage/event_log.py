"""`events.jsonl`: how the taking of a checkpoint went, a line per participant and step. For people and their tools.

Written beside `checkpoint.json` once the fleet is open again, as well as that goes: nothing reads it but the timeline,
and a checkpoint without it, or with a damaged one, is as good as any. The first line says what the file is.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.documents import Document
from gym_ckpt_grpc.storage.files import FileLayer, read_file
from gym_ckpt_grpc.storage.locations import CheckpointLocation
from gym_ckpt_grpc.storage.placing import write_temporary

MAX_STEPS = 20_000
"""Steps that are kept: four of 1,000 participants, each repeated a few times."""
MAX_LOG = 16 << 20
"""Bytes that are read, and so written."""
MOMENTS = ("prepared", "released", "durable", "published")

Count = Annotated[int, msgspec.Meta(ge=0)]


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One participant's part of one step, as the coordinator heard it. start, end: seconds from the first closing.

    participant: `kind/service/instance`. outcome: `ok`, `not_ready` or the name of an error code, never its text.
    """

    participant: str
    step: str
    start: float
    end: float
    outcome: str = "ok"
    tries: Count = 1
    records: Count = 0
    bytes: Count = 0


class _Head(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    FORMAT: ClassVar[str] = "gymckpt.events"

    checkpoint_id: str
    began: float
    steps: Count
    left_out: Count
    moments: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLog:
    """How the taking of one checkpoint went.

    began: seconds since 1970 of the first closing, by the coordinator's clock. moments: of MOMENTS, as far as they are
    known, seconds from there. left_out: steps beyond MAX_STEPS. unreadable: lines that cannot be read, or are missing.
    """

    checkpoint_id: str
    began: float
    steps: Sequence[LoggedStep]
    moments: Mapping[str, float]
    left_out: int = 0
    unreadable: int = 0


def write_event_log(files: FileLayer, location: CheckpointLocation, log: EventLog) -> None:
    """Write the log whole, in place of an earlier one. Raises StateUnwritable, InvalidArgument."""
    steps = list(log.steps[:MAX_STEPS])
    head = _Head(
        format=_Head.FORMAT,
        schema_version=_Head.VERSION,
        checkpoint_id=log.checkpoint_id,
        began=log.began,
        steps=len(steps),
        left_out=log.left_out + len(log.steps) - len(steps),
        moments=dict(log.moments),
    )
    data = msgspec.json.Encoder().encode_lines([head, *steps])
    directory = posixpath.dirname(location.events)
    with write_temporary(files, directory, documents.bounded(data, what="the event log", limit=MAX_LOG)) as temporary:
        temporary.replace(location.events)


def read_event_log(files: FileLayer, location: CheckpointLocation) -> EventLog | None:
    """The log of a checkpoint as far as it can be read; None if it has none. Raises StateCorrupt."""
    path = location.events
    try:
        data = read_file(files, path, limit=MAX_LOG)
    except StateNotFound:
        return None
    first, *rest = data.split(b"\n")
    head = documents.from_bytes(first, _Head, path=path)
    if head.checkpoint_id != location.checkpoint_id:
        raise StateCorrupt(f"{path!r} belongs to checkpoint {head.checkpoint_id[:200]!r}")
    steps: list[LoggedStep] = []
    decoder = msgspec.json.Decoder(LoggedStep)
    for line in rest[: head.steps]:
        with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            steps.append(decoder.decode(line))
    return EventLog(
        checkpoint_id=head.checkpoint_id,
        began=head.began,
        steps=steps,
        moments=head.moments,
        left_out=head.left_out,
        unreadable=head.steps - len(steps),
    )
