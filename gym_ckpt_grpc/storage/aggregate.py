"""`checkpoint.json`, the aggregate manifest of a checkpoint, and the lists of its episodes.

A checkpoint is complete if and only if this file exists. It is created once, after every part is durable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec

from gym_ckpt_grpc.protocol.errors import CheckpointConflict, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.documents import Document
from gym_ckpt_grpc.storage.files import FileLayer, file_size
from gym_ckpt_grpc.storage.locations import CheckpointLocation, Place
from gym_ckpt_grpc.storage.part import PartManifestInfo
from gym_ckpt_grpc.storage.part_manifest import (
    Count,
    FileEntry,
    IdentityBlock,
    PartManifest,
    read_manifest,
)
from gym_ckpt_grpc.storage.payloads import Codec, Payload
from gym_ckpt_grpc.storage.placing import create_once

_LISTS_NAME = re.compile(r"episodes-([0-9a-f]{64})\.json")


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One participant of a checkpoint: what its own manifest says, so that one file tells about all.

    manifest: name of its manifest, from the checkpoint's directory. bytes, files, state_bytes, chain: as there.
    """

    participant: IdentityBlock
    manifest: str
    manifest_digest: str
    records: Count
    restarts: Count
    bytes: Count
    files: tuple[FileEntry, ...]
    state_bytes: Count = 0
    chain: Count = 0

    @classmethod
    def of(cls, identity: ParticipantIdentity, info: PartManifestInfo) -> Member:
        """The member for what a participant's Commit replied."""
        return cls(
            participant=IdentityBlock.of(identity),
            manifest=info.manifest_name,
            manifest_digest=info.manifest_digest,
            records=info.record_count,
            restarts=info.restart_count,
            bytes=info.bytes,
            files=info.files,
            state_bytes=info.state_bytes,
            chain=info.chain,
        )

    @classmethod
    def from_manifest(cls, location: CheckpointLocation, manifest: PartManifest, digest: str) -> Member:
        """The member for a manifest that was read back."""
        part = location.part(manifest.participant.place)
        return cls(
            participant=manifest.participant,
            manifest=f"{part.relative}/manifest.json",
            manifest_digest=digest,
            records=manifest.records,
            restarts=manifest.restarts,
            bytes=manifest.bytes,
            files=manifest.files,
            state_bytes=manifest.state_bytes,
            chain=manifest.chain,
        )


class Excluded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A participant that was left out by name: neither missing nor extra at a restore."""

    kind: str
    service: str
    instance: str
    reason: str


class StragglerAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was done with an episode that did not reach a boundary in time."""

    rollout_id: str
    attempt: Count
    action: str
    reason: str = ""


class EpisodeListRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file with the episode lists. continued, restarts: how many it has. size in bytes."""

    name: str
    digest: str
    size: Count
    continued: Count
    restarts: Count


class OpaqueBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of the trainer's own, kept exactly: an encoded payload, base64 in the file."""

    codec: Annotated[int, msgspec.Meta(ge=1, le=3)]
    content_type: str = ""
    data: bytes

    @classmethod
    def of(cls, payload: Payload) -> OpaqueBlock:
        """The block of a payload (`payloads.encode`, `payloads.raw`)."""
        return cls(codec=payload.codec.value, content_type=payload.content_type, data=payload.data)

    def payload(self) -> Payload:
        """The payload, to be given to `payloads.decode`."""
        return Payload(Codec(self.codec), self.data, self.content_type)

    def __repr__(self) -> str:
        return f"OpaqueBlock(codec={self.codec}, content_type={self.content_type!r}) of {len(self.data)} bytes"


class AggregateManifest(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint as a whole.

    created: date and time for people only, never compared. source_checkpoint: what this run was restored
    from, or empty. episodes: set by `write_aggregate`. trainer: its own opaque state. frontier: the proof
    that dataset position and checkpoint agree (an open JSON object), or None: no proof. policy_versions,
    fingerprints: by name. traceparent: of the span of the checkpoint, for traces only, never compared; a manifest
    without one has no such field.
    """

    FORMAT: ClassVar[str] = "gymckpt.checkpoint"
    VERSION: ClassVar[int] = 2
    READABLE: ClassVar[tuple[int, ...]] = (1, 2)

    format: str = "gymckpt.checkpoint"
    schema_version: int = 2
    checkpoint_id: Annotated[str, msgspec.Meta(min_length=1)]
    run_id: str
    controller_id: str
    epoch: Count
    created: str = ""
    source_checkpoint: str = ""
    members: tuple[Member, ...]
    excluded: tuple[Excluded, ...] = ()
    episodes: EpisodeListRef | None = None
    straggler_actions: tuple[StragglerAction, ...] = ()
    trainer: OpaqueBlock | None = None
    frontier: dict[str, Any] | None = None
    policy_versions: dict[str, str] = msgspec.field(default_factory=dict)
    fingerprints: dict[str, str] = msgspec.field(default_factory=dict)
    traceparent: str | msgspec.UnsetType = msgspec.UNSET

    def member(self, place: Place) -> Member | None:
        """The member at (kind, service, instance), or None."""
        return next((member for member in self.members if member.participant.place == place), None)


@dataclass(frozen=True, slots=True)
class EpisodeLists:
    """continued: the scope, episodes with state in the parts. restarts: the others, each with its reason."""

    continued: tuple[EpisodeId, ...] = ()
    restarts: Mapping[EpisodeId, str] = field(default_factory=dict)


class _ListsFile(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    FORMAT: ClassVar[str] = "gymckpt.episodes"

    checkpoint_id: str
    rollout_ids: tuple[str, ...]
    attempts: tuple[Count, ...]
    restart_rollout_ids: tuple[str, ...]
    restart_attempts: tuple[Count, ...]
    restart_reasons: tuple[str, ...]


def write_aggregate(
    files: FileLayer, location: CheckpointLocation, manifest: AggregateManifest, *, episodes: EpisodeLists
) -> tuple[AggregateManifest, str]:
    """Write the episode lists, then `checkpoint.json`, durable. Returns what is there now, and its digest.

    One that differs only in `created` or `traceparent` is equal: the one that is there is synced, accepted and
    returned.
    Raises CheckpointConflict for a different one, StateUnwritable, InvalidArgument for what JSON cannot
    carry.
    """
    if manifest.frontier is not None:
        documents.check_block(manifest.frontier, what="frontier")
    reference, data = _encode_lists(manifest.checkpoint_id, episodes)
    if (found := create_once(files, location.file(reference.name), data, root=location.root)) is not None:
        raise StateCorrupt(f"{location.file(reference.name)!r} is there with other bytes than its name says")
    manifest = msgspec.structs.replace(manifest, episodes=reference)
    data = documents.to_bytes(manifest)
    found = create_once(files, location.aggregate, data, root=location.root)
    if found is None:
        return manifest, documents.sha256(data)
    other = documents.from_bytes(found, AggregateManifest, path=location.aggregate)
    if msgspec.structs.replace(other, created=manifest.created, traceparent=manifest.traceparent) != manifest:
        raise CheckpointConflict(f"{location.aggregate!r} is there and belongs to another commit")
    create_once(files, location.aggregate, found, root=location.root)  # syncs it
    return other, documents.sha256(found)


def _encode_lists(checkpoint_id: str, episodes: EpisodeLists) -> tuple[EpisodeListRef, bytes]:
    content = _ListsFile(
        format=_ListsFile.FORMAT,
        schema_version=_ListsFile.VERSION,
        checkpoint_id=checkpoint_id,
        rollout_ids=tuple(episode.rollout_id for episode in episodes.continued),
        attempts=tuple(episode.attempt for episode in episodes.continued),
        restart_rollout_ids=tuple(episode.rollout_id for episode in episodes.restarts),
        restart_attempts=tuple(episode.attempt for episode in episodes.restarts),
        restart_reasons=tuple(episodes.restarts.values()),
    )
    data = documents.bounded(msgspec.json.encode(content), what="the episode lists")
    digest = documents.sha256(data)
    reference = EpisodeListRef(
        name=f"episodes-{digest}.json",
        digest=digest,
        size=len(data),
        continued=len(episodes.continued),
        restarts=len(episodes.restarts),
    )
    return reference, data


def read_aggregate(
    files: FileLayer, location: CheckpointLocation, *, expected_digest: str | None = None
) -> tuple[AggregateManifest, str]:
    """Read `checkpoint.json` and its digest.

    Raises StateNotFound if the checkpoint is not complete, StateCorrupt naming the file.
    """
    path = location.aggregate
    manifest, digest = documents.read(files, path, AggregateManifest, digest=expected_digest)
    if manifest.checkpoint_id != location.checkpoint_id:
        raise StateCorrupt(f"{path!r} belongs to checkpoint {manifest.checkpoint_id[:200]!r}")
    places = [member.participant.place for member in manifest.members]
    if len(set(places)) != len(places):
        raise StateCorrupt(f"{path!r} names a participant twice")
    for member in manifest.members:
        if not documents.is_digest(member.manifest_digest):
            raise StateCorrupt(f"{path!r} has no digest for {member.participant}")
        if member.manifest != f"{location.part(member.participant.place).relative}/manifest.json":
            raise StateCorrupt(f"{path!r} has a misnamed manifest {member.manifest[:300]!r}")
    reference = manifest.episodes
    if reference is None or reference.name != f"episodes-{reference.digest}.json":
        raise StateCorrupt(f"{path!r} does not name its episode lists")
    if not documents.is_digest(reference.digest):
        raise StateCorrupt(f"{path!r} has no digest for its episode lists")
    return manifest, digest


def read_episodes(files: FileLayer, location: CheckpointLocation, manifest: AggregateManifest) -> EpisodeLists:
    """Read the episode lists that a manifest names. Raises StateCorrupt, also if they are not there."""
    reference = manifest.episodes
    if reference is None:
        raise StateCorrupt(f"{location.aggregate!r} does not name its episode lists")
    path = location.file(reference.name)
    try:
        lists = _read_lists(files, path, reference.digest, manifest.checkpoint_id)
    except StateNotFound as error:
        raise StateCorrupt(f"{error.message}, which {location.aggregate!r} names") from error
    if (len(lists.continued), len(lists.restarts)) != (reference.continued, reference.restarts):
        raise StateCorrupt(f"{path!r} has other counts than {location.aggregate!r} says")
    return lists


def find_episodes(files: FileLayer, location: CheckpointLocation) -> EpisodeLists:
    """The lists of a checkpoint whose manifest cannot be read: their file's own name has their digest.

    Raises StateCorrupt if there is none, or more than one, that is as its name says.
    """
    found: list[EpisodeLists] = []
    for name in files.names(location.directory):
        match = _LISTS_NAME.fullmatch(name)
        if match is None:
            continue
        with suppress(StateCorrupt, StateNotFound):
            found.append(_read_lists(files, location.file(name), match[1], location.checkpoint_id))
    if len(found) != 1:
        raise StateCorrupt(f"{location.directory!r} has {len(found)} readable files with episode lists, not one")
    return found[0]


def _read_lists(files: FileLayer, path: str, digest: str, checkpoint_id: str) -> EpisodeLists:
    content, _ = documents.read(files, path, _ListsFile, digest=digest)
    try:
        continued = _episodes(content.rollout_ids, content.attempts)
        restarts = _episodes(content.restart_rollout_ids, content.restart_attempts)
        by_episode = dict(zip(restarts, content.restart_reasons, strict=True))
    except ValueError as error:
        raise StateCorrupt(f"{path!r} has an unreadable episode: {error}") from error
    if content.checkpoint_id != checkpoint_id:
        raise StateCorrupt(f"{path!r} belongs to checkpoint {content.checkpoint_id[:200]!r}")
    if len(set(continued)) != len(continued) or len(by_episode) != len(restarts):
        raise StateCorrupt(f"{path!r} has an episode twice")
    return EpisodeLists(continued, by_episode)


def _episodes(rollout_ids: Iterable[str], attempts: Iterable[int]) -> tuple[EpisodeId, ...]:
    return tuple(EpisodeId(*pair) for pair in zip(rollout_ids, attempts, strict=True))


def check_members(
    files: FileLayer, location: CheckpointLocation, manifest: AggregateManifest
) -> tuple[PartManifest, ...]:
    """Compare the aggregate manifest with the parts: digests, checkpoint, counts, and the size of every file.

    Reads manifests, not state. Returns the parts' manifests in the order of `members`. Raises StateCorrupt,
    or StateNotFound if files are only missing, naming every participant and file concerned.
    """
    parts: list[PartManifest] = []
    problems: list[StateCorrupt | StateNotFound] = []
    for member in manifest.members:
        try:
            parts.append(_check_member(files, location, member))
        except (StateCorrupt, StateNotFound) as error:
            problems.append(error)
            problems[-1].participant = str(member.participant)
    if problems:
        kind = StateCorrupt if any(isinstance(problem, StateCorrupt) for problem in problems) else StateNotFound
        text = "; ".join(f"{problem.participant}: {problem.message}" for problem in problems)
        raise kind(f"checkpoint {manifest.checkpoint_id!r}: {text}", participant=problems[0].participant)
    return tuple(parts)


def _check_member(files: FileLayer, location: CheckpointLocation, member: Member) -> PartManifest:
    place = member.participant.place
    part = location.part(place)
    found, _ = read_manifest(
        files, part, place, checkpoint_id=location.checkpoint_id, expected_digest=member.manifest_digest
    )
    if member != Member.from_manifest(location, found, member.manifest_digest):
        raise StateCorrupt(f"{part.manifest!r} differs from what {location.aggregate!r} says about it")
    for entry in found.files:
        path = location.part_file(place, entry.name, checkpoint=entry.checkpoint)
        if (size := file_size(files, path)) != entry.size:
            raise StateCorrupt(f"{path!r} has {size} bytes, not {entry.size}")
    return found
