"""The root as the coordinator uses it: epochs, intent, aggregate manifest, publication. Blocking; run in threads."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.protocol.errors import ControlError, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    LATEST,
    AggregateManifest,
    CheckpointRoot,
    EpisodeLists,
    Excluded,
    Found,
    IdentityBlock,
    Intent,
    OpaqueBlock,
    Payload,
    Published,
    check_members,
    read_episodes,
    read_manifest,
    write_aggregate,
)
from gym_ckpt_grpc.storage import Member as PartMember
from gymckpt.v1 import participant_pb2


@dataclass(frozen=True, slots=True)
class Part:
    """What one participant's Commit replied."""

    identity: ParticipantIdentity
    reply: participant_pb2.CommitResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Everything an aggregate manifest says, before its bytes are made."""

    checkpoint_id: str
    run_id: str
    controller_id: str
    epoch: int
    parts: Sequence[Part]
    continued: tuple[EpisodeId, ...]
    restarts: Mapping[EpisodeId, str]
    excluded: Mapping[str, str] = field(default_factory=dict)
    trainer: Payload | None = None
    source_checkpoint: str = ""
    policy_versions: Mapping[str, str] = field(default_factory=dict)


def preflight(root: CheckpointRoot, *, incremental: bool) -> None:
    """Check that the root takes another checkpoint of the size of the newest one.

    How much an incremental one will write is not known: it must have room for manifests only. Raises StateUnwritable
    naming the path.
    """
    root.preflight(expected_bytes=0 if incremental else _size_in_full(root))


def _size_in_full(root: CheckpointRoot) -> int:
    try:
        members = root.find(LATEST).manifest.members
    except ControlError:
        return 0  # nothing to go by
    return sum(member.state_bytes if member.chain else member.bytes for member in members)


def newest_text(root: CheckpointRoot) -> str:
    """Which checkpoint is the newest published one, for people. Never raises for a root that cannot be read."""
    try:
        newest = root.sequence.latest()
    except ControlError as error:
        return f"the newest published checkpoint could not be read: {error.message}"
    if newest is None:
        return "nothing is published in this root"
    return f"the newest published checkpoint is still {newest.checkpoint_id} (number {newest.number})"


def write_intent(
    root: CheckpointRoot,
    checkpoint_id: str,
    *,
    run_id: str,
    controller_id: str,
    epoch: int,
    members: Sequence[Member],
    scope: Sequence[EpisodeId],
) -> str:
    """Say whose the checkpoint's directory is, before the first Commit; returns its storage_uri."""
    keys = "\n".join(sorted(episode.capture_key for episode in scope)).encode()
    intent = Intent(
        checkpoint_id=checkpoint_id,
        run_id=run_id,
        controller_id=controller_id,
        epoch=epoch,
        members=tuple(IdentityBlock.of(member.identity) for member in members),
        scope={"episodes": len(scope), "sha256": hashlib.sha256(keys).hexdigest()},
    )
    return root.write_intent(intent).uri


def write_manifest(root: CheckpointRoot, draft: Draft, *, traceparent: str = "") -> tuple[AggregateManifest, str]:
    """Read every part's manifest back, compare it with the reply, then write the aggregate manifest, durable.

    traceparent: of the checkpoint's span, so that a restore is linked to its trace.
    Raises StateCorrupt or StateNotFound naming the participant, and what `write_aggregate` raises.
    """
    location = root.location(draft.checkpoint_id)
    manifest = AggregateManifest(
        checkpoint_id=draft.checkpoint_id,
        run_id=draft.run_id,
        controller_id=draft.controller_id,
        epoch=draft.epoch,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source_checkpoint=draft.source_checkpoint,
        members=tuple(_read_back(root, draft.checkpoint_id, part) for part in draft.parts),
        excluded=tuple(_excluded(name, reason) for name, reason in sorted(draft.excluded.items())),
        trainer=OpaqueBlock.of(draft.trainer) if draft.trainer else None,
        policy_versions=dict(draft.policy_versions),
        traceparent=traceparent or msgspec.UNSET,
    )
    lists = EpisodeLists(draft.continued, draft.restarts)
    return write_aggregate(root.files, location, manifest, episodes=lists)


def _read_back(root: CheckpointRoot, checkpoint_id: str, part: Part) -> PartMember:
    location, place, reply = root.location(checkpoint_id), part.identity.place, part.reply
    try:
        manifest, digest = read_manifest(
            root.files,
            location.part(place),
            place,
            checkpoint_id=checkpoint_id,
            expected_digest=reply.manifest_digest,
        )
    except (StateCorrupt, StateNotFound) as error:
        error.participant = error.participant or str(part.identity)
        raise
    told = (part.identity.incarnation_id, reply.record_count, reply.restart_count)
    found = (manifest.participant.incarnation_id, manifest.records, manifest.restarts)
    if told != found:
        raise StateCorrupt(
            f"{location.part(place).manifest!r} has (incarnation, records, restarts) {found}, "
            f"the Commit replied {told}",
            participant=str(part.identity),
        )
    return PartMember.from_manifest(location, manifest, digest)


def _excluded(name: str, reason: str) -> Excluded:
    kind, service, instance = name.partition("#")[0].split("/", 2)
    return Excluded(kind=kind, service=service, instance=instance, reason=reason)


def publish(root: CheckpointRoot, checkpoint_id: str, digest: str, *, epoch: int) -> Published:
    """Append the sequence entry: the commit point; then move LATEST."""
    return root.publish(checkpoint_id, digest, epoch=epoch)


def publication_number(root: CheckpointRoot, checkpoint_id: str) -> int | None:
    """The number under which a checkpoint is published, or None. Raises StateCorrupt if that cannot be read."""
    for publication in root.sequence.publications():
        if publication.checkpoint_id == checkpoint_id:
            return publication.number
    return None


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to restore, checked as a whole against its files."""

    found: Found
    lists: EpisodeLists

    @property
    def manifest(self) -> AggregateManifest:
        return self.found.manifest


def read_source(root: CheckpointRoot, selector: str) -> Source:
    """Read a published checkpoint and compare every part with its files, before anything is installed.

    Raises StateNotFound (nothing published under that name), StateCorrupt naming file and participant.
    """
    found = root.find(selector)
    if found.publication is None:
        raise StateNotFound(f"checkpoint {selector!r} is complete but was never published")
    check_members(root.files, found.location, found.manifest)
    return Source(found, read_episodes(root.files, found.location, found.manifest))
