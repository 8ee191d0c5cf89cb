"""Planning changes nothing, applying looks again; two at once, one that is stopped, and random histories."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    LocalFiles,
    Plan,
    Retention,
    RetentionOutcome,
    StopFlag,
    apply_retention,
    plan_retention,
    staging_keys,
)
from tests.storage.builders import commit, complete, faults
from tests.storage.kept_roots import HOUR, prune, pruned, put, unfinished
from tests.storage.recording_files import ROOT, RecordingFiles


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles()


@pytest.fixture
def root(files: RecordingFiles) -> CheckpointRoot:
    """Empty, claimed as epoch 1."""
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    return root


def test_a_plan_changes_nothing_and_says_what_there_is(root: CheckpointRoot, files: RecordingFiles) -> None:
    put(root, "a", "b", "c")
    unfinished(root, "orphan", epoch=1)
    root.sequence.claim("ctl", "run")
    before = files.all_files()
    plan = plan_retention(root, Retention(keep_last=2), epoch=2, grace=0.0)
    assert files.all_files() == before
    assert [(each.name, each.number, each.removed) for each in plan.published] == [
        ("c", 4, False),
        ("b", 3, False),
        ("a", 2, True),
    ]
    assert [(each.name, each.number, each.removed) for each in plan.unpublished] == [("orphan", 0, True)]
    manifest = root.find("a").manifest
    assert plan.published[-1].bytes == sum(member.bytes for member in manifest.members) > 0
    assert plan.unpublished[0].bytes == sum(len(data) for path, data in before.items() if "/orphan/" in path)
    outcome = apply_retention(root, plan)
    assert outcome.bytes_freed == plan.published[-1].bytes + plan.unpublished[0].bytes


@pytest.mark.behaviour("C229")
@pytest.mark.parametrize("what", ["pin", "hold", "publication"])
def test_what_came_after_the_plan_is_obeyed(root: CheckpointRoot, what: str) -> None:
    put(root, "a", "b")
    complete(root, "c", epoch=1)
    plan = plan_retention(root, Retention(keep_last=1), epoch=1, grace=0.0, aborted=["c"])
    assert {each.name for each in plan.checkpoints} == {"a", "c"}
    if what == "pin":
        root.pin("a", epoch=1)
    elif what == "hold":
        root.hold("a", "me")
    else:
        put(root, "d", needs=["a"])
    outcome = apply_retention(root, plan)
    assert outcome.failures == ()
    assert root.files.exists(root.location("a").aggregate)
    (kept,) = [each for each in outcome.kept if each.name == "a"]
    assert {"pin": "pinned", "hold": "held", "publication": "d needs its files"}[what] in kept.reason


def test_what_was_published_after_the_plan_is_no_orphan(root: CheckpointRoot) -> None:
    put(root, "a")
    _, digest = complete(root, "b", epoch=1)
    plan = plan_retention(root, None, epoch=1, grace=0.0, aborted=["b"])
    assert [each.name for each in plan.checkpoints] == ["b"]
    root.publish("b", digest, epoch=1)
    assert [each.name for each in apply_retention(root, plan).removed] == []
    assert faults(root, "b") == []


def test_two_that_apply_the_same_plan_get_along(root: CheckpointRoot, files: RecordingFiles) -> None:
    """One does all of its work at some step of the other, at every step."""
    steps = 0
    for at in itertools.count():
        files = RecordingFiles()
        root = CheckpointRoot(ROOT, files)
        root.sequence.claim("ctl", "run")
        put(root, "a", "b", "c")
        plan = plan_retention(root, Retention(keep_last=1), epoch=1)
        start = len(files.steps)
        other: list[RetentionOutcome] = []

        def interrupt(step: Any, files: RecordingFiles = files, root: CheckpointRoot = root, plan: Plan = plan) -> None:
            if len(files.steps) == start + at:  # noqa: B023
                files.before = None
                other.append(apply_retention(root, plan))  # noqa: B023

        files.before = interrupt
        outcome = apply_retention(root, plan)
        if not other:
            break
        steps += 1
        assert not other[0].failures
        assert files.names(f"{ROOT}/checkpoints") == ["c"]
        assert faults(root, "c") == []
        removed = {each.name for each in (*outcome.removed, *other[0].removed)} | set(other[0].finished)
        assert removed >= {"b", "a"} - {each.name for each in outcome.kept}
    assert steps > 10


@pytest.mark.behaviour("C229")
def test_what_one_needs_stays_while_its_removal_may_be_taken_back(root: CheckpointRoot, files: RecordingFiles) -> None:
    """It was interrupted, is held meanwhile, and cannot be given its name back yet."""
    commit(root, "base", epoch=1)
    commit(root, "top", epoch=1, base="base")
    commit(root, "new", epoch=1, turn=1)
    commit(root, "newer", epoch=1, turn=2)
    root.hold("top", "me")
    files.move_dir(root.location("top").directory, f"{ROOT}/checkpoints/.aside-{'0' * 32}-top")
    move = files.move_dir

    def refuse(path: str, target: str) -> None:
        if "/.aside-" in path and path.endswith("-top"):
            raise StateUnwritable(f"cannot move {path!r}: Input/output error (EIO)")
        move(path, target)

    files.move_dir = refuse  # type: ignore[method-assign]
    outcome = pruned(root, Retention(keep_last=1))
    assert any("EIO" in failure for failure in outcome.failures)
    assert [each.name for each in outcome.removed] == ["new"]
    files.move_dir = move  # type: ignore[method-assign]
    assert prune(root, Retention(keep_last=1)) == ["base", "newer", "top"]
    assert faults(root, "top") == []


def test_it_can_be_stopped_and_the_next_one_goes_on(root: CheckpointRoot, files: RecordingFiles) -> None:
    put(root, "a", "b", "c", "d")
    plan = plan_retention(root, Retention(keep_last=1), epoch=1)
    stop = StopFlag()

    def stopping(step: Any) -> None:
        if step.kind == "remove" and "-b/" in step.path:
            stop.stop()

    files.before = stopping
    outcome = apply_retention(root, plan, stop=stop)
    assert [each.name for each in outcome.removed] == ["c"]
    assert "stopped" in outcome.failures[0]
    assert {entry.publication.checkpoint_id for entry in root.published()} == {"d", "a"}
    again = pruned(root, Retention(keep_last=1))
    assert again.finished == ("b",)
    assert files.names(f"{ROOT}/checkpoints") == ["d"]


def test_one_that_cannot_be_removed_does_not_stop_the_others(root: CheckpointRoot, files: RecordingFiles) -> None:
    put(root, "a", "b", "c", "d")
    move = files.move_dir

    def refuse(path: str, target: str) -> None:
        if path.endswith("/b"):
            raise StateUnwritable(f"cannot move {path!r}: Permission denied (EACCES)")
        move(path, target)

    files.move_dir = refuse  # type: ignore[method-assign]
    outcome = pruned(root, Retention(keep_last=1))
    assert {each.name for each in outcome.removed} == {"a", "c"}
    assert len(outcome.failures) == 1
    assert "EACCES" in outcome.failures[0]


@pytest.mark.behaviour("C229")
@pytest.mark.parametrize("where", ["published", "orphan", "foreign"])
def test_a_directory_that_cannot_be_read_keeps_its_own_checkpoint_and_no_other(
    root: CheckpointRoot, files: RecordingFiles, where: str
) -> None:
    put(root, "a", "published", "c", "d")
    unfinished(root, "orphan", epoch=1)
    unfinished(root, "foreign", epoch=1, controller="elsewhere")
    root.sequence.claim("ctl", "run")
    closed = f"{root.location(where).directory}/participants"
    names = files.names

    def refuse(path: str) -> list[str]:
        if path.startswith(closed):
            raise StateCorrupt(f"cannot read {path!r}: Permission denied (EACCES)")
        return names(path)

    files.names = refuse  # type: ignore[method-assign]
    plan = plan_retention(root, Retention(keep_last=1), epoch=2, grace=0.0)
    told = [*plan.published, *plan.unpublished, *plan.files]
    (kept,) = [each for each in told if each.name == where]
    assert not kept.removed
    assert "none of ours" in kept.reason if where == "foreign" else "EACCES" in kept.reason
    outcome = apply_retention(root, plan)
    assert {"a", "c"} <= {each.name for each in outcome.removed}
    assert where in files.names(f"{ROOT}/checkpoints")


# ---- on a real disk


def test_a_real_disk_tells_ages_and_an_unreadable_directory_is_left(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path / "root"), LocalFiles())
    root.preflight()
    root.sequence.claim("ctl", "run")
    put(root, "one", "two")
    for name in ("old", "young"):
        unfinished(root, name, epoch=1)
    for directory, _, names in os.walk(root.location("old").directory):
        for name in names:
            os.utime(f"{directory}/{name}", (1.0, 1.0))
    root.sequence.claim("ctl", "run")
    outcome = pruned(root, Retention(keep_last=1), epoch=2, grace=HOUR)
    assert outcome.failures == ()
    assert sorted(os.listdir(tmp_path / "root" / "checkpoints")) == ["two", "young"]
    assert not [name for name in os.listdir(tmp_path / "root") if name.startswith(".tmp")]


# ---- staged tokens


def test_which_staged_tokens_the_checkpoints_of_a_root_name(root: CheckpointRoot, files: RecordingFiles) -> None:
    put(root, "one", "two", "three")
    assert staging_keys(root) == {"r/one", "r/two", "r/three"}
    prune(root, Retention(keep_last=2))
    assert staging_keys(root) == {"r/two", "r/three"}
    files.damage(root.location("two").aggregate, b"junk")
    with pytest.raises(StateCorrupt, match="two"):
        staging_keys(root)


def test_tokens_of_a_checkpoint_whose_removal_may_be_taken_back_are_not_forgotten(
    root: CheckpointRoot, files: RecordingFiles
) -> None:
    """It is aside at any of the looks, and has its name back at the next one."""
    put(root, "one", "two", "three")
    there, aside = root.location("one").directory, f"{ROOT}/checkpoints/.aside-{'0' * 32}-one"
    for at in itertools.count(1):
        looks = itertools.count(1)
        exists, names, opened, number = files.exists, files.names, files.open, 0

        def seen(look: Callable[[str], Any], path: str) -> Any:
            nonlocal number
            number = next(looks)  # noqa: B023
            if number == at:  # noqa: B023
                files.move_dir(there, aside)
            elif number == at + 1:  # noqa: B023
                files.move_dir(aside, there)
            return look(path)

        files.exists = partial(seen, exists)  # type: ignore[method-assign]
        files.names = partial(seen, names)  # type: ignore[method-assign]
        files.open = partial(seen, opened)  # type: ignore[method-assign]
        try:
            assert "r/one" in staging_keys(root)
        except (StateCorrupt, StateNotFound):
            pass
        finally:
            files.exists, files.names, files.open = exists, names, opened  # type: ignore[method-assign]
        if names(aside):
            files.move_dir(aside, there)
        if number < at:
            break
    files.move_dir(there, aside)
    with pytest.raises(StateCorrupt, match="one"):
        staging_keys(root)


@pytest.mark.behaviour("C229")
@pytest.mark.parametrize("story", range(4))
def test_whatever_is_listed_is_whole_after_every_prune_of_a_random_history(root: CheckpointRoot, story: int) -> None:
    """Full and incremental checkpoints, holds, pins, new epochs, crashed runs, and prunes under every policy."""
    seed = f"{story} {random.randrange(2**32)}"
    print(f"seed {seed}")
    rng, epoch, held = random.Random(seed), 1, set()
    for step in range(25):
        kind = rng.choice(["commit", "commit", "commit", "hold", "release", "pin", "claim", "prune", "prune"])
        listed = [entry.publication.checkpoint_id for entry in root.published()]
        if kind == "commit" or not listed:
            base = rng.choice(["", *listed[:1] * 3])  # the newest one, or none
            commit(root, f"ck-{step:02}", epoch=epoch, turn=rng.randrange(4), base=base)
        elif kind == "hold":
            held.add(root.hold(rng.choice(listed), rng.choice("ab")))
        elif kind == "release" and held:
            hold = held.pop()
            root.release(hold.checkpoint_id, hold.name)
        elif kind == "pin":
            root.pin(rng.choice(listed), epoch=epoch)
        elif kind == "claim":
            unfinished(root, f"lost-{step:02}", epoch=epoch)
            epoch = root.sequence.claim("ctl", "run").epoch
        policy = Retention(keep_last=rng.randint(1, 3), keep_every=rng.choice([0, 0, 3, 5]))
        if kind == "prune":
            there = prune(root, policy, epoch=rng.choice([epoch, None]))
            assert not [name for name in there if name.startswith(".")]
            assert {hold.checkpoint_id for hold in held} <= set(there)
            assert set(listed[: policy.keep_last]) <= set(there)
        for entry in root.published():
            assert faults(root, entry.publication.checkpoint_id) == [], entry.publication
    assert prune(root, Retention(keep_last=1), epoch=epoch)


def test_a_commit_is_whole_after_every_prune(root: CheckpointRoot) -> None:
    for turn, name in enumerate("abcdefg"):
        commit(root, name, epoch=1, turn=turn)
        prune(root, Retention(keep_last=2))
        for entry in root.published():
            assert faults(root, entry.publication.checkpoint_id) == []
    assert [entry.publication.checkpoint_id for entry in root.published()] == ["g", "f"]
