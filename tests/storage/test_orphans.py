"""What is removed although no policy speaks of it: directories that nobody publishes, files that nobody named."""

from __future__ import annotations

import pytest

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    Retention,
    plan_retention,
)
from tests.storage.builders import AGENT, COUNTER, complete, write
from tests.storage.kept_roots import HOUR, decided, prune, pruned, put, unfinished
from tests.storage.recording_files import ROOT, RecordingFiles

LEFT = f".tmp-{'0' * 32}"
"""A file under construction whose writer is gone."""


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles()


@pytest.fixture
def root(files: RecordingFiles) -> CheckpointRoot:
    """Empty, claimed as epoch 1."""
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    return root


@pytest.mark.behaviour("C231")
def test_directories_of_ended_epochs_that_were_never_published_are_removed(root: CheckpointRoot) -> None:
    put(root, "kept")
    unfinished(root, "lost", epoch=1)
    complete(root, "complete", epoch=1)
    root.sequence.claim("ctl", "run")
    unfinished(root, "mine", epoch=2)
    unfinished(root, "aborted", epoch=2)
    assert prune(root, epoch=2, open_ids=["mine"], aborted=["aborted"]) == ["kept", "mine"]
    assert prune(root, epoch=2) == ["kept", "mine"]
    assert prune(root, epoch=2, aborted=["mine"], open_ids=["mine"]) == ["kept", "mine"]


@pytest.mark.behaviour("C231")
def test_what_is_not_of_this_root_is_left(root: CheckpointRoot, files: RecordingFiles) -> None:
    """No intent; one that cannot be read; one of an epoch that somebody else had here, as a copied checkpoint has;
    one of an epoch that nobody has claimed yet."""
    put(root, "kept")
    write(files, root, "foreign")
    unfinished(root, "copied", epoch=1, controller="elsewhere")
    unfinished(root, "later", epoch=7)
    unfinished(root, "damaged", epoch=1)
    files.damage(root.location("damaged").intent, b"{}")
    root.sequence.claim("ctl", "run")
    reasons = decided(plan_retention(root, None, epoch=2, grace=0.0))
    assert "none of ours" in reasons["foreign"]
    assert "none of ours" in reasons["copied"]
    assert "under epoch 7" in reasons["later"]
    assert "cannot be read" in reasons["damaged"]
    assert prune(root, Retention(keep_last=1), epoch=2) == ["copied", "damaged", "foreign", "kept", "later"]


def test_an_orphan_that_somebody_holds_stays(root: CheckpointRoot) -> None:
    put(root, "kept")
    complete(root, "held", epoch=1)
    root.hold("held", "me")
    root.sequence.claim("ctl", "run")
    assert prune(root, epoch=2) == ["held", "kept"]


@pytest.mark.behaviour("C231")
def test_a_caller_without_an_epoch_takes_the_present_one_for_alive_until_it_is_released(root: CheckpointRoot) -> None:
    claim = root.sequence.claim("ctl", "run")
    put(root, "kept", epoch=2)
    unfinished(root, "old", epoch=1)
    unfinished(root, "present", epoch=2)
    assert prune(root, epoch=None) == ["kept", "present"]
    root.sequence.release(claim)
    assert prune(root, epoch=None) == ["kept"]


@pytest.mark.behaviour("C231")
def test_an_orphan_has_its_grace_by_the_clock_of_the_store(root: CheckpointRoot, files: RecordingFiles) -> None:
    put(root, "kept")
    files.now = 5000.0
    unfinished(root, "orphan", epoch=1)
    root.sequence.claim("ctl", "run")
    files.now += HOUR - 1
    assert prune(root, epoch=2, grace=HOUR) == ["kept", "orphan"]
    assert (
        "written 60 min ago; removed once that is 1 h"
        in decided(plan_retention(root, None, epoch=2, grace=HOUR))["orphan"]
    )
    write(files, root, "orphan", identity=COUNTER)  # somebody is at work in it after all
    files.now += 1
    assert prune(root, epoch=2, grace=HOUR) == ["kept", "orphan"]
    files.now += HOUR
    assert prune(root, epoch=2, grace=HOUR) == ["kept"]


def test_a_clock_that_was_set_back_makes_nothing_old(root: CheckpointRoot, files: RecordingFiles) -> None:
    files.now = 1e6
    unfinished(root, "orphan", epoch=1)
    root.sequence.claim("ctl", "run")
    files.now = 0.0
    assert prune(root, epoch=2, grace=HOUR) == ["orphan"]


@pytest.mark.behaviour("C231")
def test_files_under_construction_go_after_the_grace_wherever_they_are(
    root: CheckpointRoot, files: RecordingFiles
) -> None:
    put(root, "one", "two")
    root.pin("one", epoch=1)
    root.hold("one", "x")
    part = root.location("one").part(AGENT.place).directory
    places = [ROOT, f"{ROOT}/sequence", f"{ROOT}/pins", f"{ROOT}/holds", part]
    files.now = 100.0
    for place in places:
        files.put(f"{place}/{LEFT}", b"12345")
        files.put(f"{place}/.tmp-download", b"of somebody else")
    files.put(f"{ROOT}/notes.txt", b"of the user")
    unfinished(root, "open", epoch=1)
    files.put(f"{ROOT}/checkpoints/open/{LEFT}", b"")
    plan = plan_retention(root, None, epoch=1, grace=HOUR)
    files.now += HOUR
    for path in (f"{place}/{LEFT}" for place in places):
        assert files.exists(path)
    assert plan.files == ()
    outcome = pruned(root, None, grace=HOUR)
    left = {path for path in files.all_files() if ".tmp-" in path}
    assert left == {f"{ROOT}/checkpoints/open/{LEFT}", *(f"{place}/.tmp-download" for place in places)}
    assert (len(outcome.files), outcome.bytes_freed) == (5, 25)
    assert files.exists(f"{ROOT}/notes.txt")


class Silent(RecordingFiles):
    """A store that tells no times."""

    def modified(self, path: str) -> float:
        raise StateCorrupt(f"cannot read {path!r}: Input/output error (EIO)")


def test_what_cannot_be_dated_stays() -> None:
    files = Silent()
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    put(root, "one", "two")
    unfinished(root, "orphan", epoch=1)
    files.put(f"{ROOT}/{LEFT}", b"")
    root.sequence.claim("ctl", "run")
    plan = plan_retention(root, Retention(keep_last=1), epoch=2, grace=0.0)
    assert "age cannot be told" in decided(plan)["orphan"]
    assert [(each.name, each.removed) for each in plan.files] == [(LEFT, False)]
    assert prune(root, Retention(keep_last=1), epoch=2) == ["orphan", "two"]
