"""Holds: placed, listed, released; and against a removal, at every step and every crash of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import CheckpointConflict, InvalidArgument, StateNotFound
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    Hold,
    Retention,
    apply_retention,
    delete_checkpoint,
    finish_deletions,
    plan_retention,
)
from tests.storage.builders import commit, complete, faults
from tests.storage.recording_files import ROOT, Loss, RecordingFiles


def make(*names: str) -> tuple[CheckpointRoot, RecordingFiles]:
    """Published checkpoints."""
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    for turn, name in enumerate(names):
        commit(root, name, epoch=1, turn=turn)
    return root, files


@pytest.mark.behaviour("C229")
def test_a_hold_keeps_until_it_is_released_by_its_name_through_all_epochs() -> None:
    root, _ = make("one", "two")
    assert root.hold("one", "save-1") == Hold("one", "save-1")
    root.hold("one", "save-2")
    root.hold("one", "save-1")  # again
    assert root.holds() == (Hold("one", "save-1"), Hold("one", "save-2"))
    for epoch in (2, 3):
        root.sequence.claim("ctl", "run")
        commit(root, f"of-{epoch}", epoch=epoch)
        with pytest.raises(CheckpointConflict, match="held by 'save-1', 'save-2'"):
            delete_checkpoint(root, "one", epoch=epoch)
    root.release("one", "save-1")
    root.release("one", "save-1")  # not held is fine
    with pytest.raises(CheckpointConflict, match="held by 'save-2'"):
        delete_checkpoint(root, "one", epoch=3)
    root.release("one", "save-2")
    delete_checkpoint(root, "one", epoch=3)
    assert root.holds() == ()


def test_its_file_s_name_says_all_so_a_damaged_one_holds() -> None:
    root, files = make("one", "two")
    root.hold("one", "a.b_c-d")
    files.damage(f"{ROOT}/holds/one=a.b_c-d", b"")
    files.put(f"{ROOT}/holds/README", b"")
    assert root.holds() == (Hold("one", "a.b_c-d"),)
    with pytest.raises(CheckpointConflict, match="held"):
        delete_checkpoint(root, "one", epoch=1)


@pytest.mark.parametrize("name", ["", "../x", "a=b", "a/b", "a b", "a\n", "é", "x" * 101, ".hidden"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    root, files = make("one")
    before = len(files.steps)
    for call in (root.hold, root.release):
        with pytest.raises(InvalidArgument) as caught:
            call("one", name)
        assert [violation.field for violation in caught.value.violations] == ["name"]
    assert len(files.steps) == before


def test_the_longest_names_fit() -> None:
    root, files = make()
    longest = "c" * 128
    complete(root, longest, epoch=1)
    root.hold(longest, "n" * 100)
    assert root.holds() == (Hold(longest, "n" * 100),)
    assert max(len(name) for name in files.names(f"{ROOT}/holds")) <= 255


def test_what_is_not_there_or_not_complete_cannot_be_held_or_pinned() -> None:
    root, files = make("one", "two")
    files.make_dirs(f"{ROOT}/checkpoints/begun")
    delete_checkpoint(root, "one", epoch=1)
    calls: tuple[Callable[[str], Any], ...] = (lambda id: root.hold(id, "me"), lambda id: root.pin(id, epoch=1))
    for call in calls:
        for id in ("never", "begun", "one"):
            with pytest.raises(StateNotFound):
                call(id)
    assert (root.holds(), root.pins()) == ((), ())
    with pytest.raises(InvalidArgument):
        root.hold("../x", "me")


def prune(root: CheckpointRoot, *, epoch: int | None = None) -> None:
    outcome = apply_retention(root, plan_retention(root, Retention(keep_last=1), epoch=epoch))
    assert outcome.failures == ()


def _raced(at: int, place: Callable[[CheckpointRoot], object]) -> tuple[RecordingFiles, int | None, bool]:
    """A prune of `one`, with `place` before its step `at`: the files, where it was placed, whether it returned."""
    root, files = make("one", "two")
    start = len(files.steps)
    placed: list[int] = []
    returned = False

    def before(step: Any) -> None:
        nonlocal returned
        if len(files.steps) == start + at:
            files.before = None
            placed.append(len(files.steps))
            try:
                place(root)
                returned = True
                placed.append(len(files.steps))
            except StateNotFound:
                pass

    files.before = before
    prune(root, epoch=1)
    return files, placed[-1] if placed else None, returned


PLACES: dict[str, Callable[[CheckpointRoot], object]] = {
    "hold": lambda root: root.hold("one", "me"),
    "pin": lambda root: root.pin("one", epoch=1),
}


@pytest.mark.behaviour("C229")
@pytest.mark.parametrize("kind", list(PLACES))
def test_once_it_has_returned_the_checkpoint_stays_whatever_removal_was_under_way(kind: str) -> None:
    """At every step of the removal; and after a crash or power loss at every step from there on."""
    outcomes: list[bool] = []
    for at in itertools.count():
        files, placed, returned = _raced(at, PLACES[kind])
        if placed is None:
            break
        outcomes.append(returned)
        root = CheckpointRoot(ROOT, files)
        there = files.exists(root.location("one").aggregate)
        assert there == returned
        if returned:
            assert faults(root, "one") == []
            losses = [Loss.CRASH, Loss.POWER, Loss.TORN, Loss.LAST, Loss.BACK, Loss.MIXED]
            for _, _, image in files.images(range(placed, len(files.steps) + 1), losses, seeds=range(3)):
                after = CheckpointRoot(ROOT, image)
                prune(after)
                assert faults(after, "one") == []
                assert image.names(f"{ROOT}/checkpoints") == ["one", "two"]
        else:
            assert (root.holds(), root.pins()) == ((), ())
    assert outcomes[0]
    assert not outcomes[-1]
    assert outcomes == sorted(outcomes, reverse=True)  # up to some step it comes in time, from there on too late


@pytest.mark.behaviour("C229")
@pytest.mark.parametrize("kind", list(PLACES))
def test_a_prune_at_every_step_of_placing_one_is_either_too_early_or_obeys(kind: str) -> None:
    root, files = make("one", "two")
    start = len(files.steps)
    PLACES[kind](root)
    outcomes = [_pruned_at(at, kind) for at in range(len(files.steps) - start)]
    assert set(outcomes) == {True, False}
    assert outcomes == sorted(outcomes)


def _pruned_at(at: int, kind: str) -> bool:
    """Whether placing returns, where a whole prune takes place before its step `at`."""
    root, files = make("one", "two")
    start = len(files.steps)

    def before(step: Any) -> None:
        if len(files.steps) == start + at:
            files.before = None
            prune(root, epoch=1)

    files.before = before
    try:
        PLACES[kind](root)
    except StateNotFound:
        assert (root.holds(), root.pins()) == ((), ())
        assert not files.exists(root.location("one").aggregate)
        return False
    assert faults(root, "one") == []
    return True


@pytest.mark.parametrize("finish", ["delete", "finish", "prune"])
def test_an_interrupted_removal_that_somebody_has_come_to_hold_is_taken_back(finish: str) -> None:
    root, files = make("one", "two", "three")
    root.hold("one", "me")
    for name, aside in (("one", ".aside-" + "0" * 32 + "-one"), ("two", ".aside-" + "1" * 32 + "-two")):
        files.move_dir(root.location(name).directory, f"{ROOT}/checkpoints/{aside}")
    assert {entry.publication.checkpoint_id for entry in root.published()} == {"three"}
    if finish == "delete":
        delete_checkpoint(root, "two", epoch=1)
    elif finish == "finish":
        assert finish_deletions(root) == 1
    else:
        prune(root)
    assert files.names(f"{ROOT}/checkpoints") == ["one", "three"]
    assert faults(root, "one") == []
