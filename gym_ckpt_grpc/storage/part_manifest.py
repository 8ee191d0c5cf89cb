"""`manifest.json` of a participant's part: created last, never replaced, known by the sha256 of its bytes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.files import FileLayer, read_file
from gym_ckpt_grpc.storage.locations import PartLocation, Place
from gym_ckpt_grpc.storage.names import escape
from gym_ckpt_grpc.storage.record_format import records_name

Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
MAX_MANIFEST = 2 << 20
"""Largest manifest of a part that is read, and so that is written, in bytes: empty lists in its open block take twenty
times their text. Facts that are larger belong into a document."""
RECORDS = "records"
DOCUMENT = "document"


class IdentityBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who a participant is. kind: `environment`, `policy_model`, `agent` or `resources`."""

    kind: ParticipantKind
    service: Name
    instance: Name
    incarnation_id: str

    @classmethod
    def of(cls, identity: ParticipantIdentity) -> IdentityBlock:
        """The block of an identity."""
        return cls(
            kind=identity.kind,
            service=identity.service,
            instance=identity.instance,
            incarnation_id=identity.incarnation_id,
        )

    @property
    def place(self) -> Place:
        """(kind, service, instance)."""
        return (self.kind, self.service, self.instance)

    def __str__(self) -> str:
        return f"{self.kind}/{self.service}/{self.instance}"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that a part needs.

    name: in the part's directory. role: `records` or `document`. label: a document's own name, else empty.
    size in bytes. digest: a records file's root digest, a document's sha256; the file is named by it. checkpoint: the
    earlier checkpoint in whose part of the same place a records file is, or empty: in this one.
    """

    name: str
    role: str
    label: str = ""
    size: Count
    digest: str
    checkpoint: str = ""

    def expected_name(self) -> str | None:
        """The only name that a file of this role, label and digest may have; None if it can have none."""
        if not documents.is_digest(self.digest):
            return None
        if self.role == RECORDS and not self.label:
            return records_name(self.digest)
        if self.role == DOCUMENT and self.label:
            return document_name(self.label, self.digest)
        return None


def document_name(label: str, digest: str) -> str:
    """`<label>-<digest>.json`, with the label escaped; a label of 128 characters or less fits."""
    return f"{escape(label)}-{digest}.json"


class PartManifest(documents.Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One participant's part of a checkpoint.

    records, restarts: counts. bytes: sum of the sizes of its own files. files: all it needs, its own records file
    first, then those of earlier checkpoints that it points into. state_bytes: of all payloads, wherever they are, as
    they were encoded. chain: how many incremental checkpoints it is away from a full one; 0 for a full one. extra: the
    kind's own facts, an open JSON object.

    Version 1 has neither `checkpoint`, `state_bytes` nor `chain`: it is always full.
    """

    FORMAT: ClassVar[str] = "gymckpt.part"
    VERSION: ClassVar[int] = 2
    READABLE: ClassVar[tuple[int, ...]] = (1, 2)

    checkpoint_id: Annotated[str, msgspec.Meta(min_length=1)]
    participant: IdentityBlock
    records: Count
    restarts: Count
    bytes: Count
    files: tuple[FileEntry, ...]
    state_bytes: Count = 0
    chain: Count = 0
    extra: dict[str, Any]

    @property
    def own_files(self) -> tuple[FileEntry, ...]:
        """The files in its own directory."""
        return tuple(entry for entry in self.files if not entry.checkpoint)

    @property
    def base_files(self) -> tuple[FileEntry, ...]:
        """The records files of earlier checkpoints that it needs."""
        return tuple(entry for entry in self.files if entry.checkpoint)

    @property
    def records_file(self) -> FileEntry:
        """Its own records file."""
        return next(entry for entry in self.files if entry.role == RECORDS and not entry.checkpoint)


def new_manifest(
    identity: ParticipantIdentity,
    *,
    checkpoint_id: str,
    records: int,
    restarts: int,
    files: tuple[FileEntry, ...],
    state_bytes: int,
    chain: int,
    extra: dict[str, Any],
) -> PartManifest:
    """The manifest of a part of these files."""
    return PartManifest(
        format=PartManifest.FORMAT,
        schema_version=PartManifest.VERSION,
        checkpoint_id=checkpoint_id,
        participant=IdentityBlock.of(identity),
        records=records,
        restarts=restarts,
        bytes=sum(entry.size for entry in files if not entry.checkpoint),
        files=files,
        state_bytes=state_bytes,
        chain=chain,
        extra=extra,
    )


def manifest_bytes(manifest: PartManifest) -> bytes:
    """The bytes of a manifest. Raises InvalidArgument for an `extra` that JSON cannot carry, or that is too large."""
    return documents.bounded(
        documents.to_bytes(manifest), what=f"the manifest of {manifest.participant}", limit=MAX_MANIFEST
    )


def parse_manifest(data: bytes, *, path: str) -> PartManifest:
    """Decode and check a manifest. Raises StateCorrupt naming `path`; opens none of the files it names."""
    manifest = documents.from_bytes(data, PartManifest, path=path)
    if sum(entry.role == RECORDS for entry in manifest.own_files) != 1:
        raise StateCorrupt(f"{path!r} does not name exactly one records file of its own")
    for entry in manifest.files:
        try:
            expected = entry.expected_name()
        except ValueError:
            expected = None
        if entry.name != expected:
            raise StateCorrupt(f"{path!r} names a file {entry.name[:300]!r} that is misnamed or outside its directory")
        if entry.checkpoint and not _is_base(entry, manifest):
            raise StateCorrupt(f"{path!r} names a file {entry.name[:300]!r} of no possible earlier checkpoint")
    if len({(entry.checkpoint, entry.name) for entry in manifest.files}) != len(manifest.files):
        raise StateCorrupt(f"{path!r} names a file twice")
    labels = [entry.label for entry in manifest.files if entry.role == DOCUMENT]
    if len(set(labels)) != len(labels):
        raise StateCorrupt(f"{path!r} has two documents of one name")
    if sum(entry.size for entry in manifest.own_files) != manifest.bytes:
        raise StateCorrupt(f"{path!r} says {manifest.bytes} bytes, its files have another sum")
    return manifest


def _is_base(entry: FileEntry, manifest: PartManifest) -> bool:
    problem = checkpoint_id_problem(entry.checkpoint)
    return not problem and entry.role == RECORDS and entry.checkpoint != manifest.checkpoint_id and manifest.chain > 0


def read_manifest_bytes(files: FileLayer, part: PartLocation) -> bytes:
    """The bytes of a part's manifest, not looked into. Raises StateNotFound, StateCorrupt."""
    return read_file(files, part.manifest, limit=MAX_MANIFEST)


def read_manifest(
    files: FileLayer,
    part: PartLocation,
    place: Place,
    *,
    checkpoint_id: str,
    expected_digest: str | None = None,
) -> tuple[PartManifest, str]:
    """Read a part's manifest and its digest.

    Raises StateNotFound if there is none; StateCorrupt naming the file and the participant if it is damaged,
    has another digest, or belongs to another checkpoint or participant.
    """
    data = read_manifest_bytes(files, part)
    digest = documents.sha256(data)
    if expected_digest is not None and digest != expected_digest:
        raise StateCorrupt(f"{part.manifest!r} has the sha256 {digest}, not the expected {expected_digest}")
    manifest = parse_manifest(data, path=part.manifest)
    if manifest.checkpoint_id != checkpoint_id:
        raise StateCorrupt(
            f"{part.manifest!r} belongs to checkpoint {manifest.checkpoint_id[:200]!r}, not {checkpoint_id!r}"
        )
    if manifest.participant.place != place:
        raise StateCorrupt(f"{part.manifest!r} is the part of {manifest.participant}, not of {'/'.join(place)}")
    return manifest, digest
