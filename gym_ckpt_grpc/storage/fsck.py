"""Verifying a checkpoint: every byte of every file, every digest and every cross-reference."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import ControlError, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.aggregate import (
    AggregateManifest,
    Member,
    check_members,
    read_aggregate,
    read_episodes,
)
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.locations import CheckpointLocation, PartLocation
from gym_ckpt_grpc.storage.part_manifest import DOCUMENT, FileEntry, PartManifest, read_manifest
from gym_ckpt_grpc.storage.payloads import decode
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gym_ckpt_grpc.storage.records import Record
from gym_ckpt_grpc.storage.root import CheckpointRoot

_BATCH = 16 << 20  # bytes of payloads that are decoded together


class Level(enum.StrEnum):
    """What a finding says. The last finding is PASSED or FAILED, and there is no other of these two."""

    CHECKED = "checked"
    STRAY = "stray"
    MISSING = "missing"
    DAMAGED = "damaged"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. file: from the checkpoint's directory, or empty for the verdict. size: bytes read of it.

    participant: `kind/service/instance`, or empty. episode: whose state it is, or None.
    """

    level: Level
    file: str
    message: str = ""
    participant: str = ""
    episode: EpisodeId | None = None
    size: int = 0

    @property
    def is_fault(self) -> bool:
        """Whether the checkpoint fails for it."""
        return self.level in (Level.MISSING, Level.DAMAGED)


def verify_checkpoint(root: CheckpointRoot, checkpoint_id: str) -> Iterator[Finding]:
    """Read and check a whole checkpoint; yields findings as they are made, the verdict last.

    Raises InvalidArgument for an illegal id and nothing else: what cannot be read is a finding.
    """
    location = root.location(checkpoint_id)
    faults = files = 0
    for finding in _findings(root, location):
        faults += finding.is_fault
        files += finding.level is Level.CHECKED
        yield finding
    text = f"{files} files checked, {faults} faults"
    yield Finding(Level.FAILED if faults else Level.PASSED, "", text)


def _findings(root: CheckpointRoot, location: CheckpointLocation) -> Iterator[Finding]:
    files = root.files
    try:
        published = [entry for entry in root.sequence.publications() if entry.checkpoint_id == location.checkpoint_id]
        digest = published[0].manifest_digest if published else None
        manifest, _ = read_aggregate(files, location, expected_digest=digest)
    except (StateCorrupt, StateNotFound) as error:
        yield _fault(location, error, "checkpoint.json")
        return
    text = "published" if published else "complete, not published"
    yield Finding(Level.CHECKED, "checkpoint.json", text, size=_size(files, location.aggregate))
    yield from _check_lists(files, location, manifest)
    try:
        check_members(files, location, manifest)
    except (StateCorrupt, StateNotFound) as error:
        yield _fault(location, error, "checkpoint.json")
    for member in manifest.members:
        yield from _check_part(files, location, member)


def _fault(location: CheckpointLocation, error: ControlError, file: str) -> Finding:
    level = Level.MISSING if isinstance(error, StateNotFound) else Level.DAMAGED
    message = error.message.replace(f"{location.directory}/", "")
    episode = error.episodes[0] if error.episodes else None
    return Finding(level, file, message, error.participant, episode)


def _check_lists(files: FileLayer, location: CheckpointLocation, manifest: AggregateManifest) -> Iterator[Finding]:
    name = manifest.episodes.name if manifest.episodes else ""
    try:
        lists = read_episodes(files, location, manifest)
    except (StateCorrupt, StateNotFound) as error:
        yield _fault(location, error, name)
        return
    text = f"{len(lists.continued)} continued, {len(lists.restarts)} restarts"
    yield Finding(Level.CHECKED, name, text, size=manifest.episodes.size if manifest.episodes else 0)


def _size(files: FileLayer, path: str) -> int:
    """Bytes of a file that was read a moment ago."""
    try:
        source = files.open(path)
    except (StateCorrupt, StateNotFound):
        return 0
    source.close()
    return source.size


def _check_part(files: FileLayer, location: CheckpointLocation, member: Member) -> Iterator[Finding]:
    place = member.participant.place
    part, who = location.part(place), str(member.participant)
    try:
        manifest, _ = read_manifest(
            files, part, place, checkpoint_id=location.checkpoint_id, expected_digest=member.manifest_digest
        )
    except (StateCorrupt, StateNotFound) as error:
        error.participant = who
        yield _fault(location, error, member.manifest)
        return
    yield Finding(Level.CHECKED, member.manifest, "", who, size=_size(files, part.manifest))
    for entry in manifest.files:
        name = f"{part.relative}/{entry.name}"
        faulty = False
        try:
            check = _check_document if entry.role == DOCUMENT else _check_records
            for finding in check(files, part, manifest, entry):
                faulty = True
                yield finding
        except (StateCorrupt, StateNotFound) as error:
            faulty = True
            error.participant = who
            yield _fault(location, error, name)
        if not faulty:
            yield Finding(Level.CHECKED, name, "", who, size=entry.size)
    yield from _strays(files, part, manifest)


def _check_document(
    files: FileLayer, part: PartLocation, manifest: PartManifest, entry: FileEntry
) -> Iterator[Finding]:
    data = documents.read_bytes(files, part.file(entry.name))
    if documents.sha256(data) != entry.digest:
        text = f"has another sha256 than the manifest of {manifest.participant} says"
        yield Finding(Level.DAMAGED, f"{part.relative}/{entry.name}", text, str(manifest.participant))


def _check_records(files: FileLayer, part: PartLocation, manifest: PartManifest, entry: FileEntry) -> Iterator[Finding]:
    name, who = f"{part.relative}/{entry.name}", str(manifest.participant)
    with RecordFile(files, part.file(entry.name), root_digest=entry.digest, size=entry.size) as file:
        if len(file) != manifest.records:
            yield Finding(Level.DAMAGED, name, f"has {len(file)} records, not {manifest.records}", who)
        damaged: set[EpisodeId] = set()
        for episode, payload, problem in file.check_payloads():
            damaged.add(episode)
            yield Finding(Level.DAMAGED, name, f"payload {payload!r} {problem}", who, episode)
        for batch in file.index.batches(_BATCH):
            intact = [at for at in batch if file.episodes[at] not in damaged]
            yield from _decode_all(file.read_at(intact), name, who)


def _decode_all(records: list[Record], name: str, who: str) -> Iterator[Finding]:
    for record in records:
        for payload in record.payloads.values():
            try:
                decode(payload)
            except StateCorrupt as error:
                yield Finding(Level.DAMAGED, name, error.message, who, record.episode)


def _strays(files: FileLayer, part: PartLocation, manifest: PartManifest) -> Iterator[Finding]:
    known = {entry.name for entry in manifest.files} | {"manifest.json"}
    try:
        names = files.names(part.directory)
    except StateCorrupt:
        return
    for name in names:
        if name not in known:
            yield Finding(Level.STRAY, f"{part.relative}/{name}", "is named by no manifest", str(manifest.participant))
