"""Deleting checkpoints: what holds one, and an interruption at every step."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    StaleController,
    StateCorrupt,
    StateNotFound,
    StateUnwritable,
)
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    Intent,
    LocalFiles,
    Retention,
    apply_retention,
    delete_checkpoint,
    finish_deletions,
    plan_retention,
)
from tests.storage.builders import commit, faults, write
from tests.storage.recording_files import ROOT, Fault, Loss, RecordingFiles


def make() -> tuple[CheckpointRoot, RecordingFiles]:
    """Three published ones: `one`, `two`, `three`."""
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    for turn, name in enumerate(("one", "two", "three")):
        commit(root, name, epoch=1, turn=turn)
    return root, files


def listed(root: CheckpointRoot) -> list[str]:
    return [entry.publication.checkpoint_id for entry in root.published() if not entry.problem]


def below(files: RecordingFiles) -> set[str]:
    """Names of the directories of checkpoints that have any file."""
    return {path.split("/")[3] for path in files.all_files() if path.startswith(f"{ROOT}/checkpoints/")}


def test_a_deleted_checkpoint_is_gone_and_the_others_are_whole() -> None:
    root, files = make()
    delete_checkpoint(root, "one", epoch=1)
    assert listed(root) == ["three", "two"]
    assert below(files) == {"two", "three"}
    assert files.names(f"{ROOT}/checkpoints") == ["three", "two"]
    with pytest.raises(StateNotFound, match="was deleted"):
        root.find("one")
    assert faults(root, "two") == faults(root, "three") == []
    assert root.find().location.checkpoint_id == "three"
    delete_checkpoint(root, "one", epoch=1)
    with pytest.raises(StateNotFound):
        delete_checkpoint(root, "never", epoch=1)


def test_what_holds_one() -> None:
    root, files = make()
    with pytest.raises(CheckpointConflict, match="newest published"):
        delete_checkpoint(root, "three", epoch=1)
    with pytest.raises(CheckpointConflict, match="open"):
        delete_checkpoint(root, "one", epoch=1, open_ids=["one"])
    pin = root.pin("one", epoch=1)
    with pytest.raises(CheckpointConflict, match="pinned by the restore of epoch 1"):
        delete_checkpoint(root, "one", epoch=1)
    root.unpin(pin)
    delete_checkpoint(root, "one", epoch=1)
    files.damage(root.location("two").aggregate, b"junk")
    with pytest.raises(CheckpointConflict, match="cannot be read"):
        delete_checkpoint(root, "two", epoch=1)


def test_a_pin_is_void_once_a_higher_epoch_has_published() -> None:
    root, _ = make()
    root.pin("one", epoch=1)
    root.sequence.claim("ctl", "run")
    with pytest.raises(CheckpointConflict, match="pinned"):
        delete_checkpoint(root, "one", epoch=2)
    commit(root, "four", epoch=2, turn=4)
    delete_checkpoint(root, "one", epoch=2)


def test_a_replaced_controller_deletes_nothing() -> None:
    root, files = make()
    root.sequence.claim("other", "run")
    before = len(files.steps)
    with pytest.raises(StaleController):
        delete_checkpoint(root, "one", epoch=1)
    assert len(files.steps) == before


def test_nothing_is_deleted_where_the_sequence_cannot_be_read() -> None:
    """The damaged entry may be a publication that is newer, or a claim that replaced us."""
    root, files = make()
    files.damage(root.sequence.path(3), b"junk")
    with pytest.raises(StateCorrupt, match="nothing is deleted"):
        delete_checkpoint(root, "one", epoch=1)


def test_an_unpublished_one_is_deleted_by_its_intent_only() -> None:
    root, files = make()
    intent = Intent(checkpoint_id="mine", run_id="run", controller_id="ctl", epoch=1, members=())
    root.write_intent(intent)
    delete_checkpoint(root, "mine", epoch=1)
    write(files, root, "foreign")  # no intent: a directory of who knows whom
    with pytest.raises(CheckpointConflict, match="none of ours"):
        delete_checkpoint(root, "foreign", epoch=1)
    assert below(files) >= {"foreign"}


def steps_of_a_deletion() -> tuple[RecordingFiles, int]:
    root, files = make()
    before = len(files.steps)
    delete_checkpoint(root, "one", epoch=1)
    return files, before


def test_nothing_is_removed_before_the_new_name_lasts() -> None:
    """Else a power loss could leave the old name with a part of its files."""
    files, before = steps_of_a_deletion()
    steps = [(step.kind, step.path) for step in files.steps[before:]]
    assert [kind for kind, _ in steps[:5]] == ["rename", "sync_dir", "rename", "sync_dir", "remove"]
    assert steps[1][1] == steps[3][1] == f"{ROOT}/checkpoints"


def test_the_newest_is_missed_where_its_directory_is_gone(tmp_path: Path) -> None:
    """It is never deleted by us: whoever lost it must be told, not shown an older one."""
    root = CheckpointRoot(str(tmp_path / "root"), LocalFiles())
    root.preflight()
    root.sequence.claim("ctl", "run")
    for name in ("one", "two"):
        commit(root, name, epoch=1)
    shutil.rmtree(root.location("two").directory)
    for selector in ("latest", "two"):
        with pytest.raises(StateCorrupt, match="which publication 3 names"):
            root.find(selector)
    assert [(entry.publication.checkpoint_id, bool(entry.problem)) for entry in root.published()] == [
        ("two", True),
        ("one", False),
    ]


@pytest.mark.parametrize("loss", [Loss.CRASH, Loss.POWER, Loss.TORN])
def test_interrupted_anywhere_it_is_whole_or_gone_and_the_next_one_finishes(loss: Loss) -> None:
    files, before = steps_of_a_deletion()
    assert len(files.steps) - before > 10
    seen = set()
    for count in range(before, len(files.steps) + 1):
        image = files.image(count, loss)
        root = CheckpointRoot(ROOT, image)
        there = "one" in listed(root)
        seen.add(there)
        if there:
            assert faults(root, "one") == []
        else:
            with pytest.raises(StateNotFound):
                root.find("one")
        assert faults(root, "two") == faults(root, "three") == []
        delete_checkpoint(root, "one", epoch=1)
        assert image.names(f"{ROOT}/checkpoints") == ["three", "two"]
        assert finish_deletions(root) == 0
    assert seen == {True, False}


@pytest.mark.parametrize("after", [False, True])
def test_a_failing_step_is_told_and_again_finishes(after: bool) -> None:
    files, before = steps_of_a_deletion()
    for at in range(before, len(files.steps)):
        root, image = make()
        image.fault = Fault(at, errno.EIO, after=after)
        with pytest.raises(StateUnwritable, match="EIO"):
            delete_checkpoint(root, "one", epoch=1)
        image.fault = None
        delete_checkpoint(root, "one", epoch=1)
        assert image.names(f"{ROOT}/checkpoints") == ["three", "two"]


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("data")
    root = CheckpointRoot(str(tmp_path / "root"), LocalFiles())
    root.preflight()
    root.sequence.claim("ctl", "run")
    for name in ("one", "two"):
        commit(root, name, epoch=1)
    os.symlink(outside, f"{root.location('one').directory}/link")
    delete_checkpoint(root, "one", epoch=1)
    assert (outside / "precious").read_text() == "data"
    assert os.listdir(tmp_path / "root" / "checkpoints") == ["two"]


@pytest.mark.behaviour("C231")
@pytest.mark.parametrize("how", ["delete", "prune", "finish"])
def test_a_checkpoint_that_is_a_link_loses_the_link_only(tmp_path: Path, how: str) -> None:
    """An operator has moved it to another disk, or it is somebody else's."""
    root = CheckpointRoot(str(tmp_path / "root"), LocalFiles())
    root.preflight()
    root.sequence.claim("ctl", "run")
    for turn, name in enumerate(("one", "two")):
        commit(root, name, epoch=1, turn=turn)
    directory, elsewhere = Path(root.location("one").directory), tmp_path / "elsewhere"
    directory.rename(elsewhere)
    before = sorted(path.name for path in elsewhere.rglob("*"))
    os.symlink(elsewhere, directory)
    if how == "delete":
        delete_checkpoint(root, "one", epoch=1)
    elif how == "prune":
        plan = plan_retention(root, Retention(keep_last=1), epoch=1)
        assert apply_retention(root, plan).failures == ()
    else:
        directory.rename(directory.with_name(f".deleted-{'0' * 32}-one"))
        assert finish_deletions(root) == 1
    assert os.listdir(tmp_path / "root" / "checkpoints") == ["two"]
    assert sorted(path.name for path in elsewhere.rglob("*")) == before


def test_what_an_interrupted_removal_left_stays_where_the_sequence_cannot_be_read() -> None:
    """What its entries would say may need it."""
    root, files = make()
    aside = f"{ROOT}/checkpoints/.aside-{'0' * 32}-one"
    files.move_dir(root.location("one").directory, aside)
    files.damage(root.sequence.path(3), b"junk")
    with pytest.raises(StateCorrupt):
        finish_deletions(root)
    assert below(files) == {"one", "two", "three"}
