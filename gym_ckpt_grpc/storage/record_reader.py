"""Reading a records file: index and footer first, then only what is asked for, each verified before use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from types import TracebackType

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.payloads import Codec, Payload
from gym_ckpt_grpc.storage.record_format import (
    FOOTER_SIZE,
    HEADER_SIZE,
    header_problem,
    unpack_footer,
)
from gym_ckpt_grpc.storage.record_index import PayloadEntry, RecordIndex
from gym_ckpt_grpc.storage.records import EpisodeSelection, Record


class RecordFile:
    """An open records file whose header, footer and index are checked. Close it, or use it as a context.

    root_digest, size: what the manifest says; another one is StateCorrupt. Everything that this class raises
    is StateNotFound, or StateCorrupt naming the file and, where known, the episodes.
    """

    def __init__(self, files: FileLayer, path: str, *, root_digest: str | None = None, size: int | None = None) -> None:
        self.path = path
        self.bytes_read = 0
        self._source = files.open(path)
        try:
            self.index = self._read_index(root_digest, size)
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
        """Close the file."""
        self._source.close()

    def _read(self, offset: int, length: int) -> bytes:
        self.bytes_read += length
        return self._source.read(offset, length)

    def _read_index(self, root_digest: str | None, size: int | None) -> RecordIndex:
        if size is not None and self.size != size:
            raise StateCorrupt(f"{self.path!r} has {self.size} bytes, not {size}")
        if self.size < HEADER_SIZE + FOOTER_SIZE:
            raise StateCorrupt(f"{self.path!r} has only {self.size} bytes: it was cut short")
        if problem := header_problem(self._read(0, HEADER_SIZE)):
            raise StateCorrupt(f"{self.path!r} {problem}")
        footer = unpack_footer(self._read(self.size - FOOTER_SIZE, FOOTER_SIZE))
        if footer is None:
            raise StateCorrupt(f"{self.path!r} does not end like a records file: it was cut short")
        if footer.offset < HEADER_SIZE or footer.offset + footer.length + FOOTER_SIZE != self.size:
            raise StateCorrupt(f"{self.path!r} has a footer that does not fit its {self.size} bytes")
        data = self._read(footer.offset, footer.length)
        digest = hashlib.sha256(data)
        if digest.digest() != footer.digest:
            raise StateCorrupt(f"{self.path!r} has an index of another sha256 than its footer says")
        if root_digest is not None and digest.hexdigest() != root_digest:
            raise StateCorrupt(f"{self.path!r} has the root digest {digest.hexdigest()}, not {root_digest}")
        return RecordIndex(data, path=self.path, end=footer.offset)

    def read(self, selection: EpisodeSelection | None = None) -> list[Record]:
        """The records of the selected episodes (None: all), in file order, every payload verified."""
        episodes = enumerate(self.index.episodes)
        return self.read_at([at for at, episode in episodes if selection is None or episode in selection])

    def read_at(self, chosen: Sequence[int]) -> list[Record]:
        """The records at these positions, which must rise, every payload verified."""
        index = self.index
        entries = (index.payload(position) for at in chosen for position in index.payload_range(at))
        data: dict[int, bytes] = {}
        for chunk, group in groupby(entries, key=lambda entry: entry.chunk):
            data.update(self._read_payloads(chunk, list(group)))
        return [self._record(at, data) for at in chosen]

    def _read_payloads(self, chunk: int, entries: list[PayloadEntry]) -> Iterator[tuple[int, bytes]]:
        """Read some payloads of one chunk: whole if all of it is needed, else in runs of neighbours."""
        place = self.index.raw.chunks[chunk]
        if sum(entry.length for entry in entries) == place.stored_length:
            data = self._read(place.offset, place.stored_length)
            if hashlib.sha256(data).digest() != place.digest:
                raise self._chunk_error(chunk, data, entries)
            for entry in entries:
                yield entry.position, data[entry.offset : entry.offset + entry.length]
            return
        for run in _runs(entries):
            start = run[0].offset
            data = self._read(place.offset + start, run[-1].offset + run[-1].length - start)
            for entry in run:
                part = data[entry.offset - start : entry.offset - start + entry.length]
                if hashlib.sha256(part).digest() != entry.digest:
                    raise self._payload_error(entry)
                yield entry.position, part

    def _chunk_error(self, chunk: int, data: bytes, entries: list[PayloadEntry]) -> StateCorrupt:
        damaged = [
            entry
            for entry in entries
            if hashlib.sha256(data[entry.offset : entry.offset + entry.length]).digest() != entry.digest
        ]
        episodes = dict.fromkeys(self._episode_of(entry.position) for entry in damaged or entries)
        names = ", ".join(str(episode) for episode in list(episodes)[:5])
        return self.index.corrupt(f"has chunk {chunk} damaged, with state of {names}", episodes)

    def _payload_error(self, entry: PayloadEntry) -> StateCorrupt:
        episode = self._episode_of(entry.position)
        name = self.index.payload_name(entry.position)
        return self.index.corrupt(f"has payload {name!r} of {episode} damaged in chunk {entry.chunk}", [episode])

    def _episode_of(self, position: int) -> EpisodeId:
        return self.index.episodes[self.index.record_of(position)]

    def _record(self, at: int, data: dict[int, bytes]) -> Record:
        index, columns = self.index, self.index.raw.records
        schema = index.raw.schemas[columns.schemas[at]]
        episode, revision = index.episodes[at], columns.revisions[at]
        payloads: dict[str, Payload] = {}
        for position in index.payload_range(at):
            name = index.payload_name(position)
            payloads[name] = Payload(
                Codec(index.raw.payloads.codecs[position]),
                data.pop(position),
                index.raw.content_types[index.raw.payloads.content_types[position]],
                f"{self.path!r}, record {at} of {episode}, payload {name!r}",
            )
        if len(payloads) != len(index.payload_range(at)):
            raise index.corrupt(f"has record {at} of {episode} with one payload name twice", [episode])
        return Record(
            episode=episode,
            schema=schema.name,
            schema_version=schema.version,
            owner=index.raw.names[columns.owners[at]],
            revision=revision - 1 if revision else None,
            fields=index.fields(at),
            payloads=payloads,
        )

    def check_payloads(self) -> Iterator[tuple[EpisodeId, str, str]]:
        """Read everything; yields (episode, payload name, problem) for each damaged payload or chunk."""
        at = 0
        for number, place in enumerate(self.index.raw.chunks):
            data = self._read(place.offset, place.stored_length)
            whole = hashlib.sha256(data).digest() == place.digest
            named = False
            while at < len(self.index.raw.payloads.lengths) and self.index.raw.payloads.chunks[at] == number:
                entry = self.index.payload(at)
                part = data[entry.offset : entry.offset + entry.length]
                if hashlib.sha256(part).digest() != entry.digest:
                    named = True
                    yield self._episode_of(at), self.index.payload_name(at), "is damaged"
                at += 1
            if not whole and not named:
                raise self.index.corrupt(f"has chunk {number} with another digest than its index says")


def _runs(entries: list[PayloadEntry]) -> Iterator[list[PayloadEntry]]:
    run: list[PayloadEntry] = []
    for entry in entries:
        if run and entry.offset != run[-1].offset + run[-1].length:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
