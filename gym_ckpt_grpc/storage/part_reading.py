"""Reading a participant's part of a checkpoint: only what a scope needs, each byte verified before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.locations import CheckpointLocation, PartLocation, Place, check_part_path
from gym_ckpt_grpc.storage.part_manifest import DOCUMENT, FileEntry, PartManifest, read_manifest
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gym_ckpt_grpc.storage.records import EpisodeSelection, Record


@dataclass(frozen=True, slots=True)
class Part:
    """A part as read back. records: the selected ones, in file order. total_count: how many the part has.

    bytes_read: from all files. documents: what the kind added besides, by name.
    """

    manifest: PartManifest
    manifest_digest: str
    records: tuple[Record, ...]
    total_count: int
    bytes_read: int
    documents: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def read_part(
    files: FileLayer,
    location: CheckpointLocation,
    place: Place,
    *,
    checkpoint_id: str,
    expected_digest: str | None = None,
    scope: EpisodeSelection | None = None,
) -> Part:
    """Read the records of the episodes in `scope` (None: all), and only what holds them. Blocks.

    place: (kind, service, instance). expected_digest: of the manifest. Opens only what the manifest names;
    each payload is verified before it is handed out, and decoded only by `Record.decode`. Raises
    StateNotFound if there is no part, StateCorrupt naming file, participant and episodes for everything that
    is not as written.
    """
    part = location.part(place)
    check_part_path(part, files)
    who = "/".join(place)
    try:
        manifest, digest = read_manifest(
            files, part, place, checkpoint_id=checkpoint_id, expected_digest=expected_digest
        )
    except (StateCorrupt, StateNotFound) as error:
        error.participant = who
        raise
    try:
        records, total, count = _read_records(files, part, manifest, scope)
        blocks = {entry.label: _read_document(files, part, entry) for entry in manifest.files if entry.role == DOCUMENT}
    except StateNotFound as error:
        raise StateCorrupt(f"{error.message}, which {part.manifest!r} names", participant=who) from error
    except StateCorrupt as error:
        error.participant = who
        raise
    count += sum(entry.size for entry in manifest.files if entry.role == DOCUMENT)
    return Part(manifest, digest, tuple(records), total, count, blocks)


def _read_records(
    files: FileLayer, part: PartLocation, manifest: PartManifest, scope: EpisodeSelection | None
) -> tuple[list[Record], int, int]:
    entry = manifest.records_file
    path = part.file(entry.name)
    with RecordFile(files, path, root_digest=entry.digest, size=entry.size) as file:
        if len(file) != manifest.records:
            raise StateCorrupt(f"{path!r} has {len(file)} records, {part.manifest!r} says {manifest.records}")
        return file.read(scope), len(file), file.bytes_read


def _read_document(files: FileLayer, part: PartLocation, entry: FileEntry) -> dict[str, Any]:
    path = part.file(entry.name)
    data = documents.read_bytes(files, path)
    if documents.sha256(data) != entry.digest:
        raise StateCorrupt(f"{path!r} has another sha256 than {part.manifest!r} says")
    try:
        block: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise StateCorrupt(f"{path!r} is not a JSON object: {error}") from error
    return block
