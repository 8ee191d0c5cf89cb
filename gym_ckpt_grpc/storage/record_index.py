"""The index of a records file, checked before anything in it is used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec
import orjson
from google.protobuf.message import DecodeError

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId, checkpoint_id_problem, episode_ids
from gym_ckpt_grpc.storage.payloads import MAX_PAYLOAD, Codec
from gym_ckpt_grpc.storage.record_format import (
    DIGEST_SIZE,
    FOOTER_SIZE,
    HEADER_SIZE,
    MAX_EXPANSION,
    READABLE,
    readable,
)
from gym_ckpt_grpc.storage.records import MAX_FIELDS, MAX_LABEL, FieldValue
from gymckpt.v1 import storage_pb2

_ENTRY_SIZE = 8  # bytes that an entry of the outermost message takes at least, on average
_SPARE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A records file of an earlier checkpoint that has bytes of this one. root_digest in hex; size in bytes."""

    checkpoint_id: str
    root_digest: str
    size: int


class ChunkPlace(msgspec.Struct, frozen=True, gc=False):
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
    """A checked index: every position is in range, every range in its chunk, every chunk in its file.

    Payloads fill the chunks of this file one after the other without gaps, and share no bytes of other files, so the
    sum of the lengths is bounded by what the files hold.
    """

    def __init__(self, data: bytes, *, path: str, end: int) -> None:
        """data: the serialized index. end: where the chunks must end, in bytes. Raises StateCorrupt."""
        self.path = path
        if problem := _shape_problem(data):
            raise self.corrupt(problem)
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
        # Copied once: protobuf checks and wraps at each access, and copies the whole of a bytes field.
        self.names = tuple(self.raw.names)
        self.content_types = tuple(self.raw.content_types)
        self.schemas = tuple((schema.name, schema.version) for schema in self.raw.schemas)
        payloads = self.raw.payloads
        self.chunk_of, self.offsets, self.lengths = (
            list(payloads.chunks),
            list(payloads.offsets),
            list(payloads.lengths),
        )
        self.digests = payloads.digests
        self.name_of, self.type_of = list(payloads.names), list(payloads.content_types)
        self.codecs: list[int] = list(payloads.codecs)
        records = self.raw.records
        self.schema_of, self.owner_of = list(records.schemas), list(records.owners)
        self.revisions, self._payload_counts = list(records.revisions), list(records.payload_counts)
        self._fields = list(records.fields)
        self._check_tables()
        self._check_records()
        self._check_payloads()
        self.episodes = self._episodes()
        self.first_payload = [0, *accumulate(self._payload_counts)]
        self._check_payload_names()

    def __len__(self) -> int:
        return len(self.raw.records.attempts)

    @property
    def payload_bytes(self) -> int:
        """Of all payloads, wherever they are, as they were encoded."""
        return sum(self.lengths)

    def corrupt(self, problem: str, episodes: Iterable[EpisodeId] = ()) -> StateCorrupt:
        """The error for this file."""
        return StateCorrupt(f"{self.path!r} {problem}", episodes=episodes)

    # ---- chunks

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
        ranges: list[tuple[int, int, int]] = []
        for number, entry in enumerate(self.raw.base_chunks):
            if entry.file >= len(self.base_files):
                raise self.corrupt(f"has base chunk {number} of a file that is not there")
            file, chunk = self.base_files[entry.file], entry.chunk
            self._check_chunk(chunk, f"base chunk {number}")
            end = chunk.offset + chunk.stored_length
            if chunk.offset < HEADER_SIZE or end > file.size - FOOTER_SIZE:
                raise self.corrupt(f"has base chunk {number} outside of its file")
            ranges.append((entry.file, chunk.offset, end))
            yield _place(chunk, file)
        ranges.sort()
        if any(first[0] == second[0] and first[2] > second[1] for first, second in pairwise(ranges)):
            raise self.corrupt("has base chunks that share bytes")
        if len({file for file, _, _ in ranges}) != len(self.base_files):
            raise self.corrupt("has a base file that nothing points at")

    # ---- records and payloads

    def _check_tables(self) -> None:
        for what, table in (("name", self.names), ("content type", self.content_types), ("schema", self.schemas)):
            if len(set(table)) != len(table):
                raise self.corrupt(f"has a {what} twice")
        labels = (*self.names, *self.content_types, *(name for name, _ in self.schemas))
        if max(map(len, labels), default=0) > MAX_LABEL:
            raise self.corrupt(f"has a name of more than {MAX_LABEL} characters")
        if any(not name or not version for name, version in self.schemas):
            raise self.corrupt("has a schema without name or version")

    def _check_records(self) -> None:
        records, count = self.raw.records, len(self)
        columns = (
            records.rollout_ids,
            self.schema_of,
            self.owner_of,
            self.revisions,
            self._fields,
            self._payload_counts,
        )
        if any(len(column) != count for column in columns):
            raise self.corrupt("has an index whose record columns differ in length")
        self._check_positions(self.schema_of, len(self.schemas), "schema")
        self._check_positions(self.owner_of, len(self.names), "owner")
        if max(map(len, self._fields), default=0) > MAX_FIELDS:
            raise self.corrupt(f"has a record whose fields take more than {MAX_FIELDS} bytes")
        if sum(self._payload_counts) != len(self.lengths):
            raise self.corrupt("has an index whose payload counts do not add up")

    def _check_payloads(self) -> None:
        payloads, count = self.raw.payloads, len(self.lengths)
        columns = (payloads.names, payloads.chunks, payloads.offsets, payloads.codecs, payloads.content_types)
        if any(len(column) != count for column in columns) or len(self.digests) != count * DIGEST_SIZE:
            raise self.corrupt("has an index whose payload columns differ in length")
        self._check_positions(self.name_of, len(self.names), "payload name")
        self._check_positions(self.chunk_of, len(self.chunks), "chunk")
        self._check_positions(self.type_of, len(self.content_types), "content type")
        if unknown := set(self.codecs) - {codec.value for codec in Codec}:
            raise self.corrupt(f"has a payload of a codec unknown here: {min(unknown)}")
        if max(self.lengths, default=0) > MAX_PAYLOAD:
            raise self.corrupt(f"has a payload of more than {MAX_PAYLOAD} bytes")
        self._check_places()

    def _check_places(self) -> None:
        """No two payloads share bytes, so that nobody can make a small file stand for endless data."""
        sizes, own = [chunk.raw_length for chunk in self.chunks], self.own_chunks
        current, used, size = -1, 0, 0
        elsewhere: list[tuple[int, int, int]] = []
        for chunk, offset, length in zip(self.chunk_of, self.offsets, self.lengths, strict=True):
            if chunk >= own:
                elsewhere.append((chunk, offset, length))
                continue
            if chunk != current:
                if used != size or chunk != current + 1:
                    raise self.corrupt(f"has payloads out of order, or chunk {max(current, 0)} not filled by them")
                current, used, size = chunk, 0, sizes[chunk]
            if offset != used or length > size - used:
                raise self.corrupt(f"has a payload outside of its place in chunk {chunk}")
            used += length
        if used != size or current != own - 1:
            raise self.corrupt("has a chunk that its payloads do not fill")
        self._check_elsewhere(elsewhere, sizes)

    def _check_elsewhere(self, places: list[tuple[int, int, int]], sizes: list[int]) -> None:
        last, used = -1, 0
        for chunk, offset, length in sorted(places):
            if chunk != last:
                last, used = chunk, 0
            if offset < used or offset + length > sizes[chunk]:
                raise self.corrupt(
                    f"has payloads that share bytes of base chunk {chunk - self.own_chunks}, or leave it"
                )
            used = offset + length
        if len({chunk for chunk, _, _ in places}) != len(self.chunks) - self.own_chunks:
            raise self.corrupt("has a base chunk that no payload is in")

    def _check_positions(self, column: Iterable[int], size: int, what: str) -> None:
        if max(column, default=-1) >= size:
            raise self.corrupt(f"has an index that points at a {what} that is not there")

    def _check_payload_names(self) -> None:
        """A record has each name once. Most have one payload, and need no look."""
        for at, count in enumerate(self._payload_counts):
            if count > 1:
                start = self.first_payload[at]
                if len(set(self.name_of[start : start + count])) != count:
                    episode = self.episodes[at]
                    raise self.corrupt(f"has record {at} of {episode} with one payload name twice", [episode])

    def _episodes(self) -> tuple[EpisodeId, ...]:
        try:
            return tuple(episode_ids(self.raw.records.rollout_ids, self.raw.records.attempts))
        except ValueError as error:
            raise self.corrupt(f"has a record of no possible episode: {error}") from None

    # ---- what it says

    def payload_range(self, record: int) -> range:
        """Positions of the payloads of a record."""
        return range(self.first_payload[record], self.first_payload[record + 1])

    def payload(self, position: int) -> PayloadEntry:
        """Where a payload is, and its digest."""
        at = position * DIGEST_SIZE
        return PayloadEntry(
            position,
            self.chunk_of[position],
            self.offsets[position],
            self.lengths[position],
            self.digests[at : at + DIGEST_SIZE],
        )

    def payload_name(self, position: int) -> str:
        """The name of a payload within its record."""
        return self.names[self.name_of[position]]

    def record_of(self, payload: int) -> int:
        """The record that a payload belongs to."""
        return bisect_right(self.first_payload, payload) - 1

    def batches(self, size: int) -> Iterator[range]:
        """Runs of neighbouring records with about `size` bytes of payloads each, to read a file piece by piece."""
        start = total = 0
        for at in range(len(self)):
            if total > size:
                yield range(start, at)
                start, total = at, 0
            total += sum(self.lengths[position] for position in self.payload_range(at))
        if start < len(self):
            yield range(start, len(self))

    def fields(self, record: int) -> Mapping[str, FieldValue]:
        """Decode the fields of a record. Raises StateCorrupt naming the record."""
        data = self._fields[record]
        if data == b"{}":
            return {}
        try:
            fields = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            fields = error
        if not isinstance(fields, dict):
            raise self.corrupt(f"has record {record} with unreadable fields", [self.episodes[record]])
        return fields


def _shape_problem(data: bytes) -> str | None:
    """Whether parsing could take far more memory than the bytes: a million empty messages in two of them each.

    Looks at the outermost fields only, which are few in what this project writes: tables, chunks and two groups of
    columns. Whatever is wrong with the bytes otherwise the parser finds.
    """
    at, entries, most = 0, 0, _SPARE_ENTRIES + len(data) // _ENTRY_SIZE
    while at < len(data):
        entries += 1
        if entries > most:
            return "has an index with more entries than its bytes can hold"
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 2:
            length, at = _varint(data, at)
            at += length
        else:
            return "has an index that cannot be read: a field of a kind that is not in use"
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where the next field begins; beyond the end if it is cut short or too long."""
    number = shift = 0
    for byte in data[at : at + 10]:
        number |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return number, at
    return 0, len(data)


def _place(chunk: storage_pb2.ChunkEntry, base: BaseFile | None) -> ChunkPlace:
    compressed = chunk.compression == storage_pb2.COMPRESSION_ZSTD
    return ChunkPlace(base, chunk.offset, chunk.stored_length, chunk.raw_length, compressed, chunk.digest)
