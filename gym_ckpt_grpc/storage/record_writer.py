"""Writing a records file: chunk by chunk, digests and writes on a helper thread."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gym_ckpt_grpc.storage.files import FileSink
from gym_ckpt_grpc.storage.record_format import (
    CHUNK_SIZE,
    FORMAT_VERSION,
    HEADER_SIZE,
    Footer,
    header,
    pack_footer,
)
from gym_ckpt_grpc.storage.records import Record, check_record
from gym_ckpt_grpc.storage.stop import StopFlag
from gymckpt.v1 import storage_pb2

Progress = Callable[[int, int], None]
"""Called with (records, payload bytes) so far, after each chunk, on the thread that called `write_part`."""

_AHEAD = 2  # chunks that may wait for the helper; bounds memory to about three chunks


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished records file. root_digest in hex; size: the whole file; payload_bytes: of all payloads, in bytes."""

    root_digest: str
    size: int
    record_count: int
    payload_bytes: int


class RecordFileWriter:
    """Writes records into an open sink; neither syncs nor closes nor names it.

    stop is checked before each chunk. Use `add` for each record, then `finish`; `abort` at any time, which
    waits for the helper thread. The same records give the same bytes.
    """

    def __init__(
        self,
        sink: FileSink,
        *,
        stop: StopFlag | None = None,
        progress: Progress | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        self._sink = sink
        self._stop = stop or StopFlag()
        self._progress = progress
        self._chunk_size = chunk_size
        self._helper: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._open_chunk: list[bytes] = []
        self._open_size = 0
        self._chunk_count = 0
        self._payload_bytes = 0
        self._offset = HEADER_SIZE
        self._tables: dict[str, dict[object, int]] = {"names": {}, "content_types": {}, "schemas": {}}
        self._index = storage_pb2.RecordsIndex(format_version=FORMAT_VERSION)
        self._digests: list[bytes] = []
        self._chunks: list[storage_pb2.ChunkEntry] = []
        sink.write(header())

    def add(self, record: Record) -> None:
        """Append a record. Raises InvalidArgument, StateUnwritable, WriteStopped."""
        fields = check_record(record)
        columns = self._index.records
        columns.rollout_ids.append(record.episode.rollout_id)
        columns.attempts.append(record.episode.attempt)
        columns.schemas.append(self._position("schemas", (record.schema, record.schema_version)))
        columns.owners.append(self._position("names", record.owner))
        columns.revisions.append(0 if record.revision is None else record.revision + 1)
        columns.fields.append(fields)
        columns.payload_counts.append(len(record.payloads))
        payloads = self._index.payloads
        for name, payload in record.payloads.items():
            if type(payload.data) is not bytes:
                raise InvalidArgument(f"payload {name!r} of {record.episode} is no bytes", episodes=[record.episode])
            if self._open_chunk and self._open_size + len(payload.data) > self._chunk_size:
                self._close_chunk()
            payloads.names.append(self._position("names", name))
            payloads.chunks.append(self._chunk_count)
            payloads.offsets.append(self._open_size)
            payloads.lengths.append(len(payload.data))
            payloads.codecs.append(storage_pb2.Codec.ValueType(payload.codec.value))
            payloads.content_types.append(self._position("content_types", payload.content_type))
            self._open_chunk.append(payload.data)
            self._open_size += len(payload.data)

    def _position(self, table: str, entry: object) -> int:
        known = self._tables[table]
        return known.setdefault(entry, len(known))

    def _close_chunk(self) -> None:
        parts, size = self._open_chunk, self._open_size
        self._open_chunk, self._open_size = [], 0
        self._chunk_count += 1
        self._payload_bytes += size
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="gymckpt-records")
        while len(self._pending) >= _AHEAD:
            self._pending.popleft().result()
        self._pending.append(self._helper.submit(self._store, parts, size))
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(len(self._index.records.attempts), self._payload_bytes)

    def _store(self, parts: list[bytes], size: int) -> None:
        """Digest and write one chunk; on the helper thread, or on the caller's once that has ended."""
        self._stop.check()
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._digests.extend(hashlib.sha256(part).digest() for part in parts)
        self._chunks.append(
            storage_pb2.ChunkEntry(
                offset=self._offset,
                stored_length=size,
                raw_length=size,
                compression=storage_pb2.COMPRESSION_NONE,
                digest=hashlib.sha256(data).digest(),
            )
        )
        self._sink.write(data)
        self._offset += size

    def finish(self) -> WrittenFile:
        """Write what is left, the index and the footer. Raises StateUnwritable, WriteStopped."""
        while self._pending:
            self._pending.popleft().result()
        self._end_helper()
        if self._open_chunk:
            self._payload_bytes += self._open_size
            self._store(self._open_chunk, self._open_size)
            self._open_chunk = []
            self._report()
        self._stop.check()
        self._fill_index()
        data = self._index.SerializeToString(deterministic=True)
        digest = hashlib.sha256(data)
        self._sink.write(data)
        self._sink.write(pack_footer(Footer(self._offset, len(data), digest.digest())))
        size = self._offset + len(data) + len(pack_footer(Footer(0, 0, digest.digest())))
        return WrittenFile(digest.hexdigest(), size, len(self._index.records.attempts), self._payload_bytes)

    def _fill_index(self) -> None:
        self._index.names.extend(str(name) for name in self._tables["names"])
        self._index.content_types.extend(str(name) for name in self._tables["content_types"])
        for entry in self._tables["schemas"]:
            assert isinstance(entry, tuple)
            self._index.schemas.add(name=entry[0], version=entry[1])
        self._index.chunks.extend(self._chunks)
        self._index.payloads.digests = b"".join(self._digests)

    def abort(self) -> None:
        """End the helper thread; once this has returned nothing more is written."""
        self._end_helper()

    def _end_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.shutdown(wait=True, cancel_futures=True)
