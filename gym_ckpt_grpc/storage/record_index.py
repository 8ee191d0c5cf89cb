"""The index of a records file, checked before anything in it is used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import orjson
from google.protobuf.message import DecodeError

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId, checkpoint_id_problem
from gym_ckpt_grpc.storage.payloads import MAX_PAYLOAD, Codec
from gym_ckpt_grpc.storage.record_format import (
    DIGEST_SIZE,
    FOOTER_SIZE,
    HEADER_SIZE,
    MAX_EXPANSION,
    READABLE,
    readable,
)
from gym_ckpt_grpc.storage.records import FieldValue
from gymckpt.v1 import storage_pb2


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A records file of an earlier checkpoint that has bytes of this one. root_digest in hex; size in bytes."""

    checkpoint_id: str
    root_digest: str
    size: int


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where the stored bytes of a chunk are. base: the file that has them, or None: this one.

    offset, stored_length: in that file. raw_length: after decompression. digest: sha256 of the stored bytes.
    """

    base: BaseFile | None
    offset: int
    stored_length: int
    raw_length: int
    compressed: bool
    digest: bytes


@dataclass(frozen=True, slots=True)
class PayloadEntry:
    """Where a payload is. chunk: position in `RecordIndex.chunks`. offset, length in bytes, within the raw chunk."""

    position: int
    chunk: int
    offset: int
    length: int
    digest: bytes


class RecordIndex:
    """A checked index: every position is in range, every range in its chunk, every chunk in the file."""

    def __init__(self, data: bytes, *, path: str, end: int) -> None:
        """data: the serialized index. end: where the chunks must end, in bytes. Raises StateCorrupt."""
        self.path = path
        try:
            self.raw = storage_pb2.RecordsIndex.FromString(data)
        except DecodeError as error:
            raise self.corrupt(f"has an index that cannot be read: {error}") from None
        if self.raw.format_version not in READABLE:
            raise self.corrupt(f"has an index of format version {self.raw.format_version}; readable here: {readable()}")
        if self.raw.format_version == 1 and (self.raw.base_files or self.raw.base_chunks):
            raise self.corrupt("has references in an index of format version 1, which has none")
        self._check_chunks(end)
        self.base_files = tuple(self._base_files())
        """The files of earlier checkpoints that this one needs."""
        own = tuple(_place(chunk, None) for chunk in self.raw.chunks)
        self.own_chunks = len(own)
        self.chunks = own + tuple(self._base_chunks())
        """Every chunk, those of this file first."""
        self._check_records()
        self._check_payloads()
        self.episodes = tuple(self._episodes())
        counts, payloads = self.raw.records.payload_counts, self.raw.payloads
        self._first_payload = [0, *accumulate(counts)]
        # Copied once: protobuf copies the whole of a bytes field at each access.
        self._digests = self.raw.payloads.digests
        self._places = tuple(zip(*map(tuple, (payloads.chunks, payloads.offsets, payloads.lengths)), strict=True))
        self._names = tuple(self.raw.names)
        self._name_of = tuple(payloads.names)

    def __len__(self) -> int:
        return len(self.raw.records.attempts)

    def corrupt(self, problem: str, episodes: Iterable[EpisodeId] = ()) -> StateCorrupt:
        """The error for this file."""
        return StateCorrupt(f"{self.path!r} {problem}", episodes=episodes)

    def _check_chunks(self, end: int) -> None:
        at = HEADER_SIZE
        for number, chunk in enumerate(self.raw.chunks):
            if chunk.offset != at:
                raise self.corrupt(f"has chunk {number} in the wrong place")
            self._check_chunk(chunk, f"chunk {number}")
            at += chunk.stored_length
        if at != end:
            raise self.corrupt(f"has chunks up to byte {at}, and its index at {end}")

    def _check_chunk(self, chunk: storage_pb2.ChunkEntry, what: str) -> None:
        """Sizes are checked before anything is allocated for them."""
        if len(chunk.digest) != DIGEST_SIZE:
            raise self.corrupt(f"has {what} without a digest")
        if chunk.compression == storage_pb2.COMPRESSION_NONE:
            if chunk.raw_length != chunk.stored_length:
                raise self.corrupt(f"has {what} with two lengths, and not compressed")
        elif chunk.compression != storage_pb2.COMPRESSION_ZSTD or self.raw.format_version == 1:
            raise self.corrupt(f"has {what} in the compression {chunk.compression}, unknown here")
        elif chunk.raw_length > min(MAX_PAYLOAD, chunk.stored_length * MAX_EXPANSION):
            raise self.corrupt(f"has {what} of {chunk.stored_length} bytes that claims to hold {chunk.raw_length}")

    def _base_files(self) -> Iterator[BaseFile]:
        seen: set[tuple[str, bytes]] = set()
        for number, file in enumerate(self.raw.base_files):
            known = (file.checkpoint_id, file.root_digest)
            if checkpoint_id_problem(file.checkpoint_id) or len(file.root_digest) != DIGEST_SIZE or known in seen:
                raise self.corrupt(f"has base file {number} without a legal checkpoint id or digest, or twice")
            if file.size < HEADER_SIZE + FOOTER_SIZE:
                raise self.corrupt(f"has base file {number} of {file.size} bytes, too few for a records file")
            seen.add(known)
            yield BaseFile(file.checkpoint_id, file.root_digest.hex(), file.size)

    def _base_chunks(self) -> Iterator[ChunkPlace]:
        seen: set[tuple[int, int]] = set()
        for number, entry in enumerate(self.raw.base_chunks):
            if entry.file >= len(self.base_files):
                raise self.corrupt(f"has base chunk {number} of a file that is not there")
            file, chunk = self.base_files[entry.file], entry.chunk
            self._check_chunk(chunk, f"base chunk {number}")
            outside = chunk.offset < HEADER_SIZE or chunk.offset + chunk.stored_length > file.size - FOOTER_SIZE
            if outside or (entry.file, chunk.offset) in seen:
                raise self.corrupt(f"has base chunk {number} outside of its file, or twice")
            seen.add((entry.file, chunk.offset))
            yield _place(chunk, file)

    def _check_records(self) -> None:
        records, count = self.raw.records, len(self)
        columns = (
            records.rollout_ids,
            records.schemas,
            records.owners,
            records.revisions,
            records.fields,
            records.payload_counts,
        )
        if any(len(column) != count for column in columns):
            raise self.corrupt("has an index whose record columns differ in length")
        self._check_positions(records.schemas, len(self.raw.schemas), "schema")
        self._check_positions(records.owners, len(self.raw.names), "owner")
        if any(not schema.name or not schema.version for schema in self.raw.schemas):
            raise self.corrupt("has a schema without name or version")
        if sum(records.payload_counts) != len(self.raw.payloads.lengths):
            raise self.corrupt("has an index whose payload counts do not add up")

    def _check_payloads(self) -> None:
        payloads, count = self.raw.payloads, len(self.raw.payloads.lengths)
        columns = (payloads.names, payloads.chunks, payloads.offsets, payloads.codecs, payloads.content_types)
        if any(len(column) != count for column in columns) or len(payloads.digests) != count * DIGEST_SIZE:
            raise self.corrupt("has an index whose payload columns differ in length")
        self._check_positions(payloads.names, len(self.raw.names), "payload name")
        self._check_positions(payloads.chunks, len(self.chunks), "chunk")
        self._check_positions(payloads.content_types, len(self.raw.content_types), "content type")
        known = {codec.value for codec in Codec}
        if not known.issuperset(payloads.codecs):
            raise self.corrupt(f"has a payload of a codec unknown here: {set(payloads.codecs) - known}")
        self._check_places(zip(payloads.chunks, payloads.offsets, payloads.lengths, strict=True))

    def _check_places(self, places: Iterable[tuple[int, int, int]]) -> None:
        """No two payloads share bytes, so that nobody can make a small file stand for endless data."""
        sizes = [chunk.raw_length for chunk in self.chunks]
        last_chunk, used = -1, 0
        elsewhere: list[tuple[int, int, int]] = []
        for position, (chunk, offset, length) in enumerate(places):
            if chunk >= self.own_chunks:
                elsewhere.append((chunk, offset, length))
                continue
            if chunk != last_chunk:
                if chunk < last_chunk:
                    raise self.corrupt("has payloads out of order")
                last_chunk, used = chunk, 0
            if offset != used or offset + length > sizes[chunk]:
                raise self.corrupt(f"has payload {position} outside of its place in chunk {chunk}")
            used = offset + length
        last_chunk, used = -1, 0
        for chunk, offset, length in sorted(elsewhere):
            if chunk != last_chunk:
                last_chunk, used = chunk, 0
            if offset < used or offset + length > sizes[chunk]:
                raise self.corrupt(
                    f"has payloads that share bytes of base chunk {chunk - self.own_chunks}, or leave it"
                )
            used = offset + length

    def _check_positions(self, column: Iterable[int], size: int, what: str) -> None:
        if max(column, default=-1) >= size:
            raise self.corrupt(f"has an index that points at a {what} that is not there")

    def _episodes(self) -> Iterable[EpisodeId]:
        records = self.raw.records
        for at, (rollout_id, attempt) in enumerate(zip(records.rollout_ids, records.attempts, strict=True)):
            try:
                yield EpisodeId(rollout_id, attempt)
            except ValueError as error:
                raise self.corrupt(f"has record {at} of no possible episode: {error}") from None

    def payload_range(self, record: int) -> range:
        """Positions of the payloads of a record."""
        return range(self._first_payload[record], self._first_payload[record + 1])

    def payload(self, position: int) -> PayloadEntry:
        """Where a payload is, and its digest."""
        chunk, offset, length = self._places[position]
        at = position * DIGEST_SIZE
        return PayloadEntry(position, chunk, offset, length, self._digests[at : at + DIGEST_SIZE])

    def payload_name(self, position: int) -> str:
        """The name of a payload within its record."""
        return self._names[self._name_of[position]]

    def record_of(self, payload: int) -> int:
        """The record that a payload belongs to."""
        return bisect_right(self._first_payload, payload) - 1

    def batches(self, size: int) -> Iterator[range]:
        """Runs of neighbouring records with about `size` bytes of payloads each, to read a file piece by piece."""
        start = total = 0
        for at in range(len(self)):
            if total > size:
                yield range(start, at)
                start, total = at, 0
            total += sum(self._places[position][2] for position in self.payload_range(at))
        if start < len(self):
            yield range(start, len(self))

    def fields(self, record: int) -> Mapping[str, FieldValue]:
        """Decode the fields of a record. Raises StateCorrupt naming the record."""
        data = self.raw.records.fields[record]
        if data == b"{}":
            return {}
        try:
            fields = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            fields = error
        if not isinstance(fields, dict):
            raise self.corrupt(f"has record {record} with unreadable fields", [self.episodes[record]])
        return fields


def _place(chunk: storage_pb2.ChunkEntry, base: BaseFile | None) -> ChunkPlace:
    compressed = chunk.compression == storage_pb2.COMPRESSION_ZSTD
    return ChunkPlace(base, chunk.offset, chunk.stored_length, chunk.raw_length, compressed, chunk.digest)
