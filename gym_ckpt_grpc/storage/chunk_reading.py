"""Reading payloads out of chunks, of a records file or of those it points into: each byte verified before anybody
sees it, ahead of who decodes it."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import zstandard

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage.files import FileLayer, FileSource
from gym_ckpt_grpc.storage.record_format import CHUNK_SIZE, records_name
from gym_ckpt_grpc.storage.record_index import BaseFile, ChunkPlace, RecordIndex

_HELPERS = 2
"""Threads that read beside the one that decodes. They wait for its interpreter lock at each step, two at a time."""
_AHEAD = 3  # batches of about a chunk that may wait for who decodes
_WORTH_A_THREAD = 1 << 20  # bytes
_MAX_WINDOW = 8 << 20  # bytes that a zstd frame may make its reader keep; level 1 needs half a MiB

T = TypeVar("T")
BasePaths = Callable[[BaseFile], str]
"""Where a file of an earlier checkpoint is: an absolute path. Raises StateCorrupt for one that must not be opened."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Payloads of one chunk, by position, in the order in which they are in it."""

    chunk: int
    positions: list[int]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Payloads by position. bytes_read: from the files."""

    payloads: Mapping[int, bytes]
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Examined:
    """Payloads by position: those as they were written, and what is wrong with the others."""

    intact: Mapping[int, bytes]
    problems: Mapping[int, str]
    bytes_read: int


class ChunkReader:
    """Reads from one records file, open as `source`, and from those it points into, which it opens once each.

    Safe to use from several threads. `close` closes what it opened, not `source`.
    """

    def __init__(self, files: FileLayer, source: FileSource, index: RecordIndex, bases: BasePaths | None) -> None:
        self._files = files
        self._index = index
        self._bases = bases
        self._lock = threading.Lock()
        self._sources: dict[BaseFile | None, FileSource] = {None: source}
        self._decompressors = threading.local()

    def close(self) -> None:
        """Close the files of earlier checkpoints."""
        with self._lock:
            bases = [source for base, source in self._sources.items() if base is not None]
            self._sources = {None: self._sources[None]}
        for source in bases:
            source.close()

    # ---- many, ahead

    def fetch(self, positions: Sequence[int]) -> Generator[Fetched, None, None]:
        """Read payloads, about a chunk's worth at a time, in the order in which they are first wanted.

        Reads ahead on helper threads, which have ended when the iterator has: exhaust it, or close it. Raises
        StateCorrupt naming file, chunk and episodes.
        """
        return self._ahead(self._read_batch, positions)

    def examine(self, positions: Sequence[int]) -> Generator[Examined, None, None]:
        """As `fetch`, but everything is read, each payload has to be as its own digest says, and no fault ends it."""
        return self._ahead(self._examine_batch, positions)

    def _ahead(self, work: Callable[[list[Wanted]], T], positions: Sequence[int]) -> Generator[T, None, None]:
        batches = self._batches(positions)
        if len(batches) < 2 or sum(self._index.lengths[at] for at in positions) < _WORTH_A_THREAD:
            yield from map(work, batches)
            return
        helper = ThreadPoolExecutor(_HELPERS, thread_name_prefix="gymckpt-reading")
        try:
            rest = iter(batches)
            pending: deque[Future[T]] = deque(helper.submit(work, batch) for batch in islice(rest, _AHEAD))
            while pending:
                found = pending.popleft().result()
                pending.extend(helper.submit(work, batch) for batch in islice(rest, 1))
                yield found
        finally:
            helper.shutdown(wait=True, cancel_futures=True)

    def _batches(self, positions: Sequence[int]) -> list[list[Wanted]]:
        """Chunks put together to about CHUNK_SIZE of what is wanted of them."""
        chunk_of, lengths = self._index.chunk_of, self._index.lengths
        chunks: dict[int, list[int]] = {}
        for position in positions:
            chunks.setdefault(chunk_of[position], []).append(position)
        batches: list[list[Wanted]] = []
        room = 0
        for chunk, wanted in chunks.items():
            if room <= 0:
                batches.append([])
                room = CHUNK_SIZE
            batches[-1].append(Wanted(chunk, wanted))
            room -= sum(lengths[at] for at in wanted)
        return batches

    def _read_batch(self, batch: list[Wanted]) -> Fetched:
        found: dict[int, bytes] = {}
        count = 0
        for wanted in batch:
            payloads, size = self._read_wanted(wanted)
            found.update(payloads)
            count += size
        return Fetched(found, count)

    def _examine_batch(self, batch: list[Wanted]) -> Examined:
        intact: dict[int, bytes] = {}
        problems: dict[int, str] = {}
        count = 0
        for wanted in batch:
            place = self._index.chunks[wanted.chunk]
            try:
                if place.compressed:
                    found = self._cut_out(self._read_raw(wanted.chunk, wanted.positions), wanted.positions)
                else:
                    found = self._read_runs(place, wanted.positions)
            except (StateCorrupt, StateNotFound) as error:
                problems.update(dict.fromkeys(wanted.positions, f"cannot be read: {error.message}"))
                continue
            count += place.stored_length if place.compressed else sum(map(len, found.values()))
            wrong = {position for position, data in found.items() if not self._is_intact(position, data)}
            problems.update((position, f"is damaged in chunk {wanted.chunk}{_whose(place)}") for position in wrong)
            intact.update((position, data) for position, data in found.items() if position not in wrong)
            if not wrong and place.base is None and not place.compressed:
                whole = b"".join(found[position] for position in wanted.positions)
                if len(whole) == place.stored_length and hashlib.sha256(whole).digest() != place.digest:
                    text = f"is in chunk {wanted.chunk}, which has another digest than its index says"
                    problems.update(dict.fromkeys(wanted.positions, text))
        return Examined(intact, problems, count)

    # ---- one chunk

    def _read_wanted(self, wanted: Wanted) -> tuple[Mapping[int, bytes], int]:
        """The payloads, and how many bytes were read for them.

        A chunk of this file that is wanted whole is verified by its own digest, which settles where each payload is
        too, since they fill it one after the other. Else each payload is verified by its own digest.
        """
        index, positions = self._index, wanted.positions
        place = index.chunks[wanted.chunk]
        if place.compressed:
            payloads = self._cut_out(self._read_raw(wanted.chunk, positions), positions)
            if place.base is not None:
                self._check_each(payloads, place)
            return payloads, place.stored_length
        if place.base is None and sum(map(index.lengths.__getitem__, positions)) == place.stored_length:
            data = self._read_raw(wanted.chunk, positions)
            return dict(zip(positions, _cut(data, positions, index.lengths), strict=True)), place.stored_length
        payloads = self._read_runs(place, positions)
        self._check_each(payloads, place)
        return payloads, sum(map(len, payloads.values()))

    def _read_raw(self, number: int, positions: Sequence[int]) -> bytes:
        """The raw bytes of a chunk, verified. positions: of the payloads it is read for. Raises StateCorrupt."""
        place = self._index.chunks[number]
        data = self._source(place.base, positions).read(place.offset, place.stored_length)
        if hashlib.sha256(data).digest() == place.digest:
            return self._decompress(data, place, number, positions) if place.compressed else data
        damaged: list[int] = []
        if not place.compressed:
            parts = self._cut_out(data, positions)
            damaged = [position for position in positions if not self._is_intact(position, parts[position])]
        raise self._corrupt(f"chunk {number}{_whose(place)} damaged", damaged or positions)

    def _cut_out(self, data: bytes, positions: Sequence[int]) -> dict[int, bytes]:
        """Payloads out of the raw bytes of their chunk."""
        offsets, lengths = self._index.offsets, self._index.lengths
        return {position: data[offsets[position] : offsets[position] + lengths[position]] for position in positions}

    def _read_runs(self, place: ChunkPlace, positions: Sequence[int]) -> dict[int, bytes]:
        """Some payloads of a chunk that is stored plain: each run of neighbours at once, none verified yet."""
        index, source = self._index, self._source(place.base, positions)
        found: dict[int, bytes] = {}
        for run in _runs(sorted(positions, key=index.offsets.__getitem__), index):
            start = index.offsets[run[0]]
            size = sum(index.lengths[position] for position in run)
            data = source.read(place.offset + start, size)
            found.update(zip(run, _cut(data, run, index.lengths), strict=True))
        return found

    def _check_each(self, payloads: Mapping[int, bytes], place: ChunkPlace) -> None:
        for position, data in payloads.items():
            if not self._is_intact(position, data):
                name, chunk = self._index.payload_name(position), self._index.chunk_of[position]
                raise self._corrupt(f"payload {name!r} damaged in chunk {chunk}{_whose(place)}", [position])

    def _is_intact(self, position: int, data: bytes) -> bool:
        return hashlib.sha256(data).digest() == self._index.payload(position).digest

    def _decompress(self, data: bytes, place: ChunkPlace, number: int, positions: Sequence[int]) -> bytes:
        """Never trusts the frame: it must say what the index says, before anything is allocated for it."""
        size, problem = place.raw_length, "it is a frame of another size than the index says"
        try:
            if zstandard.frame_content_size(data) == size:
                raw = self._decompressor().decompress(data, max_output_size=size, allow_extra_data=False)
                if len(raw) == size:
                    return raw
        except zstandard.ZstdError as error:
            problem = str(error)
        raise self._corrupt(f"chunk {number}{_whose(place)} that cannot be decompressed ({problem})", positions)

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        known = getattr(self._decompressors, "one", None)
        if known is None:
            known = self._decompressors.one = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        assert isinstance(known, zstandard.ZstdDecompressor)
        return known

    # ---- files

    def _source(self, base: BaseFile | None, positions: Sequence[int]) -> FileSource:
        """The open file that has a chunk. positions: of the payloads it is needed for. Raises StateCorrupt."""
        with self._lock:
            known = self._sources.get(base)
            if known is None:
                assert base is not None
                known = self._sources[base] = self._open(base, positions)
            return known

    def _open(self, base: BaseFile, positions: Sequence[int]) -> FileSource:
        name = records_name(base.root_digest)
        if self._bases is None:
            raise self._corrupt(
                f"state in {name!r} of checkpoint {base.checkpoint_id!r}, which is not at hand", positions
            )
        path = self._bases(base)
        try:
            source = self._files.open(path)
        except StateNotFound as error:
            text = f"state in {path!r} of checkpoint {base.checkpoint_id!r}, which is not there"
            raise self._corrupt(text, positions) from error
        if source.size != base.size:
            with suppress(Exception):
                source.close()
            raise self._corrupt(f"state in {path!r}, which has {source.size} bytes, not {base.size}", positions)
        return source

    def _corrupt(self, problem: str, positions: Sequence[int]) -> StateCorrupt:
        """The error for payloads at these positions; problem: what the file has."""
        index = self._index
        episodes = dict.fromkeys(index.episodes[index.record_of(at)] for at in positions)
        names = ", ".join(str(episode) for episode in islice(episodes, 5))
        more = f" and {len(episodes) - 5} more" if len(episodes) > 5 else ""
        return index.corrupt(f"has {problem}, with state of {names}{more}", episodes)


def _whose(place: ChunkPlace) -> str:
    return f" (of checkpoint {place.base.checkpoint_id!r})" if place.base else ""


def _cut(data: bytes, positions: Sequence[int], lengths: Sequence[int]) -> Iterator[bytes]:
    """Neighbouring payloads out of the bytes that hold them and nothing else."""
    if len(positions) == 1:
        yield data
        return
    start = 0
    for position in positions:
        end = start + lengths[position]
        yield data[start:end]
        start = end


def _runs(positions: Sequence[int], index: RecordIndex) -> Iterator[list[int]]:
    """Neighbours together. positions: of one chunk, in the order in which they are in it."""
    run: list[int] = []
    end = -1
    for position in positions:
        offset = index.offsets[position]
        if run and offset != end:
            yield run
            run = []
        run.append(position)
        end = offset + index.lengths[position]
    if run:
        yield run
