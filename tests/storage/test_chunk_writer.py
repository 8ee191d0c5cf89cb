"""How the writer fills a file: what shares a chunk, what is handed over when, how much memory it takes, write-back."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    Codec,
    LocalFiles,
    Payload,
    Record,
    chunk_writer,
    encode,
    raw,
    read_part,
    record_writer,
)
from gym_ckpt_grpc.storage import local_files as module
from gym_ckpt_grpc.storage.record_format import CHUNK_SIZE, HEADER_SIZE
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gym_ckpt_grpc.storage.record_writer import ALONE, RecordFileWriter
from tests.storage.builders import AGENT, make_records, write
from tests.storage.recording_files import ROOT, Fault, RecordingFiles

PATH = f"{ROOT}/records-x.gck"


def _record(number: int, *data: bytes) -> Record:
    payloads = {f"p{at}": raw(each, "x/y") for at, each in enumerate(data)}
    return Record(EpisodeId(f"r{number}"), "s", payloads=payloads)


def _write(records: list[Record], **more: Any) -> RecordingFiles:
    files = RecordingFiles()
    writer = RecordFileWriter(files.create(PATH), **more)
    writer.add(records)
    writer.finish()
    writer.abort()
    return files


def _layout(files: RecordingFiles) -> tuple[list[int], list[int]]:
    """The raw length of each chunk, and how many payloads it has."""
    with RecordFile(files, PATH) as file:
        chunks = [place.raw_length for place in file.index.chunks]
        return chunks, [file.index.chunk_of.count(at) for at in range(len(chunks))]


def test_a_large_payload_has_a_chunk_of_its_own_and_small_ones_share() -> None:
    sizes = [10, 20, ALONE, 30, ALONE - 1, ALONE + 1, ALONE + 2, 40]
    files = _write([_record(number, b"x" * size) for number, size in enumerate(sizes)])
    assert _layout(files) == ([30, ALONE, 30 + ALONE - 1, ALONE + 1, ALONE + 2, 40], [2, 1, 2, 1, 1, 1])


def test_a_byte_of_a_large_payload_is_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[int] = []
    real = hashlib.sha256

    def counted(data: bytes | memoryview) -> Any:
        digested.append(len(data))
        return real(data)

    monkeypatch.setattr(hashlib, "sha256", counted)
    _write([_record(number, bytes([number]) * 200_000) for number in range(30)])
    monkeypatch.undo()
    assert 30 * 200_000 <= sum(digested) < 30 * 200_000 + 20_000


@pytest.mark.timeout(300)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.lists(st.integers(0, 90), max_size=4), max_size=150),
    st.sampled_from([1, 10, 60, 200, 5000]),
    st.integers(1, 100),
    st.integers(1, 400),
)
def test_how_records_come_together_does_not_change_the_file(
    sizes: list[list[int]], chunk_size: int, together: int, together_bytes: int
) -> None:
    """One by one, or in groups of any size: the greedy filling of chunks is the same."""
    records = [_record(at, *(bytes([at]) * size for size in each)) for at, each in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_writer, "_TOGETHER", 1)
        single = _write(records, chunk_size=chunk_size).all_files()
        patch.setattr(record_writer, "_TOGETHER", together)
        patch.setattr(record_writer, "_TOGETHER_BYTES", together_bytes)
        files = _write(records, chunk_size=chunk_size)
    assert files.all_files() == single
    with RecordFile(files, PATH) as file:
        assert file.read() == records
        places = file.index.chunks
    assert [place.offset for place in places] == [
        HEADER_SIZE + start for start in list(accumulate([place.stored_length for place in places], initial=0))[:-1]
    ]
    assert all(place.stored_length <= max(chunk_size, 90) for place in places)


def test_buffers_are_used_again_and_nothing_of_an_earlier_chunk_is_left_in_a_later_one() -> None:
    records = [_record(at, *(bytes([at % 251]) * (7 + (at * 13 + n) % 40) for n in range(3))) for at in range(2000)]
    files = _write(records, chunk_size=1000)
    with RecordFile(files, PATH) as file:
        assert file.read() == records


@pytest.mark.parametrize("number", [0, 5, 70, 199])
@pytest.mark.parametrize(
    "payload",
    [Payload(Codec.RAW, bytearray(b"x")), Payload(Codec.RAW, "text"), Payload(Codec.RAW, None)],  # type: ignore[arg-type]
    ids=["bytearray", "text", "nothing"],
)
def test_what_is_no_bytes_is_refused_naming_its_episode(number: int, payload: Payload) -> None:
    records = [_record(at, b"x" * 10) for at in range(200)]
    records[number] = Record(EpisodeId(f"r{number}"), "s", payloads={"fine": raw(b"", "x/y"), "bad": payload})
    with pytest.raises(InvalidArgument, match="'bad'") as caught:
        _write(records)
    assert caught.value.episodes == (EpisodeId(f"r{number}"),)


def test_an_index_that_no_reader_would_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "MAX_INDEX", 1000)
    with pytest.raises(InvalidArgument, match="an index of"):
        _write(make_records(100))
    _write(make_records(2))


# ---- memory


def test_a_commit_of_lazily_encoded_state_takes_a_bounded_amount_of_memory() -> None:
    def records(count: int, size: int) -> Iterator[Record]:
        for number in range(count):
            record = _record(number, bytes([number % 251]) * size)
            yield msgspec.structs.replace(record, fields={"turn": number, "tags": ["a", "b"] if number % 100 else 1.5})

    for count, size in ((600, 400_000), (60_000, 2_000), (60_000, 10)):
        files = _Discarding()
        tracemalloc.start()
        try:
            writer = RecordFileWriter(files)
            writer.add(records(count, size))
            writer.finish()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert files.size > count * size
        assert peak < 64 << 20


class _Discarding:
    """A sink that counts. before: called with the bytes so far, before each write."""

    def __init__(self, before: Callable[[int], None] = lambda size: None) -> None:
        self.size = 0
        self.begun: list[tuple[int, str]] = []
        self._before = before

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._before(self.size)
        self.size += len(data)

    def begin_sync(self) -> None:
        self.begun.append((self.size, threading.current_thread().name))

    def sync(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.behaviour("C182")
def test_encoding_goes_on_while_a_chunk_is_written() -> None:
    encoded_more = threading.Event()

    def before(size: int) -> None:
        if size >= HEADER_SIZE and threading.current_thread().name.startswith("gymckpt-records"):
            assert encoded_more.wait(30), "nothing was encoded while a chunk was written"

    writer = RecordFileWriter(_Discarding(before), chunk_size=1000)
    for number in range(10):
        record = Record(EpisodeId(f"r{number}"), "s", payloads={"p": encode("x" * 1000)})
        if number == 2:
            encoded_more.set()
        writer.add([record])
    writer.finish()
    writer.abort()


def test_a_write_that_fails_on_the_helper_ends_the_commit_and_the_thread() -> None:
    files = RecordingFiles()
    sink = files.create(PATH)
    files.fault = Fault(len(files.steps) + 3, errno.ENOSPC, for_good=True)
    writer = RecordFileWriter(sink, chunk_size=100)

    def add_all() -> None:
        for number in range(100):
            writer.add([_record(number, b"x" * 100)])

    with pytest.raises(StateUnwritable, match="ENOSPC"):
        add_all()
    writer.abort()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gymckpt-records")]


# ---- early write-back


def test_write_back_begins_every_four_megabytes_on_the_helper() -> None:
    sink = _Discarding()
    writer = RecordFileWriter(sink)
    for number in range(200):
        writer.add([_record(number, bytes(300_000))])
    writer.finish()
    writer.abort()
    at = [size for size, _ in sink.begun]
    assert len(at) == 14
    steps = [end - start for start, end in zip([HEADER_SIZE, *at], at, strict=False)]
    assert all(chunk_writer._WRITE_BACK <= step < chunk_writer._WRITE_BACK + 300_000 for step in steps)
    assert all(name.startswith("gymckpt-records") for _, name in sink.begun)


def test_write_back_covers_what_is_new_and_is_nothing_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []

    def call(handle: int, *rest: int) -> int:
        ranges.append((rest[0], rest[1]))
        return -1

    monkeypatch.setattr(module, "_sync_file_range", call)
    sink = LocalFiles().create(str(tmp_path / "a"))
    for size in (10, 20):
        sink.write(bytes(size))
        sink.begin_sync()
    sink.begin_sync()
    assert ranges == [(0, 10), (10, 20)]
    monkeypatch.setattr(module, "_sync_file_range", None)
    sink.write(bytes(5))
    sink.begin_sync()
    sink.sync()
    sink.close()
    assert (tmp_path / "a").stat().st_size == 35


@pytest.mark.skipif(module._sync_file_range is None, reason="this system has no sync_file_range")
def test_the_systems_write_back_takes_our_arguments(tmp_path: Path) -> None:
    assert module._sync_file_range is not None
    handle = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    os.write(handle, bytes(10_000))
    assert module._sync_file_range(handle, 0, 10_000, module._SYNC_FILE_RANGE_WRITE) == 0
    assert module._sync_file_range(handle, -1, 10_000, module._SYNC_FILE_RANGE_WRITE) == -1
    os.close(handle)


def test_a_part_larger_than_every_buffer_on_a_real_disk(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path))
    records = [
        *(_record(number, bytes([number % 251]) * 3000) for number in range(4000)),
        *(_record(number, os.urandom(16) * 20_000, b"small") for number in range(4000, 4080)),
    ]
    info = write(root.files, root, "ck", records=records, chunk_size=CHUNK_SIZE)
    assert info.bytes > 2 * chunk_writer._WRITE_BACK
    part = read_part(root.files, root.location("ck"), AGENT.place, checkpoint_id="ck")
    assert list(part.records) == records
