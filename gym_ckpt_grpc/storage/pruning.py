"""Removing what retention does not keep, and one checkpoint by its name.

Each checkpoint is looked at again, right before and once more after it was taken out of sight (removal.py), so that a
pin or hold that `CheckpointRoot` has placed meanwhile is obeyed. Several processes may do this at once; one that has
claimed no epoch as well, since it removes unpublished directories of ended epochs only, and of published checkpoints
none that a controller at work could still name: that names the newest one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    ControlError,
    StaleController,
    StateCorrupt,
    StateNotFound,
)
from gym_ckpt_grpc.storage.aggregate import read_aggregate
from gym_ckpt_grpc.storage.inventory import Caller, Inventory, read_inventory
from gym_ckpt_grpc.storage.locations import CHECKPOINTS
from gym_ckpt_grpc.storage.removal import Look, interrupted, remove_directory, removing_id, settle
from gym_ckpt_grpc.storage.retention import Decision, Plan
from gym_ckpt_grpc.storage.root import CheckpointRoot
from gym_ckpt_grpc.storage.stop import StopFlag, WriteStopped


@dataclass(frozen=True, slots=True)
class RetentionOutcome:
    """What was done. removed, kept: checkpoints, as planned or since something came up. files: removed ones.

    finished: ids of removals that an earlier process had begun. failures: for people; the next time tries again.
    """

    removed: tuple[Decision, ...] = ()
    files: tuple[Decision, ...] = ()
    kept: tuple[Decision, ...] = ()
    finished: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def bytes_freed(self) -> int:
        """As far as it is known."""
        return sum(decision.bytes for decision in (*self.removed, *self.files))


def apply(root: CheckpointRoot, plan: Plan, *, stop: StopFlag | None = None) -> RetentionOutcome:
    """Remove what was planned, each after another look; and finish what earlier removals left. Blocks.

    stop: ends it between two files; the next one goes on. Never raises for what fails: that is in the outcome, and so
    is a higher epoch claimed meanwhile, after which nothing more is removed.
    """
    if plan.problems:
        kept = [each for each in (*plan.published, *plan.unpublished) if not each.removed]
        return RetentionOutcome(kept=tuple(kept), failures=plan.problems)
    return _Applying(root, plan, stop).run()


class _Applying:
    def __init__(self, root: CheckpointRoot, plan: Plan, stop: StopFlag | None) -> None:
        self._root = root
        self._plan = plan
        self._inventory = plan.inventory
        self._stop = stop
        self._removed: list[Decision] = []
        self._files: list[Decision] = []
        self._kept = [each for each in (*plan.published, *plan.unpublished) if not each.removed]
        self._finished: list[str] = []
        self._failures: list[str] = []

    def run(self) -> RetentionOutcome:
        try:
            self._refresh()
            for decision in self._plan.checkpoints:
                self._remove(decision)
            self._tidy()
        except (StaleController, StateCorrupt, WriteStopped) as error:
            self._failures.append(f"ended early: {error.message if isinstance(error, ControlError) else error}")
        return RetentionOutcome(
            removed=tuple(self._removed),
            files=tuple(self._files),
            kept=tuple(self._kept),
            finished=tuple(self._finished),
            failures=tuple(self._failures),
        )

    def _refresh(self) -> None:
        """Look again; then settle what other removals have left. Raises StaleController, StateCorrupt, WriteStopped."""
        self._look_again()
        for name in sorted(name for name in self._inventory.names if removing_id(name)):
            with_id = removing_id(name) or name
            try:
                if not settle(self._root, name, self._look, self._stop):
                    self._finished.append(with_id)
            except ControlError as error:
                self._failures.append(f"{with_id} is not gone yet: {error.message}")
            self._look_again()

    def _look_again(self) -> None:
        if self._stop is not None:
            self._stop.check()
        self._inventory = read_inventory(self._root, self._inventory)
        self._inventory.require_newest(self._plan.caller)
        if problems := self._inventory.problems(self._plan.caller):
            raise StateCorrupt(problems[0])

    def _look(self, checkpoint_id: str) -> str:
        self._look_again()
        holder = self._inventory.holder(checkpoint_id, self._plan.caller)
        return holder or self._inventory.needed_by_others(checkpoint_id)

    def _remove(self, decision: Decision) -> None:
        self._refresh()
        try:
            why = self._kept_now(decision) or remove_directory(self._root, decision.name, self._look, self._stop)
        except (StaleController, WriteStopped):
            raise
        except ControlError as error:
            self._failures.append(f"{decision.name} is not gone: {error.message}")
            return
        if why:
            self._kept.append(Decision(decision.name, False, why, decision.number, decision.bytes))
        else:
            self._removed.append(decision)

    def _kept_now(self, decision: Decision) -> str:
        if decision.name not in self._inventory.names:
            return "it is gone: somebody else removed it"
        if not decision.number and self._is_published(decision.name):
            return "it was published meanwhile"
        if why := self._look(decision.name):
            return why
        return _unreadable(self._root, self._inventory, decision.name)

    def _is_published(self, checkpoint_id: str) -> bool:
        return any(each.checkpoint_id == checkpoint_id for each in self._inventory.history.publications)

    def _tidy(self) -> None:
        """Files under construction, and pins that are void."""
        for decision in self._plan.files:
            if not decision.removed:
                continue
            try:
                self._root.files.remove(f"{self._root.path}/{decision.name}")
                self._files.append(decision)
            except ControlError as error:
                self._failures.append(error.message)
        self._look_again()
        for pin in self._inventory.void_pins():
            try:
                self._root.unpin(pin)
            except ControlError as error:
                self._failures.append(error.message)


def _unreadable(root: CheckpointRoot, inventory: Inventory, checkpoint_id: str) -> str:
    """Why a published checkpoint cannot be read now, whatever was read of it before; empty if it can."""
    for stored in inventory.published:
        if stored.checkpoint_id == checkpoint_id:
            try:
                digest = stored.publication.manifest_digest
                read_aggregate(root.files, root.location(checkpoint_id), expected_digest=digest)
            except (StateNotFound, StateCorrupt) as error:
                return f"it cannot be read ({error.message})"
    return ""


# ---- one checkpoint by name


def delete_checkpoint(root: CheckpointRoot, checkpoint_id: str, *, epoch: int, open_ids: Collection[str] = ()) -> None:
    """Delete a checkpoint that nothing holds; one that is deleted already is fine.

    epoch: of the caller. open_ids: checkpoints that it has open, or is restoring. Raises CheckpointConflict naming the
    holder, StateNotFound, StaleController if a higher epoch was claimed, StateCorrupt for a sequence that cannot be
    read, StateUnwritable (the same call again finishes it).
    """
    root.location(checkpoint_id)
    # Named by its own controller, which has it not open: one that is not published is ended.
    caller = Caller.of(epoch, open_ids, [checkpoint_id])

    look = _look_for(root, caller)
    look(checkpoint_id)  # whoever may delete nothing settles nothing either
    _settle_all(root, look)
    if holder := look(checkpoint_id):  # asked anew: what was aside may have needed it
        raise CheckpointConflict(f"checkpoint {checkpoint_id!r} is kept: {holder}")
    if checkpoint_id not in root.files.names(f"{root.path}/{CHECKPOINTS}"):
        if all(each.checkpoint_id != checkpoint_id for each in root.sequence.publications()):
            raise StateNotFound(f"there is no checkpoint {checkpoint_id!r}")
        return
    if holder := remove_directory(root, checkpoint_id, look):
        raise CheckpointConflict(f"checkpoint {checkpoint_id!r} is kept: {holder}")


def finish_deletions(root: CheckpointRoot) -> int:
    """Settle what interrupted removals left; how many are gone by it. Raises StateUnwritable, StateCorrupt."""

    return _settle_all(root, _look_for(root, Caller.of(None)))


def _look_for(root: CheckpointRoot, caller: Caller) -> Look:
    def look(name: str) -> str:
        inventory = read_inventory(root)
        inventory.require_newest(caller)
        if problems := inventory.problems(caller):
            raise StateCorrupt(f"{problems[0]}; what is published is not known, so nothing is deleted")
        return inventory.holder(name, caller) or inventory.needed_by_others(name)

    return look


def _settle_all(root: CheckpointRoot, look: Look) -> int:
    return sum(not settle(root, name, look) for name in interrupted(root))
