"""Reading: verified before use, ahead of who decodes, in bounds whatever a file says."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import msgspec
import pytest
import zstandard

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.storage import CheckpointRoot, Codec, Payload, Record, encode, raw, read_part
from gym_ckpt_grpc.storage.payloads import DecodedPayload
from gym_ckpt_grpc.storage.record_format import FOOTER_SIZE, HEADER_SIZE, Footer, pack_footer
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gymckpt.v1 import storage_pb2
from tests.storage.assembling import PATH, CountedFiles, index_of, rechunked, reindexed, write_file
from tests.storage.builders import AGENT, make_records, write
from tests.storage.recording_files import ROOT, RecordingFiles

MIB = 1 << 20


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gymckpt-reading")]


def large(count: int = 10, size: int = 4 * MIB) -> list[Record]:
    """Records with one payload each, all different."""
    data = [bytes([number]) * size for number in range(count)]
    return [Record(EpisodeId(f"r{at}"), "s", payloads={"p": raw(each, "x/y")}) for at, each in enumerate(data)]


# ---- ahead, on helper threads


def test_a_read_is_at_most_three_batches_ahead_of_who_takes_them_and_ends_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed_over = 0

    class Counting(ThreadPoolExecutor):
        def submit(self, *work: Any, **more: Any) -> Future[Any]:
            nonlocal handed_over
            handed_over += 1
            return super().submit(*work, **more)

    monkeypatch.setattr("gym_ckpt_grpc.storage.chunk_reading.ThreadPoolExecutor", Counting)
    files, _ = write_file(large(), chunk_size=4 * MIB)
    with RecordFile(files, PATH) as file:
        for leave_at in (1, 2, 5, 10):
            handed_over = 0
            fetched = file._chunks.fetch(range(10))
            for taken, _ in enumerate(islice(fetched, leave_at), 1):
                assert handed_over == min(10, taken + 3)
            fetched.close()  # waits for what is under way
            assert not reading_threads()


def test_a_large_file_is_read_whole_and_in_order_with_and_without_threads() -> None:
    for records in (large(), large(40, 100_000), large(3, 10)):
        files, _ = write_file(records, chunk_size=MIB)
        with RecordFile(files, PATH) as file:
            assert file.read() == records
            assert file.bytes_read == file.size
            assert file.read_at([1, 2]) == records[1:3]
        assert not reading_threads()


def test_the_threads_end_with_an_error_too_which_names_the_episode() -> None:
    records = large()
    files, data = write_file(records, chunk_size=4 * MIB)
    at = data.index(records[6].payloads["p"].data)
    files.damage(PATH, data[:at] + b"\xff" + data[at + 1 :])
    with RecordFile(files, PATH) as file, pytest.raises(StateCorrupt) as caught:
        file.read()
    assert caught.value.episodes == (EpisodeId("r6"),)
    assert not reading_threads()


# ---- decoded while it is read


def test_what_was_decoded_while_it_was_read_is_handed_out_once() -> None:
    """So that nobody sees what another changed, and no state is in memory twice."""
    files, _ = write_file(make_records(3))
    with RecordFile(files, PATH) as file:
        record = file.read(decoded=True)[1]
        lazy = file.read()[1]
    assert record.decode("state") == lazy.decode("state") == lazy.decode("state")
    with pytest.raises(ValueError, match="handed out once"):
        record.decode("state")
    assert record.decode("conversation") == lazy.decode("conversation")


@pytest.mark.parametrize("count", [1, 3])
def test_a_payload_that_was_decoded_has_no_bytes_and_cannot_be_written(count: int) -> None:
    """It would be written as if it were empty."""
    files, _ = write_file(make_records(count))
    with RecordFile(files, PATH) as file:
        records = file.read(decoded=True)
    assert all(payload.data is None for record in records for payload in record.payloads.values())
    assert "Decoded" in repr(records[0].payloads["state"])
    with pytest.raises(InvalidArgument, match="is no bytes"):
        write_file(records)


def test_raw_bytes_stay_where_they_are() -> None:
    """They are their own value, and an owner takes them with their content type."""
    snapshot = raw(b"\x00\xff", "application/x-snapshot")
    files, _ = write_file([Record(EpisodeId("r"), "s", payloads={"p": snapshot, "q": encode({"a": 1})})])
    with RecordFile(files, PATH) as file:
        (record,) = file.read(decoded=True)
    assert record.payloads["p"] == snapshot
    assert record.decode("p") == record.decode("p") == snapshot.data
    assert record.decode("q") == {"a": 1}


def test_a_changed_copy_of_a_record_has_its_own_state() -> None:
    files, _ = write_file(make_records(1))
    with RecordFile(files, PATH) as file:
        (record,) = file.read(decoded=True)
    other = msgspec.structs.replace(record, payloads={"state": encode("another")})
    assert other.decode("state") == "another"
    assert record.decode("conversation") == make_records(1)[0].decode("conversation")


@pytest.mark.behaviour("C160")
def test_a_record_that_cannot_be_decoded_fails_the_same_ahead_and_at_first_use() -> None:
    bad = Record(EpisodeId("bad", 2), "s", payloads={"p": Payload(Codec.MSGPACK, b"\x93\x01")})
    files, _ = write_file([*make_records(2), bad])
    messages = set()
    with RecordFile(files, PATH) as file:
        found = file.read()[2]
        for read in (lambda: found.decode("p"), lambda: file.read(decoded=True)):
            with pytest.raises(StateCorrupt) as caught:
                read()
            assert caught.value.episodes == (bad.episode,)
            messages.add(caught.value.message)
        assert [(each.episode, each.payload) for each in file.check_payloads()] == [(bad.episode, "p")]
        file.read({record.episode for record in make_records(2)}, decoded=True)
    (message,) = messages
    for text in (PATH, "record 2", "bad-a2", "'p'", "MSGPACK"):
        assert text in message


def test_a_part_is_decoded_where_it_is_asked_for() -> None:
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    write(files, root, "ck")
    lazy, ready = (
        read_part(files, root.location("ck"), AGENT.place, checkpoint_id="ck", decoded=decoded).records
        for decoded in (False, True)
    )
    assert lazy == tuple(make_records())
    for first, second in zip(lazy, ready, strict=True):
        assert {type(payload) for payload in second.payloads.values()} == {DecodedPayload}
        assert {name: first.decode(name) for name in first.payloads} == {
            name: second.decode(name) for name in second.payloads
        }


# ---- compressed chunks


def squeezable(count: int = 12) -> list[Record]:
    return [
        Record(EpisodeId(f"r{at}"), "s", payloads={"p": encode({"at": at, "text": f"{at} " * 500})})
        for at in range(count)
    ]


def compressed(records: list[Record]) -> tuple[RecordingFiles, bytes]:
    """A file whose chunks, of three records or so, are compressed."""
    files, data = write_file(records, chunk_size=4000, compress=True)
    assert {chunk.compression for chunk in index_of(data).chunks} == {storage_pb2.COMPRESSION_ZSTD}
    return files, data


@pytest.mark.behaviour("C182", "C161")
def test_compressed_chunks_come_back_whole_or_in_part() -> None:
    records = squeezable()
    files, data = compressed(records)
    chunks = index_of(data).chunks
    assert len(chunks) > 3
    with RecordFile(files, PATH) as file:
        before = file.bytes_read
        assert file.read() == records
        assert file.bytes_read - before == sum(chunk.stored_length for chunk in chunks)
        before = file.bytes_read
        assert file.read({records[7].episode}) == [records[7]]
        assert file.bytes_read - before == chunks[file.index.chunk_of[7]].stored_length


def framed(**options: bool | int) -> Callable[[int, bytes], bytes]:
    """The same bytes in another frame."""

    def change(number: int, stored: bytes) -> bytes:
        raw_bytes = zstandard.decompress(stored)
        return zstandard.ZstdCompressor(**options).compress(raw_bytes)  # type: ignore[arg-type]

    return change


def bomb(number: int, stored: bytes) -> bytes:
    """One frame that says, and would give, 256 MiB."""
    return zstandard.compress(bytes(256 * MIB))


HOSTILE_FRAMES: dict[str, Callable[[int, bytes], bytes]] = {
    "no frame": lambda number, stored: b"\x00" * 40,
    "nothing": lambda number, stored: b"",
    "cut short": lambda number, stored: stored[:-3],
    "something behind": lambda number, stored: stored + b"\x00",
    "a frame behind": lambda number, stored: stored + stored,
    "an unknown size": framed(write_content_size=False),
    "another size": lambda number, stored: zstandard.compress(zstandard.decompress(stored) + b"x"),
    "less": lambda number, stored: zstandard.compress(zstandard.decompress(stored)[:-1]),
    "a dictionary": lambda number, stored: zstandard.ZstdCompressor(
        dict_data=zstandard.ZstdCompressionDict(bytes(range(256)) * 8, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    ).compress(zstandard.decompress(stored)[:-1]),
    "a bomb": bomb,
}


@pytest.mark.parametrize("frame", HOSTILE_FRAMES, ids=list(HOSTILE_FRAMES))
def test_a_frame_that_is_not_what_the_index_says_is_refused_before_anything_is_allocated_for_it(frame: str) -> None:
    records = squeezable(3)
    files, data = compressed(records)
    files.damage(PATH, rechunked(data, HOSTILE_FRAMES[frame]))
    tracemalloc.start()
    try:
        with pytest.raises(StateCorrupt, match=r"records-x\.gck"), RecordFile(files, PATH) as file:
            file.read()
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def wide(number: int, stored: bytes) -> bytes:
    """A frame that would make a reader who takes it piece by piece keep 128 MiB."""
    options = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True)
    packed = zstandard.ZstdCompressor(compression_params=options)
    raw_bytes = zstandard.decompress(stored)
    maker = packed.compressobj(size=len(raw_bytes))
    start = maker.compress(raw_bytes) + maker.flush()
    # Not a single segment: the descriptor's flag off, and a window descriptor of 2^27 put in.
    return start[:4] + bytes([start[4] & ~0x20, (27 - 10) << 3]) + start[5:]


def test_a_frame_with_a_checksum_another_level_or_a_window_that_is_not_needed_is_as_good() -> None:
    records = squeezable()
    files, data = compressed(records)
    for change in (framed(level=19), framed(write_checksum=True), wide):
        files.damage(PATH, rechunked(data, change))
        with RecordFile(files, PATH) as file:
            assert file.read() == records


def test_a_chunk_that_claims_more_than_its_bytes_can_hold_is_refused() -> None:
    files, data = compressed(squeezable(3))
    for claim in (2**63, 2**31, index_of(data).chunks[0].stored_length * 70_000):
        files.damage(PATH, reindexed(data, lambda index, claim=claim: setattr(index.chunks[0], "raw_length", claim)))  # type: ignore[misc]
        with pytest.raises(StateCorrupt, match="claims to hold"):
            RecordFile(files, PATH)


# ---- whatever the index says


def test_a_wild_index_is_read_right_or_refused(record_property: Callable[[str, object], None]) -> None:
    """Numbers of any column, and whole entries, changed at random; every digest is right."""
    seed = random.randrange(2**32)
    record_property("seed", seed)
    print(f"seed {seed}")
    rng = random.Random(seed)
    records = squeezable(6) + make_records(3)
    for squeeze in (False, True):
        files, data = write_file(records, chunk_size=3000, compress=squeeze)
        refused = whole = 0
        for _ in range(400):
            files.damage(PATH, reindexed(data, lambda index: _shake(index, rng)))
            try:
                with RecordFile(files, PATH) as file:
                    file.read(decoded=True)
                    list(file.check_payloads())
            except StateCorrupt as error:
                refused += PATH in error.message
                continue
            whole += 1
        assert (refused + whole, refused > 200) == (400, True)


def _shake(index: storage_pb2.RecordsIndex, rng: random.Random) -> None:
    wild = [0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**32 - 1]
    wider = [*wild, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1]
    for _ in range(rng.choice([1, 1, 2, 3])):
        group = rng.choice([index.records, index.payloads])
        field = rng.choice([each for each in group.DESCRIPTOR.fields if each.cpp_type != each.CPPTYPE_STRING])
        column = getattr(group, field.name)
        at = rng.randrange(len(column))
        kind = rng.randrange(4)
        if kind == 0:
            del column[at]
        elif kind == 1:
            column.insert(at, column[rng.randrange(len(column))])
        elif kind == 2:
            column[at] = rng.choice(wider if field.cpp_type == field.CPPTYPE_UINT64 else wild[:7])
        else:
            chunk = rng.choice(index.chunks)
            name = rng.choice(["offset", "stored_length", "raw_length"])
            setattr(chunk, name, rng.choice(wider))


def test_an_index_of_wild_length_is_not_read() -> None:
    """Also where the file has that many bytes: it may be a hole."""
    files, data = write_file(make_records(2))

    class Huge:
        size = 2**40
        asked = 0

        def read(self, offset: int, length: int) -> bytes:
            self.asked += length
            assert length < 1000
            return data[:length] if offset == 0 else footer[-length:]

        def close(self) -> None: ...

    for offset in (HEADER_SIZE, 2**39):
        footer = pack_footer(Footer(offset, 2**40 - FOOTER_SIZE - offset, b"d" * 32))
        huge = Huge()
        files.open = lambda path, huge=huge: huge  # type: ignore[method-assign, misc]
        with pytest.raises(StateCorrupt, match="index of"):
            RecordFile(files, PATH)


def test_what_was_opened_is_closed_however_it_ends() -> None:
    files = CountedFiles()
    _, data = write_file(make_records(3), files=files)
    with RecordFile(files, PATH) as file:
        file.read()
    for bad in (data[:-1], reindexed(data, lambda index: index.names.append("x" * 999))):
        files.damage(PATH, bad)
        with pytest.raises(StateCorrupt):
            RecordFile(files, PATH)
    with pytest.raises(StateNotFound):
        RecordFile(files, f"{ROOT}/other")
    assert files.opened == files.closed == [PATH] * 3


# ---- chunk digests


@pytest.mark.behaviour("C184")
def test_a_chunk_with_a_wrong_digest_fails_a_read_that_needs_it_and_no_other() -> None:
    """With its payloads intact too: nothing is handed out of a chunk that is not what its index says."""
    files = RecordingFiles()
    records = squeezable(9)
    files, data = write_file(records, chunk_size=4000)

    def lie(index: storage_pb2.RecordsIndex) -> None:
        index.chunks[1].digest = b"\x00" * 32

    files.damage(PATH, reindexed(data, lie))
    with RecordFile(files, PATH) as file:
        inside = [at for at, chunk in enumerate(file.index.chunk_of) if chunk == 1]
        assert 1 < len(inside) < 9
        with pytest.raises(StateCorrupt, match="chunk 1") as caught:
            file.read()
        assert caught.value.episodes == tuple(records[at].episode for at in inside)
        with pytest.raises(StateCorrupt):
            file.read(EpisodeScope.of(records[at].episode for at in inside))
        outside = [record for at, record in enumerate(records) if at not in inside]
        assert file.read(EpisodeScope.of(record.episode for record in outside)) == outside
        assert [each.episode for each in file.check_payloads()] == [records[at].episode for at in inside]
