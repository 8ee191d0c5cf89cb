"""A participant's part: idempotent, exclusive, stoppable, and checked when it is read."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import CheckpointConflict, StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    LocalFiles,
    Part,
    Record,
    StopFlag,
    WriteStopped,
    read_part,
)
from gym_ckpt_grpc.storage.names import is_temporary
from tests.storage.builders import AGENT, COUNTER, make_records, write
from tests.storage.recording_files import ROOT, Fault, Loss, RecordingFiles, Step


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles()


@pytest.fixture
def root(files: RecordingFiles) -> CheckpointRoot:
    return CheckpointRoot(ROOT, files)


def _part_files(files: RecordingFiles, root: CheckpointRoot) -> dict[str, bytes]:
    directory = root.location("ck").part(AGENT.place).directory + "/"
    return {
        path.removeprefix(directory): data for path, data in files.all_files().items() if path.startswith(directory)
    }


def _read(files: RecordingFiles, root: CheckpointRoot, **more: Any) -> Part:
    return read_part(files, root.location("ck"), AGENT.place, **{"checkpoint_id": "ck", **more})


def test_a_part_comes_back_whole(files: RecordingFiles, root: CheckpointRoot) -> None:
    seen: list[tuple[int, int]] = []
    info = write(
        files, root, "ck", restarts=3, extra={"queue": [1, None, 0.5, {"z": 1, "a": "é"}]},
        documents={"staging keys": {"roll-0": ["k1", "k2"]}}, progress=lambda *done: seen.append(done),
    )  # fmt: skip
    part = _read(files, root, expected_digest=info.manifest_digest)
    assert list(part.records) == make_records()
    assert part.manifest.extra == {"queue": [1, None, 0.5, {"z": 1, "a": "é"}]}
    assert part.documents == {"staging keys": {"roll-0": ["k1", "k2"]}}
    assert (part.manifest.records, part.manifest.restarts, part.total_count) == (4, 3, 4)
    assert part.manifest_digest == info.manifest_digest
    assert info.bytes == part.manifest.bytes == sum(entry.size for entry in info.files)
    assert info.episodes == tuple(record.episode for record in make_records())
    assert info.manifest_name == "participants/agent/office/0/manifest.json"
    assert seen == sorted(seen)
    assert seen[-1][0] == 4


@pytest.mark.behaviour("C156", "C159")
def test_the_same_write_again_gives_the_same_part_and_no_other_file(
    files: RecordingFiles, root: CheckpointRoot
) -> None:
    info = write(files, root, "ck")
    before = _part_files(files, root)
    assert write(files, root, "ck") == info
    assert _part_files(files, root) == before
    assert sorted(before) == ["manifest.json", f"records-{info.files[0].digest}.gck"]


@pytest.mark.behaviour("C157", "C158")
@pytest.mark.parametrize("case", ["records", "restarts", "extra", "incarnation", "fewer"])
def test_other_content_for_the_same_place_is_refused(files: RecordingFiles, root: CheckpointRoot, case: str) -> None:
    write(files, root, "ck")
    before = _part_files(files, root)
    cases: dict[str, dict[str, Any]] = {
        "records": {"records": make_records(turn=1)},
        "restarts": {"restarts": 1},
        "extra": {"extra": {"a": 1}},
        "incarnation": {"identity": ParticipantIdentity(*AGENT.place, incarnation_id="inc-other")},
        "fewer": {"records": make_records(3)},
    }
    with pytest.raises(CheckpointConflict, match="belongs to another commit") as caught:
        write(files, root, "ck", **cases[case])
    assert caught.value.participant == "agent/office/0"
    assert _part_files(files, root) == before


@pytest.mark.behaviour("C157")
def test_another_checkpoint_in_the_same_place_is_refused(files: RecordingFiles, root: CheckpointRoot) -> None:
    from gym_ckpt_grpc.storage import write_part

    write(files, root, "ck")
    before = _part_files(files, root)
    with pytest.raises(CheckpointConflict, match="belongs to another commit"):
        write_part(files, root.location("ck"), AGENT, checkpoint_id="other", records=make_records())
    assert _part_files(files, root) == before


@pytest.mark.behaviour("C158")
@pytest.mark.parametrize("kind", ["rename", "link"])
@pytest.mark.parametrize("same", [True, False], ids=["equal", "different"])
def test_of_two_writers_the_loser_changes_nothing_and_leaves_nothing(
    files: RecordingFiles, root: CheckpointRoot, same: bool, kind: str
) -> None:
    """The other writer publishes just before this one's records are named, or its manifest."""
    winner: dict[str, bytes] = {}

    def race(step: Step) -> None:
        if step.kind == kind and not winner:
            winner["began"] = b""
            write(files, root, "ck", records=make_records(turn=0 if same else 1))
            winner.clear()
            winner.update(_part_files(files, root))

    files.before = race
    if same:
        try:
            write(files, root, "ck")
        except StateUnwritable:  # the winner took our temporary file for a stray
            write(files, root, "ck")
    else:
        with pytest.raises(CheckpointConflict, match="belongs to another commit"):
            write(files, root, "ck")
    left = _part_files(files, root)
    assert left == {name: data for name, data in winner.items() if not is_temporary(name)}
    assert len(left) == 2


@pytest.mark.behaviour("C179")
def test_an_equal_manifest_already_there_is_synced_before_it_is_accepted(
    files: RecordingFiles, root: CheckpointRoot
) -> None:
    start = len(files.steps)
    write(files, root, "ck")
    named = next(at for at in range(start, len(files.steps)) if files.steps[at].kind == "link")
    image = files.image(named + 1, Loss.CRASH)  # manifest named; its directory and parents not known to be synced
    again = CheckpointRoot(ROOT, image)
    write(image, again, "ck")
    lost = image.image(len(image.steps), Loss.POWER)
    assert list(_read(lost, CheckpointRoot(ROOT, lost)).records) == make_records()
    synced = {step.path for step in image.steps if step.kind in ("fsync", "sync_dir")}
    part = again.location("ck").part(AGENT.place)
    assert {part.manifest, part.directory, ROOT} <= synced


@pytest.mark.behaviour("C175", "C178")
def test_the_manifest_is_named_last_and_every_parent_directory_is_synced(
    files: RecordingFiles, root: CheckpointRoot
) -> None:
    write(files, root, "ck")
    steps = [step for step in files.steps if step.kind != "failed"]
    link = next(at for at, step in enumerate(steps) if step.kind == "link")
    rename = next(at for at, step in enumerate(steps) if step.kind == "rename")
    assert rename < link
    assert not [step for step in steps[link + 1 :] if step.kind in ("write", "rename", "link", "create")]
    for at, step in enumerate(steps):
        if step.kind in ("rename", "link"):  # flushed and synced before it was named
            inode = next(made.inode for made in steps if made.kind == "create" and made.path == step.path)
            of_file = [earlier.kind for earlier in steps[:at] if earlier.inode == inode]
            assert of_file[-1] == "fsync"
    after = {step.path for step in steps[link:] if step.kind == "sync_dir"}
    directory = root.location("ck").part(AGENT.place).directory
    while directory != "/":
        assert directory in after
        directory = os.path.dirname(directory)


class _Interrupted(Exception):
    pass


@pytest.mark.behaviour("C173")
def test_when_the_records_themselves_fail_no_file_is_left(files: RecordingFiles, root: CheckpointRoot) -> None:
    def failing() -> Iterator[Record]:
        yield from make_records(3)
        raise _Interrupted

    with pytest.raises(_Interrupted):
        write(files, root, "ck", records=failing())
    assert _part_files(files, root) == {}
    write(files, root, "ck")


# ---- stopping


@pytest.mark.behaviour("C177")
def test_a_writer_stopped_at_any_moment_before_publication_leaves_no_file() -> None:
    probe = RecordingFiles()
    write(probe, CheckpointRoot(ROOT, probe), "ck")
    first_name = next(at for at, step in enumerate(probe.steps) if step.kind == "rename")
    for moment in range(first_name):
        files, stop = RecordingFiles(), StopFlag()
        root = CheckpointRoot(ROOT, files)

        def at_moment(step: Step, files: RecordingFiles = files, stop: StopFlag = stop, moment: int = moment) -> None:
            if len(files.steps) == moment:
                assert stop.stop(timeout=10)

        files.before = at_moment
        with pytest.raises(WriteStopped):
            write(files, root, "ck", stop=stop)
        assert _part_files(files, root) == {}
        assert stop.stopped


@pytest.mark.behaviour("C177")
def test_a_write_that_was_stopped_before_it_began_makes_nothing(files: RecordingFiles, root: CheckpointRoot) -> None:
    stop = StopFlag()
    assert stop.stop()
    with pytest.raises(WriteStopped):
        write(files, root, "ck", stop=stop)
    assert files.steps == []


@pytest.mark.behaviour("C176")
def test_stop_waits_for_a_publication_under_way_and_no_longer(files: RecordingFiles, root: CheckpointRoot) -> None:
    inside, go_on, done = threading.Event(), threading.Event(), threading.Event()
    stop = StopFlag()
    waited: list[bool] = []

    def hold(step: Step) -> None:
        if step.kind == "rename" and not inside.is_set():
            inside.set()
            assert go_on.wait(10)

    def stopper() -> None:
        waited.append(stop.stop(timeout=10))
        done.set()

    files.before = hold
    writer = threading.Thread(target=write, args=(files, root, "ck"), kwargs={"stop": stop})
    writer.start()
    assert inside.wait(10)
    assert not stop.stop(timeout=0.01)
    other = threading.Thread(target=stopper)
    other.start()
    assert not done.is_set()
    go_on.set()
    assert done.wait(10)
    writer.join(10)
    other.join(10)
    assert waited == [True]
    assert list(_read(files, root).records) == make_records()  # it had begun: it ends, whole


@pytest.mark.behaviour("C176")
def test_stop_does_not_wait_for_what_is_left_to_write(files: RecordingFiles, root: CheckpointRoot) -> None:
    stop = StopFlag()
    taken = 0

    def endless() -> Iterator[Record]:
        nonlocal taken
        while True:
            for record in make_records():
                taken += 1
                if taken == 10:
                    assert stop.stop(timeout=0)
                yield record

    with pytest.raises(WriteStopped):
        write(files, root, "ck", records=endless(), stop=stop)
    assert taken < 30
    assert _part_files(files, root) == {}


# ---- manifests that are wrong


def _spoil(files: RecordingFiles, root: CheckpointRoot, change: Any) -> str:
    path = root.location("ck").part(AGENT.place).manifest
    document = json.loads(files.all_files()[path])
    change(document)
    files.damage(path, json.dumps(document).encode())
    return path


@pytest.mark.behaviour("C169")
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.clear(),
        lambda m: m.pop("records"),
        lambda m: m.pop("files"),
        lambda m: m.update(files=[]),
        lambda m: m.update(files=m["files"] * 2),
        lambda m: m["files"][0].pop("digest"),
        lambda m: m["files"][0].update(digest=""),
        lambda m: m["files"][0].update(digest="A" * 64),
        lambda m: m["files"][0].update(name="../x"),
        lambda m: m["files"][0].update(name="/etc/passwd"),
        lambda m: m["files"][0].update(name="a/" + m["files"][0]["name"]),
        lambda m: m["files"][0].update(name=""),
        lambda m: m["files"][0].update(name="records-\x00.gck"),
        lambda m: m["files"][0].update(name="records-other.gck"),
        lambda m: m["files"][0].update(role="pickle"),
        lambda m: m["files"][0].update(role="document", label="../x"),
        lambda m: m["files"][0].update(size="10"),
        lambda m: m["files"][0].update(size=-1),
        lambda m: m["files"][0].update(size=10),
        lambda m: m.update(records="4"),
        lambda m: m.update(records=4.5),
        lambda m: m.update(records=-1),
        lambda m: m.update(records=True),
        lambda m: m.update(records=5),
        lambda m: m.update(bytes=1),
        lambda m: m.pop("checkpoint_id"),
        lambda m: m.update(checkpoint_id=""),
        lambda m: m.update(checkpoint_id="other"),
        lambda m: m.pop("participant"),
        lambda m: m["participant"].update(kind="trainer"),
        lambda m: m["participant"].update(service="elsewhere"),
        lambda m: m.update(unknown=1),
        lambda m: m.update(format="gymckpt.checkpoint"),
        lambda m: m.pop("format"),
        lambda m: m.pop("schema_version"),
        lambda m: m.update(extra=[]),
    ],
)
def test_a_manifest_that_is_wrong_is_corrupt_by_name(files: RecordingFiles, root: CheckpointRoot, change: Any) -> None:
    write(files, root, "ck")
    _spoil(files, root, change)
    directory = root.location("ck").part(AGENT.place).directory
    with pytest.raises(StateCorrupt) as caught:
        _read(files, root)
    assert directory in caught.value.message
    assert caught.value.participant == "agent/office/0"
    assert all(path.startswith(directory + "/") for path, _, _ in files.reads)


@pytest.mark.behaviour("C169")
@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\x80\x04.", b"{}", b"NaN", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_no_object_is_corrupt(files: RecordingFiles, root: CheckpointRoot, data: bytes) -> None:
    write(files, root, "ck")
    path = root.location("ck").part(AGENT.place).manifest
    files.damage(path, data)
    with pytest.raises(StateCorrupt, match=r"manifest\.json"):
        _read(files, root)


def test_every_flipped_byte_of_a_manifest_is_noticed_by_its_digest(files: RecordingFiles, root: CheckpointRoot) -> None:
    info = write(files, root, "ck")
    path = root.location("ck").part(AGENT.place).manifest
    data = files.all_files()[path]
    for at in range(len(data)):
        files.damage(path, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StateCorrupt):
            _read(files, root, expected_digest=info.manifest_digest)


@pytest.mark.behaviour("C171")
def test_a_missing_manifest_is_not_found_and_another_version_names_those_readable(
    files: RecordingFiles, root: CheckpointRoot
) -> None:
    with pytest.raises(StateNotFound, match=r"manifest\.json") as missing:
        _read(files, root)
    assert missing.value.participant == "agent/office/0"
    write(files, root, "ck")
    _spoil(files, root, lambda m: m.update(schema_version=3, later=True))
    with pytest.raises(StateCorrupt, match="schema_version 3; readable here: 1, 2"):
        _read(files, root)


@pytest.mark.behaviour("C175")
def test_a_directory_without_a_manifest_is_no_part(files: RecordingFiles, root: CheckpointRoot) -> None:
    write(files, root, "ck")
    files.remove(root.location("ck").part(AGENT.place).manifest)
    with pytest.raises(StateNotFound):
        _read(files, root)


@pytest.mark.parametrize("name", ["records", "document"])
def test_a_named_file_that_is_missing_or_swapped_is_corrupt(
    files: RecordingFiles, root: CheckpointRoot, name: str
) -> None:
    info = write(files, root, "ck", documents={"keys": {"a": 1}})
    write(files, root, "ck", identity=COUNTER, records=make_records(turn=1), documents={"keys": {"a": 2}})
    entry = next(entry for entry in info.files if entry.role == name)
    path = root.location("ck").part(AGENT.place).file(entry.name)
    mine = files.all_files()[path]
    others = [data for other, data in files.all_files().items() if "/counter/" in other and "manifest" not in other]
    for other in [*others, mine[:-1], b""]:
        files.damage(path, other)
        with pytest.raises(StateCorrupt, match=entry.name) as caught:
            _read(files, root)
        assert caught.value.participant == "agent/office/0"
    files.remove(path)
    with pytest.raises(StateCorrupt, match="names"):
        _read(files, root)


def test_swapped_parts_are_noticed(files: RecordingFiles, root: CheckpointRoot) -> None:
    twin = ParticipantIdentity(ParticipantKind.AGENT, "office", "1", incarnation_id="inc-b")
    write(files, root, "ck")
    write(files, root, "ck", identity=twin)
    manifest = files.all_files()[root.location("ck").part(twin.place).manifest]
    files.damage(root.location("ck").part(AGENT.place).manifest, manifest)
    with pytest.raises(StateCorrupt, match="office/1"):
        _read(files, root)


def test_strays_are_never_opened(files: RecordingFiles, root: CheckpointRoot) -> None:
    write(files, root, "ck")
    part = root.location("ck").part(AGENT.place)
    files.put(part.file("records-" + "0" * 64 + ".gck"), b"junk")
    files.put(part.file("other.json"), b"junk")
    assert list(_read(files, root).records) == make_records()
    assert not [path for path, _, _ in files.reads if "0" * 64 in path or "other" in path]


# ---- on a real disk


_KILLED = """
import os, signal, sys
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles
from tests.storage.builders import make_records, write

class Dying(LocalFiles):
    def publish(self, temporary, path):
        os.kill(os.getpid(), signal.SIGKILL)

root = CheckpointRoot(sys.argv[1], Dying())
write(root.files, root, "ck", records=make_records(turn=9))
"""


@pytest.mark.behaviour("C174")
def test_a_writer_killed_before_its_manifest_leaves_no_part_and_the_next_one_no_stray(tmp_path: Path) -> None:
    import gymckpt

    paths = [str(Path(__file__).parents[2]), str(Path(next(iter(gymckpt.__path__))).parent)]
    died = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    root = CheckpointRoot(str(tmp_path))
    directory = Path(root.location("ck").part(AGENT.place).directory)
    assert len(list(directory.iterdir())) == 2  # records under their name, the manifest under a temporary one
    with pytest.raises(StateNotFound):
        read_part(root.files, root.location("ck"), AGENT.place, checkpoint_id="ck")
    info = write(root.files, root, "ck")
    assert sorted(path.name for path in directory.iterdir()) == sorted(["manifest.json", info.files[0].name])
    part = read_part(root.files, root.location("ck"), AGENT.place, checkpoint_id="ck")
    assert list(part.records) == make_records()


@pytest.mark.behaviour("C172")
def test_a_destination_whose_parent_is_a_file_is_unwritable_by_name(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path))
    (tmp_path / "checkpoints").write_bytes(b"")
    with pytest.raises(StateUnwritable, match="checkpoints"):
        write(root.files, root, "ck")


@pytest.mark.behaviour("C173")
def test_a_failed_write_is_repeated_once_there_is_room(files: RecordingFiles, root: CheckpointRoot) -> None:
    files.fault = Fault(20, errno.ENOSPC, for_good=True)
    with pytest.raises(StateUnwritable, match="ENOSPC"):
        write(files, root, "ck")
    files.fault = None
    write(files, root, "ck")
    assert len(_part_files(files, root)) == 2


def test_a_large_part_on_a_real_disk(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path), LocalFiles())
    records = make_records(200, size=20_000)
    info = write(root.files, root, "ck", records=records, chunk_size=1 << 20)
    part = read_part(
        root.files, root.location("ck"), AGENT.place, checkpoint_id="ck", expected_digest=info.manifest_digest
    )
    assert list(part.records) == records
