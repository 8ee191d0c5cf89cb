"""Reading a participant's part of a checkpoint: only what a scope needs, each byte verified before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.chunk_reading import BasePaths
from gym_ckpt_grpc.storage.collector import paused_collector
from gym_ckpt_grpc.storage.files import FileLayer, read_file
from gym_ckpt_grpc.storage.locations import CheckpointLocation, PartLocation, Place, check_part_path
from gym_ckpt_grpc.storage.part_manifest import DOCUMENT, FileEntry, PartManifest, read_manifest
from gym_ckpt_grpc.storage.record_format import records_name
from gym_ckpt_grpc.storage.record_index import BaseFile
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
    decoded: bool = False,
) -> Part:
    """Read the records of the episodes in `scope` (None: all), and only what holds them. Blocks.

    place: (kind, service, instance). expected_digest: of the manifest. decoded: decode every payload here, in the
    calling thread; its bytes are not kept, and `Record.decode` hands each value out once. Else that is when it is
    decoded, as often as it is asked for. Opens only what the manifest names, in this checkpoint and in earlier ones;
    each payload is verified before it is handed out.
    Raises StateNotFound if there is no part, StateCorrupt naming file, participant and episodes for everything that is
    not as written.
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
        with paused_collector(), open_records(files, location, manifest) as file:
            records = tuple(file.read(scope, decoded=decoded))
            total, count = len(file), file.bytes_read
        beside = [entry for entry in manifest.files if entry.role == DOCUMENT]
        blocks = {entry.label: read_document(files, part, entry) for entry in beside}
    except StateNotFound as error:
        raise StateCorrupt(f"{error.message}, which {part.manifest!r} names", participant=who) from error
    except StateCorrupt as error:
        error.participant = who
        raise
    return Part(manifest, digest, records, total, count + sum(entry.size for entry in beside), blocks)


def open_records(files: FileLayer, location: CheckpointLocation, manifest: PartManifest) -> RecordFile:
    """Open the records file of a part, with all that it points into; both must say the same of it. To be closed.

    Opens files of earlier checkpoints only when something is read from them. Raises StateNotFound, StateCorrupt.
    """
    place = manifest.participant.place
    part, entry = location.part(place), manifest.records_file
    path = part.file(entry.name)
    bases = base_paths(files, location, place)
    file = RecordFile(files, path, root_digest=entry.digest, size=entry.size, bases=bases)
    try:
        _compare(file, manifest, part)
    except BaseException:
        file.close()
        raise
    return file


def base_paths(files: FileLayer, location: CheckpointLocation, place: Place) -> BasePaths:
    """Where the records files of earlier checkpoints are that a participant's part points into.

    They are in the part of the same participant, in the same root; a link on the way is refused.
    """

    def path(base: BaseFile) -> str:
        there = CheckpointLocation(location.root, base.checkpoint_id).part(place)
        try:
            check_part_path(there, files)
        except InvalidArgument as error:
            raise StateCorrupt(f"{error.message}, and {location.part(place).manifest!r} needs it") from error
        return there.file(records_name(base.root_digest))

    return path


def _compare(file: RecordFile, manifest: PartManifest, part: PartLocation) -> None:
    """Raise StateCorrupt if manifest and index do not say the same."""
    index = file.index
    if len(file) != manifest.records:
        raise index.corrupt(f"has {len(file)} records, {part.manifest!r} says {manifest.records}")
    named = {(entry.checkpoint, entry.digest, entry.size) for entry in manifest.base_files}
    needed = {(base.checkpoint_id, base.root_digest, base.size) for base in index.base_files}
    if named != needed:
        one = min(named ^ needed)
        what = "names and it does not need" if one in named else "does not name and it needs"
        raise index.corrupt(f"differs from {part.manifest!r}, which {what} {records_name(one[1])!r} of {one[0]!r}")
    if manifest.schema_version > 1 and manifest.state_bytes != index.payload_bytes:
        said = manifest.state_bytes
        raise index.corrupt(f"has {index.payload_bytes} bytes of state, {part.manifest!r} says {said}")


def read_document(files: FileLayer, part: PartLocation, entry: FileEntry) -> dict[str, Any]:
    """One document of a part. Raises StateNotFound, or StateCorrupt if it is not as its digest says."""
    path = part.file(entry.name)
    data = read_file(files, path, limit=min(entry.size, documents.MAX_DOCUMENT))
    if documents.sha256(data) != entry.digest:
        raise StateCorrupt(f"{path!r} has another sha256 than {part.manifest!r} says")
    try:
        block: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise StateCorrupt(f"{path!r} is not a JSON object: {error}") from error
    return block
