"""What a damaged part needs besides records: facts of its manifest, and documents. Made anew only with proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import orjson

from gym_ckpt_grpc.protocol.errors import GymCkptError, StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.aggregate import Member
from gym_ckpt_grpc.storage.part_manifest import DOCUMENT, FileEntry, PartManifest
from gym_ckpt_grpc.storage.part_reading import read_document
from gym_ckpt_grpc.storage.records import Record
from gym_ckpt_grpc.storage.salvaged_records import IntactRecords, Lost
from gym_ckpt_grpc.storage.viewing import CheckpointView, PartView


class Repairs(Protocol):
    """What kinds know about the documents of their parts; storage believes none of it without a digest."""

    def document(self, label: str, records: Iterable[Record]) -> Mapping[str, Any] | None:
        """A document as these records give it, or None for one of another label."""

    def extra(self, blocks: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """The manifest's facts as these documents give them."""


@dataclass(frozen=True, slots=True)
class MendedPart:
    """What a part is written anew with. unsafe: why it fits no whole checkpoint, or empty."""

    restarts: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lost: tuple[Lost, ...] = ()
    unsafe: str = ""


def mend_part(
    view: CheckpointView, part: PartView, repairs: Repairs | None, records: IntactRecords | None
) -> MendedPart:
    """Facts and documents of a part. records: its intact records, or None if all are lost. Blocks."""
    known = part.manifest or part.member
    if known is None:
        whose = f"the manifest of {part.name} is lost, and checkpoint.json with it"
        return MendedPart(unsafe=whose, lost=(Lost(part.name, None, str(part.trouble)),))
    blocks: dict[str, Mapping[str, Any]] = {}
    lost: list[Lost] = []
    unsafe = ""
    for entry in known.files:
        if entry.role != DOCUMENT:
            continue
        try:
            blocks[entry.label] = _document(view, part, entry, repairs, records)
        except (StateCorrupt, StateNotFound) as error:
            why = view.root.shortened(error.message)
            lost.append(Lost(part.name, None, f"document {entry.label}: {why}"))
            unsafe = f"document {entry.label} of {part.name} is lost and cannot be made anew from its records: {why}"
    if part.manifest is not None:
        return MendedPart(part.manifest.restarts, part.manifest.extra, blocks, tuple(lost), unsafe)
    assert part.member is not None
    extra = _proven_extra(view, part.member, blocks, repairs)
    if extra is None:
        unsafe = unsafe or f"the manifest of {part.name} is lost, and its facts cannot be proven: {part.trouble}"
        lost.append(Lost(part.name, None, f"facts of its manifest: {part.trouble}"))
    return MendedPart(part.member.restarts, extra or {}, blocks, tuple(lost), unsafe)


def _document(
    view: CheckpointView, part: PartView, entry: FileEntry, repairs: Repairs | None, records: IntactRecords | None
) -> Mapping[str, Any]:
    """As it is in its file, or made anew with the very same bytes. Raises what reading it raised."""
    try:
        return read_document(view.root.files, part.location, entry)
    except (StateCorrupt, StateNotFound):
        if repairs is None or records is None:
            raise
        made = _made(repairs, entry.label, records)
        if made is None or documents.sha256(orjson.dumps(made)) != entry.digest:
            raise
        return made


def _made(repairs: Repairs, label: str, records: IntactRecords) -> dict[str, Any] | None:
    """A document as these records give it, as it would be written; None if they give none."""
    try:
        made = repairs.document(label, records)
        return None if made is None else documents.check_block(made, what=label)
    except (GymCkptError, ValueError, TypeError):  # they verify, and are not what their kind writes
        return None


def _proven_extra(
    view: CheckpointView, member: Member, blocks: Mapping[str, Mapping[str, Any]], repairs: Repairs | None
) -> Mapping[str, Any] | None:
    """The facts with which the lost manifest has the digest that checkpoint.json knows, or None."""
    candidates: list[Mapping[str, Any]] = [{}]
    if repairs is not None:
        candidates.append(repairs.extra(blocks))
    for extra in candidates:
        if any(documents.sha256(data) == member.manifest_digest for data in _manifests(view, member, extra)):
            return extra
    return None


def _manifests(view: CheckpointView, member: Member, extra: Mapping[str, Any]) -> Iterable[bytes]:
    """The manifest of a member's part in each version, byte by byte."""
    manifest = PartManifest(
        format=PartManifest.FORMAT,
        schema_version=PartManifest.VERSION,
        checkpoint_id=view.checkpoint_id,
        participant=member.participant,
        records=member.records,
        restarts=member.restarts,
        bytes=member.bytes,
        files=member.files,
        state_bytes=member.state_bytes,
        chain=member.chain,
        extra=dict(extra),
    )
    yield documents.to_bytes(manifest)
    first = msgspec.to_builtins(manifest)
    first["schema_version"] = 1
    for name in ("state_bytes", "chain"):
        del first[name]
    for entry in first["files"]:
        del entry["checkpoint"]
    yield msgspec.json.format(msgspec.json.encode(first), indent=2) + b"\n"
