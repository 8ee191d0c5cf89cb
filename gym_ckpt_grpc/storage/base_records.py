"""What an earlier checkpoint has already of a participant's state, so that it is not written again (section 4)."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Self

from msgspec.structs import replace

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.locations import CheckpointLocation, Place, check_part_path
from gym_ckpt_grpc.storage.part_manifest import FileEntry, PartManifest, read_manifest
from gym_ckpt_grpc.storage.record_format import DIGEST_SIZE, FOOTER_SIZE, records_name, unpack_footer
from gym_ckpt_grpc.storage.record_index import BaseFile, ChunkPlace, RecordIndex
from gym_ckpt_grpc.storage.record_reader import RecordFile

log = logging.getLogger(__name__)


class BaseRecords:
    """The payloads of an earlier part by their digest, each of which is given away once.

    chain: how many incremental checkpoints that part is away from a full one.
    """

    def __init__(self, index: RecordIndex, own: BaseFile, chain: int, *, hidden: frozenset[BaseFile]) -> None:
        """own: the file that the index is of. hidden: files that nothing may be pointed at in."""
        self.chain = chain
        self._chunks = tuple(place if place.base else replace(place, base=own) for place in index.chunks)
        self._chunk_of, self._offsets, self._lengths = index.chunk_of, index.offsets, index.lengths
        self._positions = self._by_digest(index.digests, hidden)
        self._used: dict[int, int] = {}
        self._places: list[ChunkPlace] = []
        self._files: dict[BaseFile, None] = {}

    def _by_digest(self, digests: bytes, hidden: frozenset[BaseFile]) -> dict[bytes, list[int]]:
        """Digest -> positions, the first one last; without what is empty, or in a hidden file."""
        found: dict[bytes, list[int]] = {}
        for position in reversed(range(len(self._lengths))):
            if self._lengths[position] and not (hidden and self._chunks[self._chunk_of[position]].base in hidden):
                digest = digests[position * DIGEST_SIZE : (position + 1) * DIGEST_SIZE]
                found.setdefault(digest, []).append(position)
        return found

    def take(self, digest: bytes, length: int) -> tuple[int, int] | None:
        """Where such a payload is, or None: (-1 - position in `used_chunks`, offset in the raw chunk).

        Never gives the same place twice: no two payloads of an index share bytes.
        """
        positions = self._positions.get(digest)
        if not positions or self._lengths[positions[-1]] != length:
            return None
        position = positions.pop()
        return -1 - self._use(self._chunk_of[position]), self._offsets[position]

    def _use(self, chunk: int) -> int:
        number = self._used.get(chunk)
        if number is None:
            number = self._used[chunk] = len(self._places)
            place = self._chunks[chunk]
            assert place.base is not None
            self._places.append(place)
            self._files[place.base] = None
        return number

    @property
    def used_chunks(self) -> tuple[ChunkPlace, ...]:
        """The chunks that were given away so far, in order of first use."""
        return tuple(self._places)

    @property
    def used_files(self) -> tuple[BaseFile, ...]:
        """The files that have them, in order of first use."""
        return tuple(self._files)

    @classmethod
    def read(
        cls, files: FileLayer, base: CheckpointLocation, place: Place, *, only: Collection[FileEntry] | None = None
    ) -> Self | None:
        """The base for a participant; None if the checkpoint has no part of it, or one that cannot be read.

        Reads the manifest and the index, no payload. What cannot be read is logged and never an error: it costs
        bytes, and nothing else. only: the files that may be pointed into; then None if one of them cannot be read.
        """
        part = base.part(place)
        manifest = None
        try:
            check_part_path(part, files)
            manifest, _ = read_manifest(files, part, place, checkpoint_id=base.checkpoint_id)
            return cls._of(files, base, manifest, only)
        except (StateNotFound, StateCorrupt, InvalidArgument) as error:
            if manifest is not None or not isinstance(error, StateNotFound):
                log.warning("checkpoint %s is no base for %s/%s/%s now: %s", base.checkpoint_id, *place, error)
            return None

    @classmethod
    def _of(
        cls, files: FileLayer, base: CheckpointLocation, manifest: PartManifest, only: Collection[FileEntry] | None
    ) -> Self:
        place, entry = manifest.participant.place, manifest.records_file
        path = base.part_file(place, entry.name)
        with RecordFile(files, path, root_digest=entry.digest, size=entry.size) as file:
            index = file.index
        own = BaseFile(base.checkpoint_id, entry.digest, entry.size)
        named = None if only is None else {(each.checkpoint, each.digest) for each in only}
        hidden: set[BaseFile] = set()
        for each in (own, *index.base_files):
            if named is not None and (each.checkpoint_id, each.root_digest) not in named:
                hidden.add(each)
            elif each is not own and (problem := _problem(files, base, place, each)):
                if named is not None:
                    raise StateCorrupt(problem)
                log.warning("what %r has of earlier state is written again: %s", path, problem)
                hidden.add(each)
        return cls(index, own, manifest.chain, hidden=frozenset(hidden))


def _problem(files: FileLayer, base: CheckpointLocation, place: Place, wanted: BaseFile) -> str | None:
    """What is wrong with a file that an index points into, as far as its size and footer tell; None if nothing."""
    path = base.part_file(place, records_name(wanted.root_digest), checkpoint=wanted.checkpoint_id)
    try:
        source = files.open(path)
        try:
            if source.size != wanted.size:
                return f"{path!r} has {source.size} bytes, not {wanted.size}"
            footer = unpack_footer(source.read(source.size - FOOTER_SIZE, FOOTER_SIZE))
        finally:
            source.close()
    except (StateNotFound, StateCorrupt) as error:
        return error.message
    if footer is None or footer.digest.hex() != wanted.root_digest:
        return f"{path!r} is another file"
    return None
