"""What can be interrupted: each history is a root as it was, something done to it, and what may be seen meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import pytest

from gym_ckpt_grpc.protocol.errors import StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    FileLayer,
    IdentityBlock,
    Intent,
    Retention,
    apply_retention,
    chunk_writer,
    delete_checkpoint,
    finish_deletions,
    plan_retention,
    read_part,
)
from gym_ckpt_grpc.storage.files import read_file
from gym_ckpt_grpc.storage.names import is_temporary, temporary_name
from tests.storage.builders import AGENT, COUNTER, commit, complete, faults, make_records, write
from tests.storage.recording_files import ROOT, Loss, RecordingFiles

TURNS = {"first": 0, "second": 1, "third": 2, "fourth": 3}
"""The state that each checkpoint of these histories has, whoever writes it."""


@dataclass(frozen=True)
class History:
    """prepare: what was done before, under epoch 1. act: what is interrupted, given the epoch; again is fine.

    before, after: the published checkpoints, newest first. clean: it leaves no file under construction, and nothing
    half removed.
    """

    name: str
    prepare: Callable[[CheckpointRoot], object]
    act: Callable[[CheckpointRoot, int], object]
    before: tuple[str, ...]
    after: tuple[str, ...]
    clean: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Recorded:
    """A history that was played to its end. start: the number of steps before `act`."""

    files: RecordingFiles
    start: int

    @property
    def counts(self) -> range:
        """How many steps an interruption may leave."""
        return range(self.start, len(self.files.steps) + 1)

    def anew(self) -> CheckpointRoot:
        """The root as it was before `act`."""
        return CheckpointRoot(ROOT, self.files.image(self.start, Loss.CRASH))


@cache
def record(history: History) -> Recorded:
    """Play a history without any interruption."""
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    history.prepare(root)
    start = len(files.steps)
    history.act(root, epoch_of(root))
    return Recorded(files, start)


def epoch_of(root: CheckpointRoot) -> int:
    """The epoch of whoever acts: the newest."""
    return root.sequence.epoch()[0]


def _save(checkpoint_id: str, *, base: str = "", compress: bool = False) -> Callable[[CheckpointRoot, int], object]:
    return lambda root, epoch: commit(
        root, checkpoint_id, epoch=epoch, turn=TURNS[checkpoint_id], base=base, compress=compress
    )


def _save_with_write_back(root: CheckpointRoot, epoch: int) -> None:
    """The second, with its file sent on its way to the disk after every few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_writer, "_WRITE_BACK", 100)
        _save("second")(root, epoch)


def _saved(*checkpoint_ids: str) -> Callable[[CheckpointRoot], object]:
    return lambda root: [_save(checkpoint_id)(root, 1) for checkpoint_id in checkpoint_ids]


def _chained(root: CheckpointRoot) -> None:
    """The second and third refer to the first."""
    _save("first")(root, 1)
    _save("second", base="first")(root, 1)
    _save("third", base="second")(root, 1)


def _ready(root: CheckpointRoot) -> None:
    """The second is complete, and nobody published it."""
    _save("first")(root, 1)
    complete(root, "second", epoch=1, turn=1)


def _publish(root: CheckpointRoot, epoch: int) -> None:
    root.publish("second", root.find("second").manifest_digest, epoch=epoch)


def _delete(*checkpoint_ids: str) -> Callable[[CheckpointRoot, int], object]:
    def act(root: CheckpointRoot, epoch: int) -> None:
        for name in checkpoint_ids:
            delete_checkpoint(root, name, epoch=epoch)

    return act


def _intend(root: CheckpointRoot, name: str) -> None:
    members = (IdentityBlock.of(AGENT), IdentityBlock.of(COUNTER))
    root.write_intent(Intent(checkpoint_id=name, run_id="run", controller_id="ctl", epoch=1, members=members))


def _with_orphan(root: CheckpointRoot) -> None:
    """The second was given up half way: an intent, one part, no aggregate manifest."""
    _save("first")(root, 1)
    _intend(root, "second")
    write(root.files, root, "second", records=make_records(turn=1))


def _delete_orphan(root: CheckpointRoot, epoch: int) -> None:
    try:
        delete_checkpoint(root, "second", epoch=epoch)
    except StateNotFound:
        finish_deletions(root)


def _hold(root: CheckpointRoot, epoch: int) -> None:
    root.pin("first", epoch=epoch)


def _held(root: CheckpointRoot) -> None:
    _saved("first", "second")(root)
    root.pin("first", epoch=1)


def _let_go(root: CheckpointRoot, epoch: int) -> None:
    for pin in root.pins():
        root.unpin(pin)


def _hold_by_name(root: CheckpointRoot, epoch: int) -> None:
    root.hold("first", "eval")


def _release(root: CheckpointRoot, epoch: int) -> None:
    root.release("first", "eval")


def _held_by_name(root: CheckpointRoot) -> None:
    _saved("first", "second")(root)
    root.hold("first", "eval")


def retain(policy: Retention | None) -> Callable[[CheckpointRoot, int], object]:
    """Plan and apply a retention without any grace. Raises StateUnwritable with what failed, or was left undecided."""

    def act(root: CheckpointRoot, epoch: int) -> None:
        plan = plan_retention(root, policy, epoch=epoch, grace=0.0)
        undecided = [each.reason for each in (*plan.unpublished, *plan.files) if "cannot be told" in each.reason]
        outcome = apply_retention(root, plan)
        if outcome.failures or undecided:
            raise StateUnwritable("; ".join((*outcome.failures, *undecided)))

    return act


def _littered(root: CheckpointRoot) -> None:
    """Three published ones of which the newest stands alone, a half-written one, and what killed writers leave."""
    _save("first")(root, 1)
    _save("second", base="first")(root, 1)
    _save("third")(root, 1)
    _intend(root, "fourth")
    write(root.files, root, "fourth", records=make_records(turn=TURNS["fourth"]), base=root.location("second"))
    part = root.location("third").part(AGENT.place)
    for directory in (root.path, f"{root.path}/sequence", part.directory):
        sink = root.files.create(f"{directory}/{temporary_name()}")
        sink.write(b"half of it")
        sink.close()
    root.sequence.claim("next", "run")


CHAIN = ("third", "second", "first")
HISTORIES = (
    History("commit", _saved("first"), _save("second"), ("first",), ("second", "first")),
    History("commit-on-base", _saved("first"), _save("second", base="first"), ("first",), ("second", "first")),
    History("commit-zstd", _saved("first"), _save("second", compress=True), ("first",), ("second", "first")),
    History("commit-write-back", _saved("first"), _save_with_write_back, ("first",), ("second", "first")),
    History("first-commit", lambda root: None, _save("first"), (), ("first",)),
    History("publish", _ready, _publish, ("first",), ("second", "first")),
    History("claim", _saved("first"), lambda root, epoch: root.sequence.claim("b", "run"), ("first",), ("first",)),
    History(
        "delete",
        _saved("first", "second", "third"),
        _delete("first", "second"),
        ("third", "second", "first"),
        ("third",),
    ),
    History("delete-orphan", _with_orphan, _delete_orphan, ("first",), ("first",)),
    History("pin", _saved("first", "second"), _hold, ("second", "first"), ("second", "first")),
    History("unpin", _held, _let_go, ("second", "first"), ("second", "first")),
    History("hold", _saved("first", "second"), _hold_by_name, ("second", "first"), ("second", "first")),
    History("release", _held_by_name, _release, ("second", "first"), ("second", "first")),
    History("retain", _littered, retain(Retention(keep_last=1)), ("third", "second", "first"), ("third",), clean=True),
    History("retain-chain", _chained, retain(Retention(keep_last=1)), CHAIN, ("third", "first"), clean=True),
    History("tidy", _littered, retain(None), CHAIN, CHAIN, clean=True),
)


def check(history: History, root: CheckpointRoot, *, finished: bool) -> None:
    """The newest published checkpoint is whole, so is every other one, and nothing half-written is picked."""
    listed = list(root.published())
    assert [entry.problem for entry in listed if entry.problem] == []
    ids = tuple(entry.publication.checkpoint_id for entry in listed)
    assert ids == tuple(name for name in max(history.before, history.after, key=len) if name in ids), "the order"
    assert set(history.before) & set(history.after) <= set(ids) <= set(history.before) | set(history.after)
    if finished:
        assert ids == history.after
    if ids or history.before:
        assert root.find().location.checkpoint_id == ids[0]
    for name in ids:
        assert faults(root, name) == []
    check_named(root)
    for name in set(TURNS) - set(ids):
        check_unpublished(root, name)


def check_clean(root: CheckpointRoot) -> None:
    """No file under construction anywhere, and nothing half removed."""
    assert temporaries(root.files, root.path) == []
    assert [name for name in root.files.names(f"{root.path}/checkpoints") if name.startswith(".")] == []


def check_named(root: CheckpointRoot) -> None:
    """LATEST names something published, if it is there at all."""
    with suppress(StateNotFound):
        named = json.loads(read_file(root.files, root.sequence.latest_path, limit=1 << 20))
        assert named["checkpoint_id"] in {entry.checkpoint_id for entry in root.sequence.publications()}


def check_unpublished(root: CheckpointRoot, name: str) -> None:
    """It is there as a whole or not at all, as a checkpoint and part by part."""
    location = root.location(name)
    with suppress(StateNotFound):
        root.find(name)
        assert faults(root, name) == []
    for identity, count in ((AGENT, 4), (COUNTER, 2)):
        with suppress(StateNotFound):
            part = read_part(root.files, location, identity.place, checkpoint_id=name)
            assert list(part.records) == make_records(turn=TURNS[name])[:count]


def temporaries(files: FileLayer, below: str) -> list[str]:
    """Files under construction that nobody removed."""
    found: list[str] = []
    for name in files.names(below):
        path = f"{below}/{name}"
        if files.is_dir(path):
            found += temporaries(files, path)
        elif is_temporary(name):
            found.append(path)
    return found
