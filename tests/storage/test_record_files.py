"""Records files: what is read equals what was written, or is refused by name; reads take only what they need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.storage import CheckpointRoot, Codec, Payload, Record, encode, raw, read_part
from gym_ckpt_grpc.storage.record_format import FOOTER_SIZE, HEADER_SIZE
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gym_ckpt_grpc.storage.record_writer import RecordFileWriter
from gymckpt.v1 import storage_pb2
from tests.storage.assembling import PATH, reindexed
from tests.storage.builders import AGENT, make_records, write
from tests.storage.recording_files import ROOT, RecordingFiles


def _write(records: list[Record], chunk_size: int = 64) -> tuple[RecordingFiles, bytes]:
    files = RecordingFiles()
    sink = files.create(PATH)
    writer = RecordFileWriter(sink, chunk_size=chunk_size)
    writer.add(records)
    writer.finish()
    writer.abort()
    return files, files.all_files()[PATH]


def _read(files: RecordingFiles) -> list[Record]:
    with RecordFile(files, PATH) as file:
        return file.read()


def _mixed() -> list[Record]:
    return [
        *make_records(3),
        Record(EpisodeId("none"), "s"),
        Record(EpisodeId("empty"), "s", payloads={"a": raw(b"", "x/y"), "b": raw(b"", "x/z")}),
        Record(EpisodeId("large"), "s", payloads={"a": raw(b"\x00" * 1000, "x/y"), "b": encode(1)}),
        Record(EpisodeId("large"), "s", owner="é", revision=0, fields={"f": None, "t": True, "x": 0.1, "i": -(2**63)}),
        Record(EpisodeId("x" * 256, 2**32 - 2), "s", 2**32 - 1, revision=2**64 - 2, fields={"u": "é", "l": []}),
    ]


@pytest.mark.parametrize("chunk_size", [1, 64, 1 << 20])
def test_records_come_back_as_they_were_written(chunk_size: int) -> None:
    files, data = _write(_mixed(), chunk_size)
    assert _read(files) == _mixed()
    assert _write(_mixed(), chunk_size)[1] == data


@pytest.mark.parametrize("records", [[], [Record(EpisodeId("a"), "s", payloads={"p": raw(b"", "x/y")})]])
def test_a_file_without_any_bytes_of_state_is_fine(records: list[Record]) -> None:
    files, _ = _write(records)
    assert _read(files) == records


@pytest.mark.behaviour("C155")
def test_the_key_order_of_fields_payloads_and_state_is_kept() -> None:
    record = Record(
        EpisodeId("a"),
        "s",
        fields={"z": 1, "a": 2},
        payloads={"z": encode({"z": {"y": 1, "b": 2}, "a": 1}), "a": encode(1)},
    )
    (found,) = _read(_write([record])[0])
    assert list(found.fields) == ["z", "a"]
    assert list(found.payloads) == ["z", "a"]
    state = found.decode("z")
    assert list(state) == ["z", "a"]
    assert list(state["z"]) == ["y", "b"]


@pytest.mark.parametrize(
    "record",
    [
        Record(EpisodeId("a"), ""),
        Record(EpisodeId("a"), "s" * 257),
        Record(EpisodeId("a"), "s", 0),
        Record(EpisodeId("a"), "s", revision=-1),
        Record(EpisodeId("a"), "s", owner="\ud800"),
        Record(EpisodeId("a"), "s", fields={"x": float("nan")}),
        Record(EpisodeId("a"), "s", fields={"x": 2**64}),
        Record(EpisodeId("a"), "s", fields={"x": {"a": 1}}),  # type: ignore[dict-item]
        Record(EpisodeId("a"), "s", fields={"x": [[1]]}),
        Record(EpisodeId("a"), "s", fields={"x": b"1"}),  # type: ignore[dict-item]
        Record(EpisodeId("a"), "s", fields={1: 1}),  # type: ignore[dict-item]
        Record(EpisodeId("a"), "s", fields={"x": "y" * 65536}),
        Record(EpisodeId("a"), "s", payloads={"p": Payload(Codec.RAW, bytearray(b"x"))}),  # type: ignore[arg-type]
        Record(EpisodeId("a"), "s", payloads={"p": Payload(7, b"x")}),  # type: ignore[arg-type]
        Record(EpisodeId("a"), "s", payloads={"p": Payload(Codec.RAW, b"x", "c" * 257)}),
        Record(EpisodeId("a"), "s", payloads={"p": Payload(Codec.MSGPACK, b"\xc0", "\ud800")}),
    ],
)
def test_a_record_that_cannot_be_kept_is_refused_naming_its_episode(record: Record) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _write([record])
    assert caught.value.episodes == (EpisodeId("a"),)


# ---- damage


def _reads_right_or_fails_typed(files: RecordingFiles, data: bytes, wanted: list[Record]) -> bool:
    files.damage(PATH, data)
    try:
        assert _read(files) == wanted
    except StateCorrupt as error:
        return PATH not in error.message
    return True


def test_every_flipped_byte_is_noticed() -> None:
    records = _mixed()[1:5]
    files, data = _write(records)
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            bad = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            assert not _reads_right_or_fails_typed(files, bad, records), at
    assert _reads_right_or_fails_typed(files, data, records)


@pytest.mark.behaviour("C160")
@pytest.mark.parametrize("at", [*range(HEADER_SIZE), *range(-FOOTER_SIZE, 0)])
def test_no_byte_of_header_and_footer_can_be_another(at: int) -> None:
    """Whatever it is: a header of another readable version is not what was written either."""
    files, data = _write(make_records(1))
    for other in set(range(256)) - {data[at]}:
        changed = bytearray(data)
        changed[at] = other
        files.damage(PATH, bytes(changed))
        with pytest.raises(StateCorrupt, match=PATH):
            _read(files)


def test_every_truncation_and_extension_is_noticed() -> None:
    records = make_records(2)
    files, data = _write(records)
    for size in range(len(data)):
        assert not _reads_right_or_fails_typed(files, data[:size], records)
    for tail in (b"\x00", data[-FOOTER_SIZE:], data):
        assert not _reads_right_or_fails_typed(files, data + tail, records)
    for head in (b"\x00", data[:HEADER_SIZE]):
        assert not _reads_right_or_fails_typed(files, head + data, records)


@pytest.mark.behaviour("C160")
def test_a_damaged_payload_names_file_and_episode_and_harms_no_other() -> None:
    records = make_records(4)
    files, data = _write(records, chunk_size=1 << 20)
    victim = records[2].payloads["state"].data
    at = data.index(victim)
    files.damage(PATH, data[: at + 3] + b"\xff" + data[at + 4 :])
    with RecordFile(files, PATH) as file:
        with pytest.raises(StateCorrupt) as caught:
            file.read()
        assert caught.value.episodes == (records[2].episode,)
        with pytest.raises(StateCorrupt) as caught:
            file.read({records[2].episode})
        assert caught.value.episodes == (records[2].episode,)
        assert "state" in caught.value.message
        assert file.read({records[1].episode, records[3].episode}) == [records[1], records[3]]
        assert [(each.episode, each.payload) for each in file.check_payloads()] == [(records[2].episode, "state")]


def _set(column: str, at: int, value: object) -> Callable[[storage_pb2.RecordsIndex], object]:
    def change(index: storage_pb2.RecordsIndex) -> None:
        group, _, name = column.partition(".")
        getattr(getattr(index, group), name)[at] = value

    return change


def _without_last(index: storage_pb2.RecordsIndex) -> None:
    """The last record says that it has no payload, so that the last chunk is nobody's."""
    index.records.payload_counts[-1] = 0
    kept = index.payloads
    for column in (kept.names, kept.chunks, kept.offsets, kept.lengths, kept.codecs, kept.content_types):
        del column[-2:]
    kept.digests = kept.digests[:-64]


def _changes() -> Iterator[tuple[str, Callable[[storage_pb2.RecordsIndex], object]]]:
    big = 2**63
    yield "version", lambda index: setattr(index, "format_version", 3)
    yield "no version", lambda index: index.ClearField("format_version")
    yield "chunk beyond", lambda index: setattr(index.chunks[0], "offset", big)
    yield "chunk length", lambda index: setattr(index.chunks[0], "stored_length", big)
    yield "chunk raw length", lambda index: setattr(index.chunks[0], "raw_length", big)
    yield "compression", lambda index: setattr(index.chunks[0], "compression", storage_pb2.COMPRESSION_ZSTD)
    yield "unknown compression", lambda index: setattr(index.chunks[0], "compression", 77)
    yield "no chunk digest", lambda index: setattr(index.chunks[0], "digest", b"")
    yield "chunk not filled", lambda index: index.payloads.lengths.__setitem__(-1, index.payloads.lengths[-1] - 1)
    yield "chunk of nobody", lambda index: _without_last(index)
    yield "a million entries", lambda index: index.schemas.extend([storage_pb2.RecordSchema()] * 100_000)
    yield "name twice", lambda index: index.names.append(index.names[0])
    yield "schema twice", lambda index: index.schemas.append(index.schemas[0])
    yield "content type twice", lambda index: index.content_types.append(index.content_types[0])
    yield "long name", lambda index: index.names.append("n" * 257)
    yield "large fields", _set("records.fields", 1, b'{"a":"' + b"x" * 65536 + b'"}')
    yield "base of nobody", lambda index: index.base_files.add(checkpoint_id="b", root_digest=b"d" * 32, size=1000)
    yield "chunk twice", lambda index: index.chunks.append(index.chunks[0])
    yield "no chunks", lambda index: index.ClearField("chunks")
    yield "no records", lambda index: index.ClearField("records")
    yield "no payloads", lambda index: index.ClearField("payloads")
    yield "no names", lambda index: index.ClearField("names")
    yield "no schemas", lambda index: index.ClearField("schemas")
    yield "no content types", lambda index: index.ClearField("content_types")
    yield "schema version", lambda index: setattr(index.schemas[0], "version", 0)
    yield "schema name", lambda index: setattr(index.schemas[0], "name", "")
    yield "short column", lambda index: index.records.owners.pop()
    yield "short payload column", lambda index: index.payloads.codecs.pop()
    yield "short digests", lambda index: setattr(index.payloads, "digests", index.payloads.digests[:-1])
    for column, value in {
        "records.rollout_ids": "../x",
        "records.attempts": 2**32 - 1,
        "records.schemas": 9,
        "records.owners": 99,
        "records.payload_counts": 2**31,
        "records.fields": b"[1]",
        "payloads.names": 99,
        "payloads.chunks": 99,
        "payloads.offsets": 1,
        "payloads.lengths": big,
        "payloads.codecs": 9,
        "payloads.content_types": 99,
    }.items():
        yield column, _set(column, 1, value)
    yield "fields no JSON", _set("records.fields", 1, b"{")
    yield "payload of another chunk again", _set("payloads.chunks", 3, 0)


@pytest.mark.parametrize(("name", "change"), list(_changes()), ids=[name for name, _ in _changes()])
def test_an_index_that_lies_is_refused_before_anything_is_taken_from_it(
    name: str, change: Callable[[storage_pb2.RecordsIndex], object]
) -> None:
    files, data = _write(make_records(4))
    data = reindexed(data, change)
    files.damage(PATH, data)
    with pytest.raises(StateCorrupt, match=r"records-x\.gck"):
        _read(files)
    assert sum(length for _, _, length in files.reads) <= 3 * len(data)


def test_one_run_of_bytes_cannot_stand_for_many_payloads() -> None:
    files, data = _write(make_records(4), chunk_size=1 << 20)

    def overlap(index: storage_pb2.RecordsIndex) -> None:
        for at in range(len(index.payloads.offsets)):
            index.payloads.offsets[at] = 0

    files.damage(PATH, reindexed(data, overlap))
    with pytest.raises(StateCorrupt, match="outside of its place"):
        _read(files)


def test_two_payloads_of_one_name_are_refused() -> None:
    files, data = _write(make_records(1))
    files.damage(PATH, reindexed(data, lambda index: _set("payloads.names", 1, index.payloads.names[0])(index)))
    with pytest.raises(StateCorrupt, match="one payload name twice"):
        _read(files)


# ---- reading a part of it


@pytest.mark.behaviour("C161", "C181")
def test_reading_ten_of_ten_thousand_reads_little_more_than_the_ten() -> None:
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    records = [
        Record(EpisodeId(f"r{number}"), "s", payloads={"p": raw(bytes([number % 251]) * 2000, "x/y")})
        for number in range(10_000)
    ]
    info = write(files, root, "ck", records=records, chunk_size=4 << 20)
    wanted = [EpisodeId(f"r{number}") for number in range(7, 10_000, 1_000)]
    index = info.bytes - 10_000 * 2000

    def read(episodes: list[EpisodeId]) -> int:
        part = read_part(files, root.location("ck"), AGENT.place, checkpoint_id="ck", scope=EpisodeScope.of(episodes))
        assert [record.episode for record in part.records] == episodes
        assert [record.payloads["p"].data for record in part.records] == [
            bytes([int(episode.rollout_id[1:]) % 251]) * 2000 for episode in episodes
        ]
        assert part.total_count == 10_000
        return part.bytes_read

    assert read([]) <= index
    assert read(wanted) <= index + 10 * 2000
    assert read(wanted[:1]) <= index + 2000


@pytest.mark.behaviour("C161")
def test_a_restore_scope_selects_its_sources() -> None:
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    records = make_records(6)
    write(files, root, "ck", records=records)
    scope = RestoreScope.plan([records[4].episode, records[1].episode])
    part = read_part(files, root.location("ck"), AGENT.place, checkpoint_id="ck", scope=scope)
    assert list(part.records) == [records[1], records[4]]
    assert part.total_count == 6


@pytest.mark.behaviour("C160")
def test_a_payload_that_cannot_be_decoded_names_file_record_and_episode() -> None:
    record = Record(EpisodeId("a", 1), "s", payloads={"p": Payload(Codec.MSGPACK, b"\xc1")})
    (found,) = _read(_write([Record(EpisodeId("b"), "s"), record])[0])[1:]
    with pytest.raises(StateCorrupt) as caught:
        found.decode("p")
    assert caught.value.episodes == (EpisodeId("a", 1),)
    for text in (PATH, "record 1", "a-a1", "'p'"):
        assert text in caught.value.message
    with pytest.raises(StateCorrupt, match="has no 'q'"):
        found.decode("q")


def test_the_writer_runs_ahead_of_the_file_by_a_few_chunks_and_ends_with_its_thread() -> None:
    files = RecordingFiles()
    ahead = threading.Event()
    handed_over = 0
    leads: list[int] = []

    class _Watching:
        def __init__(self) -> None:
            self.sink = files.create(PATH)

        def write(self, data: bytes | bytearray | memoryview) -> None:
            if len(data) == 10:
                assert ahead.wait(10)
                leads.append(handed_over - len(leads))
            self.sink.write(data)

        def begin_sync(self) -> None: ...
        def sync(self) -> None: ...
        def close(self) -> None: ...

    def progress(records: int, size: int) -> None:
        nonlocal handed_over
        handed_over = size // 10
        if handed_over == 2:
            ahead.set()

    writer = RecordFileWriter(_Watching(), chunk_size=10, progress=progress)
    for number in range(20):
        writer.add([Record(EpisodeId(f"r{number}"), "s", payloads={"p": raw(b"x" * 10, "x/y")})])
    writer.finish()
    writer.abort()
    assert len(leads) == 20
    assert max(leads) <= 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gymckpt-records")]
    assert len(_read(files)) == 20
