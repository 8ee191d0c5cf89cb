"""Baseline 1: a plain writer and reader of JSON lines with the promises of ours, as one would write them in an hour.

The same promises: what cannot be kept exactly is refused (orjson with every type passed through to the error, its
output thrown away); every byte is covered by a digest; the file is synced, then named, then its directory is synced;
the manifest comes last, names the file's digest, and is never half written; a reader verifies before it decodes.
In one point it promises less, in its favour: a tuple is written as a list, which both of its libraries do in silence.
What it has not: a helper thread, a binary codec, parts that can be read alone, references to earlier checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gym_ckpt_grpc.protocol.ids import EpisodeId

LINES, MANIFEST = "records.jsonl", "manifest.json"
_CHECK = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class PlainRecord:
    """One session as it is written and read back."""

    episode: EpisodeId
    session_id: str
    state: Any


class Damaged(Exception):
    """What is read is not what was written."""


def write(directory: Path, records: Iterable[PlainRecord]) -> None:
    """Write records, durable, the manifest last. Raises TypeError for what JSON would not keep."""
    directory.mkdir()
    temporary = directory / f".{uuid.uuid4().hex}.tmp"
    digest, count = hashlib.sha256(), 0
    with temporary.open("wb", buffering=_BUFFER) as file:
        for line in _lines(records):
            file.write(line)
            digest.update(line)
            count += 1
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, directory / LINES)
    _sync_directory(directory)
    manifest = {"format": "plain", "records": count, "file": LINES, "sha256": digest.hexdigest()}
    with temporary.open("wb") as file:
        file.write(json.dumps(manifest).encode())
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, directory / MANIFEST)
    _sync_directory(directory)
    _sync_directory(directory.parent)


def _lines(records: Iterable[PlainRecord]) -> Iterator[bytes]:
    for record in records:
        orjson.dumps(record.state, option=_CHECK)
        line = {
            "rollout_id": record.episode.rollout_id,
            "attempt": record.episode.attempt,
            "session_id": record.session_id,
            "state": record.state,
        }
        yield json.dumps(line).encode("ascii") + b"\n"


def read(directory: Path) -> list[PlainRecord]:
    """Read all records back. Raises Damaged."""
    manifest = json.loads((directory / MANIFEST).read_bytes())
    with (directory / manifest["file"]).open("rb") as file:
        lines = file.readlines()
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    if digest.hexdigest() != manifest["sha256"] or len(lines) != manifest["records"]:
        raise Damaged(f"{directory} is not as its manifest says")
    return [_record(json.loads(line)) for line in lines]


def _record(fields: dict[str, Any]) -> PlainRecord:
    return PlainRecord(EpisodeId(fields["rollout_id"], fields["attempt"]), fields["session_id"], fields["state"])


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
