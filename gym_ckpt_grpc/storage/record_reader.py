"""Reading a records file: index and footer first, then only what is asked for, each verified before use."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.chunk_reading import BasePaths, ChunkReader
from gym_ckpt_grpc.storage.collector import paused_collector
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.payloads import Codec, Payload, decode, decoded_payload
from gym_ckpt_grpc.storage.record_format import (
    FOOTER_SIZE,
    HEADER_SIZE,
    MAX_INDEX,
    header,
    header_problem,
    unpack_footer,
)
from gym_ckpt_grpc.storage.record_index import BaseFile, RecordIndex
from gym_ckpt_grpc.storage.records import EpisodeSelection, Record

_CODECS = {codec.value: codec for codec in Codec}


@dataclass(frozen=True, slots=True)
class Damage:
    """A payload that is not as it was written. problem: to be read after its name, such as `is damaged in chunk 3`.

    base: the file of an earlier checkpoint that should have it, or None.
    """

    episode: EpisodeId
    payload: str
    problem: str
    base: BaseFile | None = None


class RecordFile:
    """An open records file whose header, footer and index are checked. Close it, or use it as a context.

    root_digest, size: what the manifest says; another one is StateCorrupt. bases: where the files of earlier
    checkpoints are that it points into; without it only what is in this file can be read. bytes_read: from all files.
    Everything that this class raises is StateNotFound, or StateCorrupt naming the file and, where known, the episodes.
    """

    def __init__(
        self,
        files: FileLayer,
        path: str,
        *,
        root_digest: str | None = None,
        size: int | None = None,
        bases: BasePaths | None = None,
    ) -> None:
        self.path = path
        self.bytes_read = 0
        self._source = files.open(path)
        try:
            self.index = self._read_index(root_digest, size)
            self._chunks = ChunkReader(files, self._source, self.index, bases)
        except BaseException:
            self._source.close()
            raise

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._source.size

    @property
    def episodes(self) -> tuple[EpisodeId, ...]:
        """The episode of each record, in order."""
        return self.index.episodes

    def close(self) -> None:
        """Close the file, and the others that it made open."""
        self._chunks.close()
        self._source.close()

    def _read(self, offset: int, length: int) -> bytes:
        self.bytes_read += length
        return self._source.read(offset, length)

    def _read_index(self, root_digest: str | None, size: int | None) -> RecordIndex:
        if size is not None and self.size != size:
            raise StateCorrupt(f"{self.path!r} has {self.size} bytes, not {size}")
        if self.size < HEADER_SIZE + FOOTER_SIZE:
            raise StateCorrupt(f"{self.path!r} has only {self.size} bytes: it was cut short")
        head = self._read(0, HEADER_SIZE)
        if problem := header_problem(head):
            raise StateCorrupt(f"{self.path!r} {problem}")
        footer = unpack_footer(self._read(self.size - FOOTER_SIZE, FOOTER_SIZE))
        if footer is None:
            raise StateCorrupt(f"{self.path!r} does not end like a records file: it was cut short")
        if footer.offset < HEADER_SIZE or footer.offset + footer.length + FOOTER_SIZE != self.size:
            raise StateCorrupt(f"{self.path!r} has a footer that does not fit its {self.size} bytes")
        if footer.length > MAX_INDEX:
            raise StateCorrupt(f"{self.path!r} has an index of {footer.length} bytes, more than {MAX_INDEX}")
        data = self._read(footer.offset, footer.length)
        digest = hashlib.sha256(data)
        if digest.digest() != footer.digest:
            raise StateCorrupt(f"{self.path!r} has an index of another sha256 than its footer says")
        if root_digest is not None and digest.hexdigest() != root_digest:
            raise StateCorrupt(f"{self.path!r} has the root digest {digest.hexdigest()}, not {root_digest}")
        index = RecordIndex(data, path=self.path, end=footer.offset)
        if head != header(index.raw.format_version):
            raise index.corrupt(f"has a header of another format version than its index, {index.raw.format_version}")
        return index

    # ---- records

    def read(self, selection: EpisodeSelection | None = None, *, decoded: bool = False) -> list[Record]:
        """The records of the selected episodes (None: all), in file order, every payload verified.

        decoded: also decode every payload here, while the next ones are read; their bytes are not kept, and each value
        is handed out once.
        """
        if selection is None:
            return self.read_at(range(len(self)), decoded=decoded)
        episodes = enumerate(self.index.episodes)
        return self.read_at([at for at, episode in episodes if episode in selection], decoded=decoded)

    def read_at(self, chosen: Sequence[int], *, decoded: bool = False) -> list[Record]:
        """The records at these positions, which must rise, every payload verified."""
        index = self.index
        positions = [position for at in chosen for position in index.payload_range(at)]
        records: list[Record] = []
        held: dict[int, bytes] = {}
        building = self._build(chosen, held, decoded)
        with paused_collector(), closing(self._chunks.fetch(positions)) as fetched:
            for batch in fetched:
                self.bytes_read += batch.bytes_read
                held.update(batch.payloads)
                _take(building, records)
            _take(building, records)  # at the end those without any payload
        return records

    def _build(self, chosen: Iterable[int], held: dict[int, bytes], decoded: bool) -> Iterator[Record | None]:
        """The records in order; None as often as a payload of the next one is not held yet.

        Takes the payloads out of `held`. One plain loop: of small records this is most of the work.
        """
        index, path = self.index, self.path
        first, episodes, names, schemas, fields = (
            index.first_payload,
            index.episodes,
            index.names,
            index.schemas,
            index.fields,
        )
        name_of, codecs, type_of, types = index.name_of, index.codecs, index.type_of, index.content_types
        schema_of, owners, revisions = index.schema_of, index.owner_of, index.revisions
        for at in chosen:
            payloads: dict[str, Payload] = {}
            for position in range(first[at], first[at + 1]):
                while position not in held:
                    yield None
                name, codec, content_type = (
                    names[name_of[position]],
                    _CODECS[codecs[position]],
                    types[type_of[position]],
                )
                payloads[name] = Payload(codec, held.pop(position), content_type)
            schema, version = schemas[schema_of[at]]
            revision = revisions[at]
            record = Record(
                episodes[at],
                schema,
                version,
                names[owners[at]],
                revision - 1 if revision else None,
                fields(at),
                payloads,
                (path, at),
            )
            if decoded:
                for name, payload in payloads.items():
                    payloads[name] = decoded_payload(payload, record.decode(name))
            yield record

    # ---- all of it

    def check_payloads(self, *, passing: Collection[BaseFile] = ()) -> Iterator[Damage]:
        """Read and decode everything that it needs, wherever that is; yields what is damaged or cannot be decoded.

        passing: files of earlier checkpoints that are known to be lost; what they should have is passed over.
        """
        index = self.index
        wanted = [at for at, chunk in enumerate(index.chunk_of) if index.chunks[chunk].base not in passing]
        with closing(self._chunks.examine(wanted)) as examined:
            for batch in examined:
                self.bytes_read += batch.bytes_read
                for position, problem in sorted(batch.problems.items()):
                    yield self._damage(position, problem)
                for position, data in batch.intact.items():
                    try:
                        decode(Payload(_CODECS[index.codecs[position]], data), where="it")
                    except StateCorrupt as error:
                        yield self._damage(position, error.message.removeprefix("it "))

    def _damage(self, position: int, problem: str) -> Damage:
        index = self.index
        episode = index.episodes[index.record_of(position)]
        return Damage(episode, index.payload_name(position), problem, index.chunks[index.chunk_of[position]].base)


def _take(building: Iterator[Record | None], records: list[Record]) -> None:
    for record in building:
        if record is None:
            return
        records.append(record)
