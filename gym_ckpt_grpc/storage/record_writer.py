"""Writing a records file: records are placed into chunks here, chunks are stored by a helper thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.base_records import BaseRecords
from gym_ckpt_grpc.storage.chunk_writer import Chunk, ChunkWriter
from gym_ckpt_grpc.storage.files import FileSink
from gym_ckpt_grpc.storage.index_columns import IndexColumns
from gym_ckpt_grpc.storage.payloads import MAX_PAYLOAD, Codec
from gym_ckpt_grpc.storage.record_format import CHUNK_SIZE, MAX_INDEX, Footer, header, pack_footer
from gym_ckpt_grpc.storage.record_index import BaseFile
from gym_ckpt_grpc.storage.records import Record, RecordChecks
from gym_ckpt_grpc.storage.stop import StopFlag

Progress = Callable[[int, int], None]
"""Called with (records, payload bytes) so far, after each chunk, on the thread that called `write_part`."""

ALONE = 64 << 10
"""Bytes from which a payload has a chunk of its own: then one digest covers both, and a reader needs only it."""

_ALL_BYTES, _ALL_CODECS = frozenset({bytes}).issuperset, frozenset({Codec}).issuperset
_TOGETHER, _TOGETHER_BYTES = 256, 512 << 10  # records, and bytes of payloads, that are placed at once


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished records file. root_digest in hex; size: the whole file; payload_bytes: of all payloads, in bytes.

    episodes: those with a record, in order, each once. base_files: the earlier files that have payloads of it.
    """

    root_digest: str
    size: int
    record_count: int
    payload_bytes: int
    episodes: tuple[EpisodeId, ...]
    base_files: tuple[BaseFile, ...] = ()


class RecordFileWriter:
    """Writes records into an open sink; neither syncs nor closes nor names it.

    stop is checked before each chunk. base: what an earlier part has is pointed at there. Use `add`, then `finish`;
    `abort` at any time, which waits for the helper thread. The same records with the same base give the
    same bytes.
    """

    def __init__(
        self,
        sink: FileSink,
        *,
        stop: StopFlag | None = None,
        progress: Progress | None = None,
        chunk_size: int = CHUNK_SIZE,
        base: BaseRecords | None = None,
        compress: bool = False,
    ) -> None:
        self._sink = sink
        self._stop = stop or StopFlag()
        self._progress = progress
        self._chunk_size = chunk_size
        self._alone = min(ALONE, chunk_size)
        self._base = base
        self._columns = IndexColumns()
        self._chunks = ChunkWriter(sink, stop=self._stop, compress=compress)
        self._chunk_count = 0
        self._buffer: bytearray | None = None
        self._open_size = 0
        self._checks = RecordChecks()
        self._waiting: list[Record] = []
        self._together = min(_TOGETHER_BYTES, chunk_size)
        self._batch: list[Chunk] = []
        self._batch_size = 0
        self._payload_bytes = 0
        sink.write(header())

    def add(self, records: Iterable[Record]) -> None:
        """Append records, taken one by one. Raises InvalidArgument, StateUnwritable, WriteStopped."""
        waiting, size = self._waiting, 0
        try:
            for record in records:
                waiting.append(record)
                for payload in record.payloads.values():
                    size += len(payload.data)
                if size >= self._together or len(waiting) >= _TOGETHER:
                    self._place_waiting()
                    waiting, size = self._waiting, 0
        except TypeError:
            _refuse_payloads(waiting)  # if it was for one of them
            raise
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Check and place the records that have come together, column by column: one by one costs twice the time."""
        records, self._waiting = self._waiting, []
        payloads = [payload for record in records for payload in record.payloads.values()]
        data = [payload.data for payload in payloads]
        usable = _ALL_BYTES(map(type, data)) and _ALL_CODECS({type(payload.codec) for payload in payloads})
        if not usable or max(map(len, data), default=0) > MAX_PAYLOAD:
            _refuse_payloads(records)
        self._columns.add_records(records, self._checks.check(records))
        # Here, and not on the helper thread: while this digests, that one gets the interpreter lock for its writes.
        digests = [payload.digest() for payload in payloads]
        chunks, offsets = self._place(data, digests)
        self._columns.add_payloads(payloads, digests, chunks, offsets)

    def _place(self, data: list[bytes], digests: list[bytes]) -> tuple[list[int], list[int]]:
        """The chunk and the offset in it of each payload."""
        start, sizes = self._open_size, list(map(len, data))
        if self._base is None and start + sum(sizes) <= self._chunk_size and max(sizes, default=0) < self._alone:
            # All go into the open chunk: copied while they are in the processor's cache, and free to go then.
            offsets = list(accumulate(sizes, initial=start))
            self._open_size = offsets.pop()
            if data:
                self._room()[start : self._open_size] = b"".join(data)
            return [self._chunk_count] * len(data), offsets
        places = [self._place_one(*one) for one in zip(data, digests, strict=True)]
        return [chunk for chunk, _ in places], [offset for _, offset in places]

    def _place_one(self, data: bytes, digest: bytes) -> tuple[int, int]:
        size = len(data)
        place = self._base.take(digest, size) if self._base is not None else None
        if place is not None:
            self._count(size)
            return place
        if size >= self._alone:
            self._close_chunk()
            self._add_chunk(Chunk(data, size, digest))
            return self._chunk_count - 1, 0
        if self._open_size + size > self._chunk_size:
            self._close_chunk()
        start = self._open_size
        self._open_size += size
        self._room()[start : self._open_size] = data
        return self._chunk_count, start

    def _room(self) -> bytearray:
        """The buffer of the open chunk; what is put beyond its end makes it longer."""
        if self._buffer is None:
            self._buffer = self._chunks.buffer()
        return self._buffer

    def _close_chunk(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            size, self._open_size = self._open_size, 0
            self._add_chunk(Chunk(buffer, size))

    def _add_chunk(self, chunk: Chunk) -> None:
        self._chunk_count += 1
        self._batch.append(chunk)
        self._count(chunk.size)

    def _count(self, size: int) -> None:
        """Another `size` bytes have their place: hand over what has come together."""
        self._payload_bytes += size
        self._batch_size += size
        if self._batch_size >= self._chunk_size:
            self._stop.check()
            batch, self._batch, self._batch_size = self._batch, [], 0
            if batch:
                self._chunks.submit(batch)
            self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(len(self._columns), self._payload_bytes)

    def finish(self) -> WrittenFile:
        """Write what is left, the index and the footer. Raises StateUnwritable, WriteStopped."""
        self._close_chunk()
        self._chunks.finish(self._batch)
        self._batch = []
        self._report()
        self._stop.check()
        base_files = self._base.used_files if self._base is not None else ()
        base_chunks = self._base.used_chunks if self._base is not None else ()
        index = self._columns.to_bytes(self._chunks.stored, base_files, base_chunks)
        if len(index) > MAX_INDEX:
            raise InvalidArgument(f"{len(self._columns)} records need an index of {len(index)} bytes, over {MAX_INDEX}")
        digest = hashlib.sha256(index)
        footer = pack_footer(Footer(self._chunks.offset, len(index), digest.digest()))
        self._sink.write(index)
        self._sink.write(footer)
        size = self._chunks.offset + len(index) + len(footer)
        episodes = tuple(self._columns.episodes)
        return WrittenFile(digest.hexdigest(), size, len(self._columns), self._payload_bytes, episodes, base_files)

    def abort(self) -> None:
        """End the helper thread; once this has returned nothing more is written."""
        self._chunks.abort()


def _refuse_payloads(records: Iterable[Record]) -> None:
    """Raise InvalidArgument if a payload is none."""
    for record in records:
        for name, payload in record.payloads.items():
            if type(payload.data) is not bytes or len(payload.data) > MAX_PAYLOAD or type(payload.codec) is not Codec:
                problem = f"is no bytes, or more than {MAX_PAYLOAD} of them, or of no codec"
                raise InvalidArgument(f"payload {name!r} of {record.episode} {problem}", episodes=[record.episode])
