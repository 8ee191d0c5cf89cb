"""Storing the chunks of a records file beside the thread that fills them: compressed, digested, written."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import zstandard

from gym_ckpt_grpc.storage.files import FileSink
from gym_ckpt_grpc.storage.record_format import HEADER_SIZE
from gym_ckpt_grpc.storage.stop import StopFlag

_AHEAD = 2  # batches that may wait for the helper; with the one it stores and the one being filled, memory's bound
_WRITE_BACK = 4 << 20  # bytes after which the file is told to begin its way to the disk
_LEVEL = 1
_LARGE = 16 << 20  # bytes from which a chunk is compressed piece by piece, lest it stand in memory twice
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Payloads to be stored together. buffer: has them in its first `size` bytes, and is the writer's to use again.

    digest: sha256 of them, where it is known already.
    """

    buffer: bytes | bytearray
    size: int
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Where a chunk went. offset, stored_length: in the file. digest: sha256 of the stored bytes."""

    offset: int
    stored_length: int
    raw_length: int
    compressed: bool
    digest: bytes


class ChunkWriter:
    """Stores batches of chunks in order, on a helper thread from the first `submit` on.

    A batch is what is handed to the helper at once: each handover, and each call that releases the interpreter lock,
    may wait for the thread that encodes. `stop` is checked before each chunk.
    """

    def __init__(self, sink: FileSink, *, stop: StopFlag, compress: bool) -> None:
        self._sink = sink
        self._stop = stop
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL) if compress else None
        self._helper: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._unsynced = 0
        self._free: deque[bytearray] = deque()
        self.offset = HEADER_SIZE
        """Where the next chunk will be."""
        self.stored: list[StoredChunk] = []

    def buffer(self) -> bytearray:
        """A buffer to fill a chunk with: one that was stored, of whatever length, or a new empty one."""
        return self._free.popleft() if self._free else bytearray()

    def submit(self, batch: list[Chunk]) -> None:
        """Hand over a batch; waits while too much is waiting. Raises what an earlier one failed with."""
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="gymckpt-records")
        while len(self._pending) >= _AHEAD:
            self._pending.popleft().result()
        self._pending.append(self._helper.submit(self._store_all, batch))

    def finish(self, batch: list[Chunk]) -> None:
        """Store the last batch, here, after all the others. Raises StateUnwritable, WriteStopped."""
        while self._pending:
            self._pending.popleft().result()
        self.abort()
        self._store_all(batch)

    def abort(self) -> None:
        """End the helper thread; once this has returned nothing more is written."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.shutdown(wait=True, cancel_futures=True)

    def _store_all(self, batch: list[Chunk]) -> None:
        for chunk in batch:
            self._stop.check()
            data = memoryview(chunk.buffer)[: chunk.size]
            if not (self._compressor and self._compress(self._compressor, data)):
                self._write(data)
                self._note(chunk.size, chunk.size, chunk.digest or hashlib.sha256(data).digest(), compressed=False)
            data.release()
            if isinstance(chunk.buffer, bytearray):
                self._free.append(chunk.buffer)

    def _compress(self, compressor: zstandard.ZstdCompressor, data: memoryview) -> bool:
        """Store a chunk compressed; False, with nothing stored, if that makes it no smaller."""
        if len(data) >= _LARGE:
            return self._compress_large(compressor, data)
        packed = compressor.compress(data)
        if len(packed) >= len(data):
            return False
        self._write(packed)
        self._note(len(packed), len(data), hashlib.sha256(packed).digest(), compressed=True)
        return True

    def _compress_large(self, compressor: zstandard.ZstdCompressor, data: memoryview) -> bool:
        """As `_compress`, with no more of it in memory than a piece; its beginning tells whether it is worth it."""
        if len(compressor.compress(data[:_PIECE])) >= _PIECE:
            return False
        stream, digest, stored = compressor.compressobj(size=len(data)), hashlib.sha256(), 0
        for at in range(0, len(data) + _PIECE, _PIECE):
            self._stop.check()
            packed = stream.compress(data[at : at + _PIECE]) if at < len(data) else stream.flush()
            digest.update(packed)
            self._write(packed)
            stored += len(packed)
        self._note(stored, len(data), digest.digest(), compressed=True)
        return True

    def _write(self, data: bytes | memoryview) -> None:
        self._sink.write(data)
        self._unsynced += len(data)
        if self._unsynced >= _WRITE_BACK:
            self._unsynced = 0
            self._sink.begin_sync()

    def _note(self, stored: int, size: int, digest: bytes, *, compressed: bool) -> None:
        self.stored.append(StoredChunk(self.offset, stored, size, compressed, digest))
        self.offset += stored
