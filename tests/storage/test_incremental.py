"""Incremental checkpoints: what an earlier one has is pointed at, each byte of it once, and read back the same."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    PartManifest,
    PartManifestInfo,
    Payload,
    Record,
    StopFlag,
    WriteStopped,
    encode,
    raw,
    read_manifest,
    read_part,
    write_part,
)
from gym_ckpt_grpc.storage import payloads as payloads_module
from gym_ckpt_grpc.storage.record_index import ChunkPlace, RecordIndex
from gym_ckpt_grpc.storage.record_reader import RecordFile
from tests.golden.scenes import CHECKPOINT, FORMATS, LATER, PLACE
from tests.storage.builders import AGENT, COUNTER, make_records, write
from tests.storage.recording_files import ROOT, RecordingFiles


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles()


@pytest.fixture
def root(files: RecordingFiles) -> CheckpointRoot:
    return CheckpointRoot(ROOT, files)


def _records(*texts: str, turn: int = 0) -> list[Record]:
    """A record for each text, with a payload of it; what is equal in two calls is equal in its bytes."""
    return [
        Record(EpisodeId(f"r{at}"), "s", fields={"turn": turn}, payloads={"p": raw(text.encode(), "text/plain")})
        for at, text in enumerate(texts)
    ]


def _write(root: CheckpointRoot, name: str, records: list[Record], base: str = "", **more: Any) -> PartManifestInfo:
    return write(root.files, root, name, records=records, base=root.location(base) if base else None, **more)


def _read(root: CheckpointRoot, name: str) -> list[Record]:
    return list(read_part(root.files, root.location(name), AGENT.place, checkpoint_id=name).records)


def _manifest(root: CheckpointRoot, name: str) -> PartManifest:
    location = root.location(name)
    return read_manifest(root.files, location.part(AGENT.place), AGENT.place, checkpoint_id=name)[0]


def _index(root: CheckpointRoot, name: str) -> RecordIndex:
    path = root.location(name).part_file(AGENT.place, _manifest(root, name).records_file.name)
    with RecordFile(root.files, path) as file:
        return file.index


def _stored(root: CheckpointRoot, place: ChunkPlace) -> bytes:
    assert place.base is not None
    name = f"records-{place.base.root_digest}.gck"
    source = root.files.open(root.location(place.base.checkpoint_id).part_file(AGENT.place, name))
    assert source.size == place.base.size
    return source.read(place.offset, place.stored_length)


def _part_files(files: RecordingFiles, root: CheckpointRoot, name: str) -> dict[str, bytes]:
    directory = root.location(name).part(AGENT.place).directory + "/"
    return {path.removeprefix(directory): data for path, data in files.all_files().items() if directory in path}


@pytest.mark.behaviour("C183")
def test_what_the_base_has_is_pointed_at_and_only_the_rest_is_written(
    files: RecordingFiles, root: CheckpointRoot
) -> None:
    old = _records("a" * 50, "b" * 50, "c" * 50)
    new = _records("a" * 50, "B" * 50, "c" * 50, "d" * 50, turn=1)
    full = _write(root, "one", old)
    info = _write(root, "two", new, "one")
    own, base, *rest = info.files
    assert (own.checkpoint, base.checkpoint, rest) == ("", "one", [])
    assert (base.name, base.size, base.digest) == (full.files[0].name, full.files[0].size, full.files[0].digest)
    assert (info.chain, info.state_bytes, info.bytes) == (1, 200, own.size)
    manifest = _manifest(root, "two")
    assert (manifest.own_files, manifest.base_files, manifest.chain) == ((own,), (base,), 1)
    data = _part_files(files, root, "two")[own.name]
    assert [text in data for text in (b"a" * 50, b"B" * 50, b"c" * 50, b"d" * 50)] == [False, True, False, True]
    for place in _index(root, "two").chunks[2:]:
        assert hashlib.sha256(_stored(root, place)).digest() == place.digest
    assert _read(root, "two") == new
    assert _read(root, "one") == old


@pytest.mark.behaviour("C183")
def test_the_same_records_with_the_same_base_give_the_same_bytes_and_may_be_written_again(
    files: RecordingFiles, root: CheckpointRoot
) -> None:
    twins = CheckpointRoot(ROOT, RecordingFiles())
    for each in (root, twins):
        _write(each, "one", make_records(6))
    new = [*make_records(6)[::2], *make_records(6, turn=1)[1::2]]
    info = _write(root, "two", new, "one")
    assert _write(twins, "two", new, "one") == info
    before = _part_files(files, root, "two")
    assert _part_files(twins.files, twins, "two") == before  # type: ignore[arg-type]
    assert _write(root, "two", new, "one") == info
    assert _part_files(files, root, "two") == before
    assert sorted(before) == sorted(["manifest.json", info.files[0].name])


@pytest.mark.behaviour("C183")
def test_a_chain_points_at_the_files_that_have_the_bytes_and_at_no_other(root: CheckpointRoot) -> None:
    _write(root, "one", _records("a" * 40, "b" * 40, "c" * 40))
    _write(root, "two", _records("a" * 40, "B" * 40, "c" * 40), "one")
    _write(root, "three", _records("a" * 40, "B" * 40, "C" * 40), "two")
    info = _write(root, "four", _records("a" * 40, "B" * 40, "C" * 40), "three")
    assert info.chain == 3
    assert [entry.checkpoint for entry in info.files] == ["", "one", "two", "three"]
    places = _index(root, "four").chunks
    assert [_stored(root, place)[:1] for place in places] == [b"a", b"B", b"C"]
    assert _read(root, "four") == _records("a" * 40, "B" * 40, "C" * 40)


def test_a_chain_ends_where_nothing_is_pointed_at(root: CheckpointRoot) -> None:
    _write(root, "one", _records("a"))
    _write(root, "two", _records("a"), "one")
    info = _write(root, "three", _records("x"), "two")
    assert (info.chain, [entry.checkpoint for entry in info.files]) == (0, [""])


def test_each_place_is_given_away_once(root: CheckpointRoot) -> None:
    _write(root, "one", _records("x" * 30, "y" * 30, "x" * 30))
    new = _records(*["x" * 30] * 4)
    info = _write(root, "two", new, "one")
    index = _index(root, "two")
    places = set(zip(index.chunk_of, index.offsets, strict=True))
    assert len(places) == 4
    assert [chunk < index.own_chunks for chunk in index.chunk_of] == [False, False, True, True]
    assert _read(root, "two") == new
    assert info.state_bytes == 120


def test_nothing_and_other_kinds_of_the_same_bytes_come_back_as_they_were(root: CheckpointRoot) -> None:
    _write(root, "one", [Record(EpisodeId("a"), "s", payloads={"p": raw(b"", "x/y"), "q": raw(b"\x01", "x/y")})])
    new = [
        Record(EpisodeId("b"), "t", payloads={"p": raw(b"", "x/z")}),
        Record(EpisodeId("c"), "t", payloads={"other": encode(1)}),
    ]
    info = _write(root, "two", new, "one")
    assert info.chain == 1
    assert _index(root, "two").own_chunks == 1  # nothing is pointed at for no bytes
    assert _read(root, "two") == new


@pytest.mark.behaviour("C183")
def test_what_did_not_change_is_neither_digested_nor_copied(
    files: RecordingFiles, root: CheckpointRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = _records(*(f"{number}" * 30_000 for number in range(40)))
    _write(root, "one", records, chunk_size=1 << 20)
    for payload in (payload for record in records for payload in record.payloads.values()):
        payload.digest()  # as who encodes ahead does
    again = [*records[:-1], *_records(*["x"] * 40)[-1:]]
    digested: list[int] = []
    real = hashlib.sha256

    def counted(data: bytes) -> Any:
        digested.append(len(data))
        return real(data)

    monkeypatch.setattr(hashlib, "sha256", counted)
    start = len(files.steps)
    _write(root, "two", again, "one", chunk_size=1 << 20)
    monkeypatch.undo()
    written = sum(len(step.data) for step in files.steps[start:] if step.kind == "write")
    assert written < 20_000
    assert max(digested) < 10_000  # the indexes and manifests
    assert _read(root, "two") == again


# ---- bases that are none


@pytest.mark.behaviour("C183")
def test_a_base_without_a_part_of_this_participant_gives_a_full_one(
    root: CheckpointRoot, caplog: pytest.LogCaptureFixture
) -> None:
    write(root.files, root, "one", identity=COUNTER)
    info = _write(root, "two", make_records(), "one")
    assert (info.chain, len(info.files)) == (0, 1)
    assert not caplog.records
    assert _read(root, "two") == make_records()


def _spoilt(files: RecordingFiles, path: str, how: str) -> None:
    data = files.all_files()[path]
    if how == "gone":
        files.remove(path)
    elif how == "empty":
        files.damage(path, b"")
    elif how == "cut":
        files.damage(path, data[:-9])
    else:
        files.damage(path, data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])


@pytest.mark.behaviour("C183")
@pytest.mark.parametrize("what", ["records", "manifest"])
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "flipped"])
def test_a_base_that_cannot_be_read_gives_a_full_part_and_a_warning(
    files: RecordingFiles, root: CheckpointRoot, caplog: pytest.LogCaptureFixture, what: str, how: str
) -> None:
    full = _write(root, "full", make_records())
    info = _write(root, "one", make_records())
    part = root.location("one").part(AGENT.place)
    _spoilt(files, part.manifest if what == "manifest" else part.file(info.files[0].name), how)
    with caplog.at_level(logging.WARNING):
        two = _write(root, "two", make_records(), "one")
    assert (two.files, two.chain) == (full.files, 0)
    assert _read(root, "two") == make_records()
    if (what, how) != ("manifest", "gone"):
        assert "checkpoint one is no base" in caplog.text
    with pytest.raises((StateCorrupt, StateNotFound)):
        _read(root, "one")


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "other"])
def test_what_a_base_has_in_a_lost_file_is_written_again_and_the_rest_is_not(
    files: RecordingFiles, root: CheckpointRoot, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    one = _write(root, "one", _records("a" * 50, "b" * 50))
    other = _write(root, "other", _records("A" * 50, "b" * 50))
    two = _write(root, "two", _records("a" * 50, "B" * 50), "one")
    path = root.location("one").part_file(AGENT.place, one.files[0].name)
    if how == "other":
        files.damage(path, files.all_files()[root.location("other").part_file(AGENT.place, other.files[0].name)])
    else:
        _spoilt(files, path, how)
    new = _records("a" * 50, "B" * 50)
    with caplog.at_level(logging.WARNING):
        three = _write(root, "three", new, "two")
    assert one.files[0].name in caplog.text
    assert [entry.checkpoint for entry in three.files] == ["", "two"]
    assert three.files[1].name == two.files[0].name
    assert _read(root, "three") == new


@pytest.mark.behaviour("C156", "C173")
@pytest.mark.parametrize("whose", ["the base's own", "an earlier one"])
@pytest.mark.parametrize("first", [True, False], ids=["unreadable first", "unreadable then"])
def test_a_repeated_write_is_compared_in_the_form_of_the_first(
    files: RecordingFiles, root: CheckpointRoot, whose: str, first: bool
) -> None:
    """A base may be readable at one try and not at the other; neither makes it another commit."""
    one = _write(root, "one", _records("a" * 50, "b" * 50))
    two = _write(root, "two", _records("a" * 50, "B" * 50), "one")
    name, info = ("two", two) if whose == "the base's own" else ("one", one)
    path = root.location(name).part_file(AGENT.place, info.files[0].name)
    data = files.all_files()[path]
    new = _records("a" * 50, "B" * 50, "c" * 50)
    if first:
        files.damage(path, b"")
    written = _write(root, "three", new, "two")
    before = _part_files(files, root, "three")
    files.damage(path, data if first else b"")
    if not first:
        with pytest.raises(StateUnwritable, match="two cannot be read now"):
            _write(root, "three", new, "two")
        files.damage(path, data)
    assert _write(root, "three", new, "two") == written
    assert _part_files(files, root, "three") == before
    assert _read(root, "three") == new


@pytest.mark.parametrize("case", ["itself", "another root", "the id that is being written"])
def test_what_can_be_no_base_is_refused_by_name_and_nothing_is_made(
    files: RecordingFiles, root: CheckpointRoot, case: str
) -> None:
    base = {
        "itself": root.location("ck"),
        "another root": CheckpointRoot("/elsewhere", files).location("one"),
        "the id that is being written": root.location("written"),
    }[case]
    checkpoint_id = "written" if case == "the id that is being written" else "ck"
    with pytest.raises(InvalidArgument, match="base_checkpoint_uri") as caught:
        write_part(files, root.location("ck"), AGENT, checkpoint_id=checkpoint_id, records=make_records(), base=base)
    assert [violation.field for violation in caught.value.violations] == ["base_checkpoint_uri"]
    assert files.steps == []


@pytest.mark.behaviour("C183")
@pytest.mark.parametrize("fixture", [path.name for path in FORMATS])
def test_a_checkpoint_of_every_format_can_be_a_base(fixture: str, tmp_path: Path) -> None:
    source = next(path for path in FORMATS if path.name == fixture) / "values" / "root"
    shutil.copytree(source, tmp_path / "root")
    root = CheckpointRoot(str(tmp_path / "root"))
    identity = ParticipantIdentity(*PLACE, incarnation_id="new")
    newest = CHECKPOINT if fixture == "format-1" else LATER
    base = root.location(newest)
    found = read_part(root.files, base, PLACE, checkpoint_id=newest)
    info = write(root.files, root, "new", identity=identity, records=found.records, base=base)
    assert info.chain == found.manifest.chain + 1
    assert {entry.checkpoint for entry in info.files[1:]} == {newest, CHECKPOINT}
    with RecordFile(root.files, root.location("new").part_file(PLACE, info.files[0].name)) as file:
        assert file.index.own_chunks == 0
    part = read_part(root.files, root.location("new"), PLACE, checkpoint_id="new")
    assert list(part.records) == list(found.records)


# ---- as any other write


@pytest.mark.behaviour("C177")
def test_a_write_that_only_points_is_stopped_like_any_other(files: RecordingFiles, root: CheckpointRoot) -> None:
    records = _records(*(f"{number}" * 40 for number in range(60)))
    _write(root, "one", records)
    stop = StopFlag()
    taken = 0

    def stopping() -> Any:
        nonlocal taken
        for record in records:
            taken += 1
            if taken == 10:
                assert stop.stop()
            yield record

    with pytest.raises(WriteStopped):
        write(files, root, "two", records=stopping(), base=root.location("one"), stop=stop)
    assert taken < 20
    assert _part_files(files, root, "two") == {}


def test_progress_counts_what_is_pointed_at(root: CheckpointRoot) -> None:
    records = _records(*(f"{number}" * 40 for number in range(20)))
    _write(root, "one", records)
    seen: list[tuple[int, int]] = []
    _write(root, "two", records, "one", progress=lambda *done: seen.append(done))
    assert seen == sorted(seen)
    assert len(seen) > 5
    assert seen[-1] == (20, sum(len(record.payloads["p"].data) for record in records))


_PAYLOADS = st.binary(max_size=12).map(lambda data: Payload(payloads_module.Codec.RAW, data, "x/y"))


@pytest.mark.behaviour("C183")
@pytest.mark.timeout(300)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.lists(st.lists(_PAYLOADS, max_size=3), max_size=8),
            st.integers(0, 6),
            st.sampled_from([1, 16, 64, 1 << 20]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_the_history_each_checkpoint_comes_back(
    history: list[tuple[list[list[Payload]], int, int, bool]],
) -> None:
    root = CheckpointRoot(ROOT, RecordingFiles())
    written: list[tuple[str, list[Record]]] = []
    for step, (states, back, chunk_size, compress) in enumerate(history):
        records = [
            Record(EpisodeId(f"r{at}"), "s", payloads={f"p{number}": each for number, each in enumerate(payloads)})
            for at, payloads in enumerate(states)
        ]
        base = written[-back][0] if 0 < back <= len(written) else ""
        info = _write(root, f"ck{step}", records, base, chunk_size=chunk_size, compress=compress)
        chain = _manifest(root, base).chain + 1 if base else 0
        assert info.chain in (0, chain)
        assert info.state_bytes == sum(len(each.data) for payloads in states for each in payloads)
        written.append((f"ck{step}", records))
    for name, records in written:
        assert _read(root, name) == records
