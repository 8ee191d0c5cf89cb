"""Roots, intents, aggregate manifests, pins, the owner's heartbeat, and verification."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InvalidArgument,
    StateCorrupt,
    StateNotFound,
    StateUnwritable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    AggregateManifest,
    CheckpointRoot,
    EpisodeLists,
    IdentityBlock,
    Intent,
    Level,
    Member,
    OpaqueBlock,
    Owner,
    Pin,
    check_members,
    decode,
    encode,
    read_aggregate,
    read_episodes,
    read_manifest,
    verify_checkpoint,
    write_aggregate,
)
from tests.storage.builders import AGENT, COUNTER, commit, complete, faults, make_records, write
from tests.storage.recording_files import ROOT, Fault, RecordingFiles


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles()


@pytest.fixture
def root(files: RecordingFiles) -> CheckpointRoot:
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    return root


# ---- the aggregate manifest


def test_the_aggregate_manifest_has_every_member_and_reads_back_equal(root: CheckpointRoot) -> None:
    infos = [write(root.files, root, "ck", identity=AGENT, restarts=2), write(root.files, root, "ck", identity=COUNTER)]
    trainer = encode({"step": 2**70, "seed": [float("nan"), (1.5)], "raw": b"\x00"})
    manifest = AggregateManifest(
        checkpoint_id="ck",
        run_id="run",
        controller_id="ctl",
        epoch=1,
        created="2026-01-01T00:00:00Z",
        source_checkpoint="earlier",
        members=tuple(Member.of(who, info) for who, info in zip((AGENT, COUNTER), infos, strict=True)),
        trainer=OpaqueBlock.of(trainer),
        frontier={"delivered": {"count": 3}},
        policy_versions={"policy": "step-7"},
    )
    lists = EpisodeLists(infos[0].episodes, {EpisodeId("late", 2): "straggler"})
    location = root.location("ck")
    written, digest = write_aggregate(root.files, location, manifest, episodes=lists)
    found, found_digest = read_aggregate(root.files, location, expected_digest=digest)
    assert (found, found_digest) == (written, digest)
    assert msgspec.structs.replace(found, episodes=None) == manifest
    assert read_episodes(root.files, location, found) == lists
    agent = found.member(AGENT.place)
    assert agent is not None
    assert (agent.records, agent.restarts, agent.bytes) == (4, 2, infos[0].bytes)
    assert agent.participant.incarnation_id == "inc-a"
    assert agent.manifest_digest == infos[0].manifest_digest
    assert found.trainer is not None
    assert found.trainer.payload() == trainer
    assert decode(found.trainer.payload())["step"] == 2**70
    parts = check_members(root.files, location, found)
    assert [part.participant.place for part in parts] == [AGENT.place, COUNTER.place]
    reread = [
        Member.from_manifest(
            location, *read_manifest(root.files, location.part(who.place), who.place, checkpoint_id="ck")
        )
        for who in (AGENT, COUNTER)
    ]
    assert tuple(reread) == manifest.members


def test_an_equal_aggregate_is_accepted_whatever_its_time_and_another_refused(root: CheckpointRoot) -> None:
    manifest, digest = complete(root, "ck", epoch=1)
    bare = msgspec.structs.replace(manifest, episodes=None)
    lists = read_episodes(root.files, root.location("ck"), manifest)
    later = msgspec.structs.replace(bare, created="later")
    assert write_aggregate(root.files, root.location("ck"), later, episodes=lists) == (manifest, digest)
    before = root.files.all_files()[root.location("ck").aggregate]  # type: ignore[attr-defined]
    for other in (msgspec.structs.replace(bare, epoch=2), msgspec.structs.replace(bare, members=())):
        with pytest.raises(CheckpointConflict, match="belongs to another commit"):
            write_aggregate(root.files, root.location("ck"), other, episodes=lists)
    with pytest.raises(CheckpointConflict):
        write_aggregate(root.files, root.location("ck"), bare, episodes=EpisodeLists())
    assert root.files.all_files()[root.location("ck").aggregate] == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), 2**64, b"x", "\ud800", {1: 2}, object()], ids=str)
def test_a_frontier_that_json_cannot_carry_is_refused(root: CheckpointRoot, value: Any) -> None:
    manifest = AggregateManifest(
        checkpoint_id="ck", run_id="r", controller_id="c", epoch=1, members=(), frontier={"a": [value]}
    )
    with pytest.raises(InvalidArgument, match="frontier"):
        write_aggregate(root.files, root.location("ck"), manifest, episodes=EpisodeLists())


@pytest.mark.behaviour("C166")
def test_every_json_file_of_a_checkpoint_is_read_by_a_strict_parser(
    root: CheckpointRoot, files: RecordingFiles
) -> None:
    commit(root, "ck", epoch=1)
    root.write_owner(Owner.here(epoch=1, controller_id="ctl"))
    root.pin("ck", epoch=1)
    read = 0
    for path, data in files.all_files().items():
        if not path.endswith(".gck"):
            json.loads(data.decode("utf-8"), parse_constant=pytest.fail)
            read += 1
    assert read >= 9


def _damage_aggregate(files: RecordingFiles, root: CheckpointRoot, change: Any) -> None:
    path = root.location("ck").aggregate
    document = json.loads(files.all_files()[path])
    change(document)
    files.damage(path, json.dumps(document).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("members"),
        lambda m: m.update(members=m["members"] * 2),
        lambda m: m["members"][0].update(manifest="../../x/manifest.json"),
        lambda m: m["members"][0].update(manifest_digest=""),
        lambda m: m["members"][0].update(records="4"),
        lambda m: m["episodes"].update(name="../../x"),
        lambda m: m["episodes"].update(digest="x"),
        lambda m: m.update(episodes=None),
        lambda m: m.update(checkpoint_id="other"),
        lambda m: m.update(surprise=1),
        lambda m: m.update(schema_version=9),
        lambda m: m.update(epoch=-1),
    ],
)
def test_a_damaged_aggregate_is_corrupt_by_name(root: CheckpointRoot, files: RecordingFiles, change: Any) -> None:
    complete(root, "ck", epoch=1)
    _damage_aggregate(files, root, change)
    with pytest.raises(StateCorrupt, match=r"checkpoint\.json"):
        root.find("ck")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["members"][0].update(records=5),
        lambda m: m["members"][0].update(restarts=5),
        lambda m: m["members"][0].update(manifest_digest="0" * 64),
        lambda m: m["members"][0]["participant"].update(incarnation_id="other"),
        lambda m: m["members"][0]["files"].pop(),
    ],
)
def test_members_are_compared_with_their_parts(root: CheckpointRoot, files: RecordingFiles, change: Any) -> None:
    complete(root, "ck", epoch=1)
    _damage_aggregate(files, root, change)
    manifest, _ = read_aggregate(files, root.location("ck"))
    with pytest.raises(StateCorrupt, match="agent/office/0") as caught:
        check_members(files, root.location("ck"), manifest)
    assert caught.value.participant == "agent/office/0"


def test_missing_and_damaged_members_are_all_named(root: CheckpointRoot, files: RecordingFiles) -> None:
    manifest, _ = complete(root, "ck", epoch=1)
    location = root.location("ck")
    files.remove(location.part(AGENT.place).manifest)
    with pytest.raises(StateNotFound, match="agent/office/0"):
        check_members(files, location, manifest)
    entry = manifest.members[1].files[0]
    files.damage(location.part(COUNTER.place).file(entry.name), b"short")
    with pytest.raises(StateCorrupt) as caught:
        check_members(files, location, manifest)
    assert "agent/office/0" in caught.value.message
    assert "resources/counter/0" in caught.value.message


# ---- intents


def test_a_directory_belongs_to_the_first_intent(root: CheckpointRoot) -> None:
    intent = Intent(
        checkpoint_id="ck",
        run_id="run",
        controller_id="ctl",
        epoch=1,
        members=(IdentityBlock.of(AGENT),),
        scope={"all": True},
    )
    root.write_intent(intent)
    root.write_intent(intent)
    assert root.read_intent("ck") == intent
    with pytest.raises(CheckpointConflict, match="belongs to another commit"):
        root.write_intent(msgspec.structs.replace(intent, epoch=2))
    assert root.read_intent("ck") == intent
    with pytest.raises(StateNotFound):
        root.read_intent("other")
    with pytest.raises(InvalidArgument):
        root.write_intent(msgspec.structs.replace(intent, checkpoint_id="../x"))


# ---- finding and publishing


def test_only_published_checkpoints_are_the_newest(root: CheckpointRoot) -> None:
    with pytest.raises(StateNotFound):
        root.find()
    commit(root, "one", epoch=1)
    complete(root, "two", epoch=1)  # complete, not published
    write(root.files, root, "three")  # not even complete
    assert root.find().location.checkpoint_id == "one"
    assert root.find("two").publication is None
    with pytest.raises(StateNotFound):
        root.find("three")
    with pytest.raises(InvalidArgument):
        root.find("../x")


def test_the_list_is_newest_first_and_names_what_cannot_be_read(root: CheckpointRoot, files: RecordingFiles) -> None:
    commit(root, "one", epoch=1)
    files.damage(root.location("one").aggregate, b"junk")
    done = commit(root, "two", epoch=1)  # an unreadable old manifest does not stop a publication
    assert root.find().publication == done.published.publication
    listed = list(root.published())
    assert [entry.publication.checkpoint_id for entry in listed] == ["two", "one"]
    assert listed[0].bytes == sum(member.bytes for member in done.manifest.members) > 0
    assert listed[1].manifest is None
    assert "checkpoint.json" in listed[1].problem


def test_a_published_manifest_that_changed_or_is_gone_is_corrupt(root: CheckpointRoot, files: RecordingFiles) -> None:
    commit(root, "ck", epoch=1)
    path = root.location("ck").aggregate
    files.damage(path, files.all_files()[path] + b" ")
    for selector in ("latest", "ck"):
        with pytest.raises(StateCorrupt, match=r"checkpoint\.json"):
            root.find(selector)
    files.remove(path)
    with pytest.raises(StateCorrupt, match="publication 2"):
        root.find()


@pytest.mark.behaviour("C224")
def test_a_latest_that_cannot_be_moved_is_reported_and_the_publication_stands(
    root: CheckpointRoot, files: RecordingFiles
) -> None:
    commit(root, "one", epoch=1)
    _, digest = complete(root, "two", epoch=1, turn=1)

    def fill_disk(step: Any) -> None:
        if step.kind == "link" and "/sequence/" in step.other:
            files.fault = Fault(len(files.steps) + 6, errno.ENOSPC, for_good=True)

    files.before = fill_disk
    published = root.publish("two", digest, epoch=1)
    assert "ENOSPC" in published.latest_error
    assert root.find().location.checkpoint_id == "two"
    assert b'"one"' in files.all_files()[root.sequence.latest_path]
    files.before = files.fault = None
    assert root.publish("two", digest, epoch=1).latest_error == ""
    assert b'"two"' in files.all_files()[root.sequence.latest_path]


@pytest.mark.behaviour("C224")
def test_latest_is_moved_after_the_entry_it_names_is_durable(root: CheckpointRoot, files: RecordingFiles) -> None:
    commit(root, "one", epoch=1)
    steps = files.steps
    entry = next(at for at, step in enumerate(steps) if step.kind == "link" and step.other.endswith("0002"))
    synced = next(at for at in range(entry, len(steps)) if steps[at].path == root.sequence.directory)
    moved = next(at for at, step in enumerate(steps) if step.other == root.sequence.latest_path)
    assert entry < synced < moved
    assert steps[moved + 1].kind == "sync_dir"


# ---- preflight, on a real disk


def test_preflight_makes_the_root_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path / "a" / "b"))
    found = root.preflight(expected_bytes=1)
    assert found.free_bytes is not None
    assert found.free_bytes > 0
    assert found.notes == ()
    assert os.listdir(root.path) == []
    with pytest.raises(StateUnwritable, match="bytes left"):
        root.preflight(expected_bytes=1 << 60)


def test_preflight_names_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises(StateUnwritable, match="file"):
            CheckpointRoot(str(path)).preflight()


# ---- pins and the owner


def test_pins_hold_until_they_are_let_go(root: CheckpointRoot, files: RecordingFiles) -> None:
    for name in ("one", "two-2"):
        complete(root, name, epoch=1)
    pin = root.pin("one", epoch=2)
    assert root.pin("one", epoch=2) == pin
    root.pin("two-2", epoch=11)
    assert root.pins() == (Pin(2, "one"), Pin(11, "two-2"))
    files.damage(f"{ROOT}/pins/2-one", b"")
    files.put(f"{ROOT}/pins/README", b"")
    assert len(root.pins()) == 2  # what a pin's file holds does not matter, its name does
    root.unpin(pin)
    root.unpin(pin)
    assert root.pins() == (Pin(11, "two-2"),)
    with pytest.raises(InvalidArgument):
        root.pin("../x", epoch=1)


def test_a_heartbeat_moves_and_is_read_back(root: CheckpointRoot, files: RecordingFiles) -> None:
    assert root.read_owner() is None
    owner = Owner.here(epoch=1, controller_id="ctl")
    root.write_owner(owner)
    root.write_owner(owner.beat())
    found = root.read_owner()
    assert found is not None
    assert found.counter == 1
    assert not found.is_gone()
    files.damage(f"{ROOT}/owner", b"junk")
    assert root.read_owner() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_owner_of_this_host_and_boot_whose_process_ended_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys; from gym_ckpt_grpc.storage import CheckpointRoot, Owner;"
        "CheckpointRoot(sys.argv[1]).write_owner(Owner.here(epoch=1, controller_id='x'))"
    )
    import gymckpt

    paths = [str(Path(__file__).parents[2]), str(Path(next(iter(gymckpt.__path__))).parent)]
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=60,
        check=True,
    )
    owner = CheckpointRoot(str(tmp_path)).read_owner()
    assert owner is not None
    assert owner.is_gone()
    for change in ({"host": "elsewhere"}, {"boot_id": "other"}, {"pid_space": "other"}, {"boot_id": ""}, {"pid": 0}):
        assert not msgspec.structs.replace(owner, **change).is_gone()


# ---- verification


def test_a_whole_checkpoint_passes_and_every_file_was_read(root: CheckpointRoot, files: RecordingFiles) -> None:
    commit(root, "ck", epoch=1)
    files.reads.clear()
    findings = list(verify_checkpoint(root, "ck"))
    assert [finding.level for finding in findings[:-1]] == [Level.CHECKED] * (len(findings) - 1)
    assert findings[-1].level is Level.PASSED
    checked = {finding.file for finding in findings[:-1]}
    present = {
        path.removeprefix(root.location("ck").directory + "/") for path in files.all_files() if "/ck/" in path
    } - {"intent.json"}
    assert checked == present


def test_every_damaged_byte_of_a_checkpoint_is_found_and_its_file_named(
    root: CheckpointRoot, files: RecordingFiles
) -> None:
    commit(root, "ck", epoch=1)
    directory = root.location("ck").directory + "/"
    for path, data in files.all_files().items():
        if not path.startswith(directory) or path.endswith("intent.json"):
            continue
        for at in range(0, len(data), 7):
            files.damage(path, data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            found = faults(root, "ck")
            assert found, (path, at)
            assert any(path.removeprefix(directory) in (finding.file + finding.message) for finding in found)
        files.damage(path, data)
    assert faults(root, "ck") == []


def test_damaged_state_is_named_with_file_participant_and_episode(root: CheckpointRoot, files: RecordingFiles) -> None:
    commit(root, "ck", epoch=1)
    record = make_records()[2]
    entry = read_aggregate(files, root.location("ck"))[0].members[0].files[0]
    path = root.location("ck").part(AGENT.place).file(entry.name)
    data = files.all_files()[path]
    at = data.index(record.payloads["conversation"].data) + 5
    files.damage(path, data[:at] + b"\x00" + data[at + 1 :])
    (found,) = faults(root, "ck")
    assert (found.level, found.episode, found.participant) == (Level.DAMAGED, record.episode, "agent/office/0")
    assert found.file.endswith(entry.name)
    assert "conversation" in found.message


def test_missing_files_and_strays_are_told_apart(root: CheckpointRoot, files: RecordingFiles) -> None:
    done = commit(root, "ck", epoch=1)
    part = root.location("ck").part(AGENT.place)
    files.put(part.file("extra.json"), b"{}")
    findings = list(verify_checkpoint(root, "ck"))
    assert [finding.file for finding in findings if finding.level is Level.STRAY] == [f"{part.relative}/extra.json"]
    assert findings[-1].level is Level.PASSED
    files.remove(part.file(done.manifest.members[0].files[0].name))
    found = faults(root, "ck")
    assert {finding.level for finding in found} == {Level.MISSING}
    files.remove(root.location("ck").aggregate)
    assert [(each.level, each.file) for each in faults(root, "ck")] == [
        (Level.MISSING, "checkpoint.json"),
        (Level.MISSING, part.relative + "/" + done.manifest.members[0].files[0].name),
    ]


def test_a_checkpoint_that_does_not_exist_fails_and_an_illegal_id_is_refused(root: CheckpointRoot) -> None:
    assert [finding.level for finding in verify_checkpoint(root, "none")] == [Level.MISSING, Level.FAILED]
    with pytest.raises(InvalidArgument):
        list(verify_checkpoint(root, "../x"))
