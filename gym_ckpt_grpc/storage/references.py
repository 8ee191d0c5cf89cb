"""What checkpoints name beyond their own directory: files of earlier checkpoints, and keys of staged tokens.

A checkpoint whose base is another names all the files that it needs, at any distance. But what is kept for its files is
also still listed and can be restored, so what it names itself has to stay as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage.aggregate import AggregateManifest
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.intent import read_intent
from gym_ckpt_grpc.storage.locations import CHECKPOINTS, CheckpointLocation
from gym_ckpt_grpc.storage.part_manifest import FileEntry, read_manifest
from gym_ckpt_grpc.storage.part_reading import read_part
from gym_ckpt_grpc.storage.removal import undecided
from gym_ckpt_grpc.storage.root import CheckpointRoot

STAGING_KEYS = "staging_keys"
"""Label of the document of a policy model's part that names the tokens staged for it: capture key -> keys."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one checkpoint needs of others. checkpoints: their ids, or None if that cannot be read.

    number: of its publication; 0 if it is not published. It can name only checkpoints that were published before it.
    """

    checkpoint_id: str
    number: int
    checkpoints: frozenset[str] | None


def named_by(manifest: AggregateManifest) -> frozenset[str]:
    """The earlier checkpoints whose files a checkpoint names."""
    return _bases(entry for member in manifest.members for entry in member.files)


def named_by_parts(files: FileLayer, location: CheckpointLocation) -> frozenset[str] | None:
    """The same from the parts' own manifests, for one whose aggregate manifest cannot be read; None if they cannot.

    A part without a manifest was never committed, or is lost: it names nothing.
    """
    named: set[str] = set()
    try:
        for member in read_intent(files, location).members:
            try:
                part, _ = read_manifest(
                    files, location.part(member.place), member.place, checkpoint_id=location.checkpoint_id
                )
            except StateNotFound:
                continue
            named |= _bases(part.files)
    except (StateCorrupt, StateNotFound, InvalidArgument):
        return None
    return frozenset(named)


def _bases(entries: Iterable[FileEntry]) -> frozenset[str]:
    return frozenset(entry.checkpoint for entry in entries if entry.checkpoint)


def needed(kept: Iterable[Needs], others: Sequence[Needs]) -> dict[str, str]:
    """Which of `others` have to stay since something that stays needs them: id -> why, for people."""
    reasons: dict[str, str] = {}
    waiting = list(kept)
    while waiting:
        holder = waiting.pop()
        for other in others:
            if other.checkpoint_id in reasons or other.checkpoint_id == holder.checkpoint_id:
                continue
            if why := _need(holder, other):
                reasons[other.checkpoint_id] = why
                waiting.append(other)
    return reasons


def _need(holder: Needs, other: Needs) -> str:
    if holder.checkpoints is None:
        older = 0 < other.number < holder.number
        return f"{holder.checkpoint_id} may need its files, which cannot be read" if older else ""
    return f"{holder.checkpoint_id} needs its files" if other.checkpoint_id in holder.checkpoints else ""


def staging_keys(root: CheckpointRoot) -> frozenset[str]:
    """The keys of staged tokens that the published checkpoints of a root name: what a token store has to keep for them.

    Deleted checkpoints name nothing. Raises StateCorrupt or StateNotFound if one cannot be read, or is being removed
    meanwhile: what it names is not known then, so no token may be cleared.
    """
    keys: set[str] = set()
    deleted = {publication.checkpoint_id for publication in root.sequence.publications()}
    for listed in root.published():
        deleted.discard(listed.location.checkpoint_id)
        if listed.manifest is None:
            raise StateCorrupt(f"checkpoint {listed.location.checkpoint_id!r} cannot be read: {listed.problem}")
        naming = (m for m in listed.manifest.members if any(entry.label == STAGING_KEYS for entry in m.files))
        for member in naming:
            part = read_part(
                root.files,
                listed.location,
                member.participant.place,
                checkpoint_id=listed.location.checkpoint_id,
                expected_digest=member.manifest_digest,
                scope=(),
            )
            for named in part.documents.get(STAGING_KEYS, {}).values():
                keys.update(named)
    names = root.files.names(f"{root.path}/{CHECKPOINTS}")
    if back := deleted & (undecided(names) | set(names)):
        raise StateCorrupt(f"whether checkpoint {min(back)!r} is removed is not decided yet")
    return frozenset(keys)
