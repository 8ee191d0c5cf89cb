"""Writing a participant's part of a checkpoint; read back by part_reading.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import orjson

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InvalidArgument,
    StateCorrupt,
    StateUnwritable,
    Violation,
)
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.base_records import BaseRecords
from gym_ckpt_grpc.storage.files import FileLayer, FileSink, NameTaken
from gym_ckpt_grpc.storage.locations import CheckpointLocation, PartLocation, check_part_path
from gym_ckpt_grpc.storage.names import is_temporary
from gym_ckpt_grpc.storage.part_manifest import (
    DOCUMENT,
    RECORDS,
    FileEntry,
    PartManifest,
    document_name,
    manifest_bytes,
    new_manifest,
    parse_manifest,
)
from gym_ckpt_grpc.storage.placing import Temporary, read_existing, sync_up, write_temporary
from gym_ckpt_grpc.storage.record_format import CHUNK_SIZE, records_name
from gym_ckpt_grpc.storage.record_writer import Progress, RecordFileWriter, WrittenFile
from gym_ckpt_grpc.storage.records import Record
from gym_ckpt_grpc.storage.stop import StopFlag

MAX_DOCUMENT_LABEL = 64
"""Longest name of a document of a part, in characters."""


@dataclass(frozen=True, slots=True)
class PartManifestInfo:
    """What a Commit replies about the part it wrote.

    manifest_name: from the checkpoint's directory. bytes: of all its own files but the manifest. state_bytes: of all
    payloads, also those that an earlier checkpoint keeps. chain: incremental checkpoints since the last full one.
    episodes: those with a record, in order, each once.
    """

    manifest_name: str
    manifest_digest: str
    record_count: int
    restart_count: int
    bytes: int
    files: tuple[FileEntry, ...]
    state_bytes: int
    chain: int
    episodes: tuple[EpisodeId, ...]


def write_part(
    files: FileLayer,
    location: CheckpointLocation,
    identity: ParticipantIdentity,
    *,
    checkpoint_id: str,
    records: Iterable[Record],
    restarts: int = 0,
    extra: Mapping[str, Any] | None = None,
    documents: Mapping[str, Mapping[str, Any]] | None = None,
    base: CheckpointLocation | None = None,
    compress: bool = False,
    progress: Progress | None = None,
    stop: StopFlag | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> PartManifestInfo:
    """Write one participant's part, durable, its manifest last. Blocks.

    records: taken one by one, in an order that a repeated write must repeat. restarts: how many episodes
    start over. extra: the kind's facts for the manifest. documents: files of their own beside the records, by
    a name of at most 64 characters. A write of the same again is synced and accepted. base: an earlier checkpoint of
    the same root, whose part of this participant has what it has already: that is pointed at. compress: with zstd, each
    chunk. chunk_size in bytes.

    Raises CheckpointConflict ("belongs to another commit") if another part is there, StateUnwritable,
    InvalidArgument for what cannot be stored or be a base, WriteStopped; what `records` itself raises passes through.
    In each case no temporary file is left, and nothing published is changed.
    """
    part = location.part(identity.place)
    check_part_path(part, files)
    if base is not None:
        _check_base(base, location, checkpoint_id)
    writer = _PartWriter(files, part, identity, checkpoint_id, stop or StopFlag())
    return writer.write(
        records,
        restarts=restarts,
        extra=extra or {},
        blocks=documents or {},
        options=_Options(base, compress, progress, chunk_size),
    )


def _check_base(base: CheckpointLocation, location: CheckpointLocation, checkpoint_id: str) -> None:
    if base.root != location.root:
        problem = "is in another root"
    elif base.checkpoint_id in (location.checkpoint_id, checkpoint_id):
        problem = "is the checkpoint itself"
    else:
        return
    field = "base_checkpoint_uri"
    raise InvalidArgument(f"{field} {base.uri!r} {problem}", violations=[Violation(field, problem)])


@dataclass(frozen=True, slots=True)
class _Options:
    """How records are written."""

    base: CheckpointLocation | None
    compress: bool
    progress: Progress | None
    chunk_size: int


class _NullSink:
    """Takes the place of a file when only the digest is wanted."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def begin_sync(self) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _PartWriter:
    """One write of one part."""

    def __init__(
        self,
        files: FileLayer,
        part: PartLocation,
        identity: ParticipantIdentity,
        checkpoint_id: str,
        stop: StopFlag,
    ) -> None:
        self._files = files
        self._part = part
        self._identity = identity
        self._checkpoint_id = checkpoint_id
        self._stop = stop

    def write(
        self,
        records: Iterable[Record],
        *,
        restarts: int,
        extra: Mapping[str, Any],
        blocks: Mapping[str, Mapping[str, Any]],
        options: _Options,
    ) -> PartManifestInfo:
        self._stop.check()
        block = documents.check_block(extra, what="extra")
        beside = [_document(label, content) for label, content in blocks.items()]
        existing = self._existing()
        with ExitStack() as stack:
            temporaries: list[tuple[Temporary, FileEntry]] = []
            if existing is None:
                self._files.make_dirs(self._part.directory)
                temporary = stack.enter_context(Temporary(self._files, self._part.directory))
                entries, written, chain = self._write_records(
                    temporary.sink, records, options, self._base(options.base)
                )
                temporary.finish()
                temporaries.append((temporary, entries[0]))
                for document, data in beside:
                    made = stack.enter_context(write_temporary(self._files, self._part.directory, data))
                    temporaries.append((made, document))
            else:
                entries, written, chain = self._write_records(
                    _NullSink(), records, options, self._base_of(existing, options.base)
                )
            manifest = new_manifest(
                self._identity,
                checkpoint_id=self._checkpoint_id,
                records=written.record_count,
                restarts=restarts,
                files=(*entries, *(document for document, _ in beside)),
                state_bytes=written.payload_bytes,
                chain=chain,
                extra=block,
            )
            data = manifest_bytes(manifest)
            if existing is None:
                self._publish(temporaries, data, stack)
            else:
                self._accept(existing, data)
        self._clean(manifest)
        return self._info(manifest, data, written.episodes)

    def _existing(self) -> bytes | None:
        """The manifest that is there already. Raises CheckpointConflict if it is another commit's."""
        data = read_existing(self._files, self._part.manifest)
        if data is None:
            return None
        manifest = self._parse_other(data)
        if manifest is None or manifest.checkpoint_id != self._checkpoint_id:
            raise self._conflict()
        return data

    def _parse_other(self, data: bytes) -> PartManifest | None:
        try:
            return parse_manifest(data, path=self._part.manifest)
        except StateCorrupt:
            return None

    def _conflict(self) -> CheckpointConflict:
        return CheckpointConflict(f"{self._part.manifest!r} belongs to another commit", participant=str(self._identity))

    def _base(self, location: CheckpointLocation | None) -> BaseRecords | None:
        return None if location is None else BaseRecords.read(self._files, location, self._identity.place)

    def _base_of(self, existing: bytes, location: CheckpointLocation | None) -> BaseRecords | None:
        """The base to compare with a part that is there already: pointing only where that does, and no less.

        A base may have been unreadable when that was written, or may be now.
        """
        manifest = self._parse_other(existing)
        if location is None or manifest is None or not manifest.base_files:
            return None
        base = BaseRecords.read(self._files, location, self._identity.place, only=manifest.base_files)
        if base is None:
            raise StateUnwritable(
                f"{self._part.manifest!r} is there, and cannot be compared: {location.checkpoint_id} cannot be read now"
            )
        return base

    def _write_records(
        self, sink: FileSink, records: Iterable[Record], options: _Options, base: BaseRecords | None
    ) -> tuple[list[FileEntry], WrittenFile, int]:
        """Gives the entries of the file itself and of those it points into, what was written, and its chain."""
        writer = RecordFileWriter(
            sink,
            stop=self._stop,
            progress=options.progress,
            chunk_size=options.chunk_size,
            base=base,
            compress=options.compress,
        )
        try:
            writer.add(records)
            written = writer.finish()
        finally:
            writer.abort()
        entries = [_records_entry(written.root_digest, written.size)]
        entries += [_records_entry(file.root_digest, file.size, file.checkpoint_id) for file in written.base_files]
        return entries, written, base.chain + 1 if base is not None and written.base_files else 0

    def _publish(self, temporaries: list[tuple[Temporary, FileEntry]], data: bytes, stack: ExitStack) -> None:
        """Name the files, then the manifest: the only moment at which anything of this write appears."""
        manifest = stack.enter_context(write_temporary(self._files, self._part.directory, data))
        try:
            with self._stop.publication():
                for temporary, entry in temporaries:
                    # Named by their content: what may be there under that name has the same bytes.
                    temporary.replace(self._part.file(entry.name))
                self._files.sync_dir(self._part.directory)
                manifest.publish(self._part.manifest)
            sync_up(self._files, self._part.directory, self._part.root)
        except NameTaken:
            self._accept(read_existing(self._files, self._part.manifest) or b"", data)
        except StateUnwritable:
            # A winner may have removed our temporary files as strays: then this is no failure to write.
            if self._existing() not in (None, data):
                raise self._conflict() from None
            raise

    def _accept(self, found: bytes, ours: bytes) -> None:
        """Another manifest was first: sync and accept an equal one, else remove what is ours and refuse."""
        manifest = self._parse_other(found)
        if found != ours or manifest is None:
            if manifest is not None:
                self._clean(manifest)
            raise self._conflict()
        for entry in manifest.own_files:
            self._files.sync_file(self._part.file(entry.name))
        self._files.sync_file(self._part.manifest)
        sync_up(self._files, self._part.directory, self._part.root)

    def _clean(self, manifest: PartManifest) -> None:
        """Remove what dead or losing writers left: once there is a manifest, all that it does not name."""
        kept = {entry.name for entry in manifest.own_files} | {"manifest.json"}
        with suppress(StateUnwritable, StateCorrupt):
            for name in self._files.names(self._part.directory):
                if name not in kept and (is_temporary(name) or _is_content_name(name)):
                    self._files.remove(self._part.file(name))

    def _info(self, manifest: PartManifest, data: bytes, episodes: tuple[EpisodeId, ...]) -> PartManifestInfo:
        return PartManifestInfo(
            manifest_name=f"{self._part.relative}/manifest.json",
            manifest_digest=documents.sha256(data),
            record_count=manifest.records,
            restart_count=manifest.restarts,
            bytes=manifest.bytes,
            files=manifest.files,
            state_bytes=manifest.state_bytes,
            chain=manifest.chain,
            episodes=episodes,
        )


def _records_entry(root_digest: str, size: int, checkpoint: str = "") -> FileEntry:
    name = records_name(root_digest)
    return FileEntry(name=name, role=RECORDS, size=size, digest=root_digest, checkpoint=checkpoint)


def _document(label: str, content: Mapping[str, Any]) -> tuple[FileEntry, bytes]:
    what = f"the document {label[:80]!r}"
    data = documents.bounded(orjson.dumps(documents.check_block(content, what=label)), what=what)
    digest = documents.sha256(data)
    try:
        name = document_name(label, digest)
    except ValueError as error:
        raise InvalidArgument(f"{what} cannot be stored: {error}") from None
    if len(label) > MAX_DOCUMENT_LABEL:
        raise InvalidArgument(f"{what} has a name of {len(label)} characters, more than {MAX_DOCUMENT_LABEL}")
    return FileEntry(name=name, role=DOCUMENT, label=label, size=len(data), digest=digest), data


def _is_content_name(name: str) -> bool:
    stem, _, _ = name.rpartition(".")
    return "-" in stem and documents.is_digest(stem.rpartition("-")[2])
