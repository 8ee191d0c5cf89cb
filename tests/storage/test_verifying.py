"""Verifying incremental and damaged checkpoints: as much as can be read, each fault by name, and never an exception."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, Finding, Level, verify_checkpoint
from gym_ckpt_grpc.storage.record_format import FOOTER_SIZE
from tests.storage.assembling import index_of
from tests.storage.builders import AGENT, COUNTER, commit, complete, faults
from tests.storage.recording_files import ROOT, RecordingFiles


@pytest.fixture
def root() -> CheckpointRoot:
    """c0, and c1 incremental on it: of each record the conversation is c0's."""
    root = CheckpointRoot(ROOT, RecordingFiles())
    claim = root.sequence.claim("ctl", "run")
    commit(root, "c0", epoch=claim.epoch)
    commit(root, "c1", epoch=claim.epoch, turn=1, base="c0")
    return root


def files_of(root: CheckpointRoot) -> RecordingFiles:
    assert isinstance(root.files, RecordingFiles)
    return root.files


def records_file(root: CheckpointRoot, checkpoint_id: str) -> str:
    """The agent's."""
    directory = root.location(checkpoint_id).part(AGENT.place).directory
    (path,) = (each for each in files_of(root).all_files() if each.startswith(directory) and each.endswith(".gck"))
    return path


def flip(root: CheckpointRoot, path: str, at: int) -> None:
    data = files_of(root).all_files()[path]
    files_of(root).damage(path, data[:at] + bytes([data[at] ^ 0x04]) + data[at + 1 :])


def test_a_whole_incremental_checkpoint_passes_and_all_it_needs_was_read(root: CheckpointRoot) -> None:
    files = files_of(root)
    files.reads.clear()
    assert faults(root, "c1") == []
    for who in (AGENT, COUNTER):
        needed = root.location("c0").part(who.place).directory
        assert sum(length for path, _, length in files.reads if path.startswith(needed)) > 0


@pytest.mark.behaviour("C184")
def test_damage_in_a_base_is_found_where_it_is_needed_and_only_there(root: CheckpointRoot) -> None:
    path = records_file(root, "c0")
    data = files_of(root).all_files()[path]
    file = "../c0/" + path.removeprefix(root.location("c0").directory + "/")
    hit = missed = 0
    for at in range(16, index_of(data).chunks[-1].offset, 5):
        flip(root, path, at)
        found = faults(root, "c1")
        hit += bool(found)
        missed += not found
        for finding in found:
            assert (finding.level, finding.file, finding.participant) == (Level.DAMAGED, file, "agent/office/0")
            assert finding.episode is not None
            assert "conversation" in finding.message
        assert faults(root, "c0")
        flip(root, path, at)
    assert min(hit, missed) > 5
    assert faults(root, "c1") == []


def test_a_base_that_is_gone_is_missing_by_name_and_the_rest_is_verified(root: CheckpointRoot) -> None:
    files = files_of(root)
    files.move_dir(root.location("c0").directory, f"{ROOT}/checkpoints/.deleted-c0")
    found = faults(root, "c1")
    assert [finding.level for finding in found] == [Level.MISSING] * 2
    assert {finding.participant for finding in found} == {"agent/office/0", "resources/counter/0"}
    for finding in found:
        assert finding.file.startswith("../c0/participants/")
        assert "'c0'" in finding.message
    own = records_file(root, "c1")
    flip(root, own, 20)
    assert any(each.level is Level.DAMAGED and each.episode for each in faults(root, "c1"))


def test_a_base_cut_short_is_damaged(root: CheckpointRoot) -> None:
    path = records_file(root, "c0")
    files_of(root).damage(path, files_of(root).all_files()[path][:-1])
    (found,) = (each for each in faults(root, "c1") if each.participant == "agent/office/0")
    assert (found.level, found.file.startswith("../c0/")) == (Level.DAMAGED, True)


# ---- without checkpoint.json


def _remove_aggregate(root: CheckpointRoot) -> None:
    files_of(root).remove(root.location("c1").aggregate)


def _break_aggregate(root: CheckpointRoot) -> None:
    files_of(root).damage(root.location("c1").aggregate, b"{")


def _unnamed_service(root: CheckpointRoot) -> None:
    path = root.location("c1").aggregate
    data = files_of(root).all_files()[path]
    files_of(root).damage(path, data.replace(b'"service": "office"', b'"service": ""'))


@pytest.mark.parametrize("harm", [_remove_aggregate, _break_aggregate, _unnamed_service])
def test_without_its_manifest_the_parts_are_verified_by_what_they_say(
    root: CheckpointRoot, harm: Callable[[CheckpointRoot], None]
) -> None:
    harm(root)
    findings = list(verify_checkpoint(root, "c1"))
    (only,) = (each for each in findings if each.is_fault)
    assert only.file == "checkpoint.json"
    checked = {finding.file.rsplit("/", 1)[-1] for finding in findings if finding.level is Level.CHECKED}
    assert {"manifest.json", records_file(root, "c1").rsplit("/", 1)[-1]} <= checked
    assert any(name.startswith("episodes-") for name in checked)
    assert not [finding for finding in findings if finding.level is Level.STRAY]
    flip(root, records_file(root, "c1"), 20)
    assert any(each.episode is not None for each in verify_checkpoint(root, "c1") if each.is_fault)


def test_a_part_in_the_place_of_another_is_found_without_a_manifest_too(root: CheckpointRoot) -> None:
    _remove_aggregate(root)
    files = files_of(root)
    first, second = (root.location("c1").part(who.place).directory for who in (AGENT, COUNTER))
    whole = files.all_files()
    files.damage(f"{second}/manifest.json", whole[f"{first}/manifest.json"])
    (found,) = (each for each in faults(root, "c1") if each.participant.startswith("resources"))
    assert "is the part of agent/office/0" in found.message


# ---- strays and the sequence


def test_what_has_no_place_in_a_checkpoint_is_told_and_no_fault(root: CheckpointRoot) -> None:
    files, location = files_of(root), root.location("c1")
    files.put(location.file("notes.txt"), b"hello")
    files.make_dirs(location.file("participants/agent/nobody/0"))
    files.put(location.file("participants/agent/nobody/0/manifest.json"), b"{}")
    files.put(f"{location.part(AGENT.place).directory}/.tmp-1", b"half")
    findings = list(verify_checkpoint(root, "c1"))
    strays = sorted(finding.file for finding in findings if finding.level is Level.STRAY)
    part = location.part(AGENT.place).relative
    assert strays == sorted(["notes.txt", "participants/agent/nobody/0", f"{part}/.tmp-1"])
    assert findings[-1].level is Level.PASSED


def test_a_damaged_entry_of_the_sequence_matters_to_what_it_may_have_published(root: CheckpointRoot) -> None:
    complete(root, "c2", epoch=1)
    assert faults(root, "c2") == []
    number = max(root.sequence.numbers())
    files_of(root).damage(root.sequence.path(number), b"{")  # it published c1
    for name in ("c1", "c2"):
        (found,) = faults(root, name)
        assert found.file == "../../sequence"
        assert str(number) in found.message
    assert faults(root, "c0") == []


# ---- whatever is there


def test_random_damage_never_ends_it(record_property: Callable[[str, object], None]) -> None:
    """Files cut, emptied, flipped, swapped and removed: the verdict comes, and it is that of a restore."""
    seed = random.randrange(2**32)
    record_property("seed", seed)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(150):
        root = CheckpointRoot(ROOT, RecordingFiles())
        claim = root.sequence.claim("ctl", "run")
        commit(root, "c0", epoch=claim.epoch)
        commit(root, "c1", epoch=claim.epoch, turn=1, base="c0", compress=rng.random() < 0.5)
        for _ in range(rng.randint(1, 3)):
            _harm(files_of(root), rng)
        findings = list(verify_checkpoint(root, "c1"))
        assert [finding.level in (Level.PASSED, Level.FAILED) for finding in findings].count(True) == 1
        assert findings[-1].level is (Level.FAILED if any(map(_is_fault, findings)) else Level.PASSED)


def _is_fault(finding: Finding) -> bool:
    return finding.is_fault


def _harm(files: RecordingFiles, rng: random.Random) -> None:
    whole = files.all_files()
    path = rng.choice(sorted(whole))
    data = whole[path]
    kind = rng.randrange(5)
    if kind == 0:
        files.remove(path)
    elif kind == 1:
        files.damage(path, data[: rng.randrange(len(data) + 1)])
    elif kind == 2:
        files.damage(path, b"")
    elif kind == 3 and data:
        at = rng.randrange(max(0, len(data) - 3 * FOOTER_SIZE), len(data))
        files.damage(path, data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :])
    else:
        files.damage(path, whole[rng.choice(sorted(whole))])


def test_the_episodes_of_damaged_payloads_are_named(root: CheckpointRoot) -> None:
    path = records_file(root, "c1")
    flip(root, path, 20)
    (found,) = faults(root, "c1")
    assert (found.episode, found.participant) == (EpisodeId("roll-0", 0), "agent/office/0")
