"""Compressed chunks: the same comes back, nothing grows, and whoever encodes does not wait for it."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import tracemalloc
from dataclasses import dataclass, field

import pytest
import zstandard

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, Record, StopFlag, WriteStopped, encode, raw, read_part
from gym_ckpt_grpc.storage.record_format import CHUNK_SIZE, HEADER_SIZE
from gym_ckpt_grpc.storage.record_index import ChunkPlace, RecordIndex
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gym_ckpt_grpc.storage.record_writer import ALONE, RecordFileWriter
from tests.storage.builders import AGENT, make_records, write
from tests.storage.recording_files import ROOT, RecordingFiles

PATH = f"{ROOT}/records-x.gck"


def _noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def _record(number: int, data: bytes) -> Record:
    return Record(EpisodeId(f"r{number}"), "s", payloads={"p": raw(data, "x/y")})


def _mixed() -> list[Record]:
    """Small ones that share chunks, large ones alone, what shrinks and what does not, and nothing at all."""
    text = b"the quick brown fox " * 20
    data = [text * 3, _noise(900), b"", text * 400, _noise(ALONE), b"x" * (ALONE - 1), _noise(ALONE + 7) + text * 9000]
    return [*make_records(30), *(_record(number, each) for number, each in enumerate(data)), *make_records(3, turn=5)]


@dataclass
class _Sink:
    """A file in memory. threads: who wrote."""

    data: bytearray = field(default_factory=bytearray)
    threads: set[str] = field(default_factory=set)
    begun: list[int] = field(default_factory=list)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.threads.add(threading.current_thread().name)
        self.data += data

    def begin_sync(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.append(len(self.data))

    def sync(self) -> None: ...
    def close(self) -> None: ...


def _file(records: list[Record], *, chunk_size: int = CHUNK_SIZE, compress: bool = True) -> RecordingFiles:
    files = RecordingFiles()
    sink = files.create(PATH)
    writer = RecordFileWriter(sink, chunk_size=chunk_size, compress=compress)
    writer.add(records)
    writer.finish()
    writer.abort()
    return files


def _open(files: RecordingFiles) -> tuple[RecordIndex, bytes, list[Record]]:
    with RecordFile(files, PATH) as file:
        return file.index, files.all_files()[PATH], file.read()


def _stored(data: bytes, place: ChunkPlace) -> bytes:
    return data[place.offset : place.offset + place.stored_length]


@pytest.mark.behaviour("C182")
@pytest.mark.parametrize("chunk_size", [1, 64, 5000, CHUNK_SIZE])
def test_what_is_read_is_the_same_with_and_without(chunk_size: int) -> None:
    plain, packed = (_open(_file(_mixed(), chunk_size=chunk_size, compress=compress)) for compress in (False, True))
    assert packed[2] == plain[2] == _mixed()
    assert not any(place.compressed for place in plain[0].chunks)
    assert (packed[0].lengths, packed[0].digests) == (plain[0].lengths, plain[0].digests)
    assert [place.raw_length for place in packed[0].chunks] == [place.stored_length for place in plain[0].chunks]
    assert len(packed[1]) < len(plain[1])


@pytest.mark.behaviour("C182")
def test_each_chunk_is_one_frame_that_tells_its_size_or_is_plain() -> None:
    index, data, _ = _open(_file(_mixed()))
    assert {place.compressed for place in index.chunks} == {True, False}
    for place in index.chunks:
        stored = _stored(data, place)
        assert hashlib.sha256(stored).digest() == place.digest
        if place.compressed:
            assert place.stored_length < place.raw_length
            assert zstandard.frame_content_size(stored) == place.raw_length
            whole = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
            assert len(whole) == place.raw_length
        else:
            assert place.stored_length == place.raw_length


def test_the_same_records_give_the_same_bytes() -> None:
    assert _file(_mixed()).all_files() == _file(_mixed()).all_files()


def test_what_does_not_shrink_is_stored_plain() -> None:
    index, data, _ = _open(_file([_record(0, _noise(ALONE)), _record(1, _noise(500))]))
    assert [place.compressed for place in index.chunks] == [False, False]
    assert _stored(data, index.chunks[0]) == _noise(ALONE)


def test_small_payloads_share_a_frame_and_a_large_one_has_its_own() -> None:
    small = [_record(number, b"the quick brown fox %d" % number) for number in range(100)]
    index, _, _ = _open(_file([*small, _record(100, b"x" * ALONE), *small]))
    assert [index.chunk_of.count(chunk) for chunk in range(len(index.chunks))] == [100, 1, 100]
    assert index.digests[100 * 32 : 101 * 32] == hashlib.sha256(b"x" * ALONE).digest()


@pytest.mark.behaviour("C182")
def test_whoever_encodes_goes_on_while_a_chunk_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded_more = threading.Event()
    compressing: list[str] = []
    real = zstandard.ZstdCompressor(level=1)

    class _Waiting:
        def compress(self, data: bytes | memoryview) -> bytes:
            compressing.append(threading.current_thread().name)
            assert encoded_more.wait(30), "nothing was encoded while a chunk was compressed"
            return real.compress(data)

    monkeypatch.setattr(zstandard, "ZstdCompressor", lambda level: _Waiting())
    writer = RecordFileWriter(_Sink(), chunk_size=ALONE, compress=True)
    for number in range(6):
        record = Record(EpisodeId(f"r{number}"), "s", payloads={"p": encode({"text": "abc" * ALONE})})
        if number == 2:
            encoded_more.set()
        writer.add([record])
    writer.finish()
    writer.abort()
    assert all(name.startswith("gymckpt-records") for name in compressing[:5])


def test_a_payload_of_many_megabytes_is_compressed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 40 << 20
    data = bytes(size)
    text = b"the quick brown fox " * (size // 20)
    text_like = b"".join(_noise(500, seed) + text[:500] for seed in range(size // 1000))
    index, found, records = _open(_file([_record(0, data), _record(1, text_like), _record(2, _noise(size))]))
    assert [place.compressed for place in index.chunks] == [True, True, False]
    assert [zstandard.frame_content_size(_stored(found, place)) for place in index.chunks[:2]] == [size, len(text_like)]
    assert [record.payloads["p"].data for record in records] == [data, text_like, _noise(size)]
    del records, found
    sink = _Sink()
    monkeypatch.setattr(sink, "write", lambda data: None)
    tracemalloc.start()
    try:
        writer = RecordFileWriter(sink, compress=True)
        writer.add([_record(0, text_like)])
        writer.finish()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.behaviour("C177")
def test_a_stop_is_heard_within_a_large_payload() -> None:
    stop = StopFlag()

    class _Stopping(_Sink):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            super().write(data)
            if len(self.data) > HEADER_SIZE:
                stop.stop()

    sink = _Stopping()
    writer = RecordFileWriter(sink, compress=True, stop=stop)
    writer.add([_record(0, (_noise(1 << 19) + bytes(1 << 19)) * 32)])
    with pytest.raises(WriteStopped):
        writer.finish()
    writer.abort()
    assert len(sink.data) < 4 << 20


@pytest.mark.behaviour("C182")
def test_a_part_on_a_real_disk_comes_back(tmp_path: os.PathLike[str]) -> None:
    root = CheckpointRoot(str(tmp_path))
    plain = write(root.files, root, "plain", records=_mixed(), chunk_size=CHUNK_SIZE)
    packed = write(root.files, root, "packed", records=_mixed(), chunk_size=CHUNK_SIZE, compress=True)
    again = write(root.files, root, "packed", records=_mixed(), chunk_size=CHUNK_SIZE, compress=True)
    assert again == packed
    assert packed.bytes < plain.bytes
    assert packed.state_bytes == plain.state_bytes
    part = read_part(root.files, root.location("packed"), AGENT.place, checkpoint_id="packed")
    assert list(part.records) == _mixed()
    base = root.location("packed")
    info = write(root.files, root, "next", records=_mixed(), chunk_size=CHUNK_SIZE, base=base)
    part = read_part(root.files, root.location("next"), AGENT.place, checkpoint_id="next")
    assert list(part.records) == _mixed()
    assert info.bytes < packed.bytes // 4
