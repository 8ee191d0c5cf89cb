"""Retention: which checkpoints a policy keeps, what keeps one whatever the policy says, and removing the rest.

Never removed are the newest published checkpoint; what is pinned, held or open; what somebody else may be writing; one
whose files another needs that stays; what cannot be read now; and what has no intent of this root. Where the sequence
has a damaged entry nothing is removed at all, since what is published is not known.

Planning changes nothing; pruning.py does what was planned.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import ControlError, StateNotFound, UsageError
from gym_ckpt_grpc.storage.inventory import Caller, Inventory, Stored, Unpublished, read_inventory
from gym_ckpt_grpc.storage.orphans import StoreClock, age_of, size_of, under_construction
from gym_ckpt_grpc.storage.references import needed
from gym_ckpt_grpc.storage.removal import removing_id
from gym_ckpt_grpc.storage.root import CheckpointRoot

GRACE = 3600.0
"""Seconds that nothing was written to an orphan before it is removed."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which published checkpoints to keep: any that one of these keeps.

    keep_last: the newest ones, at least 1; of those that can be read, since the others stay anyway. keep_every: each
    n-th of all publications ever made, 0 for none; so a choice stays the same while others come and go. keep_within:
    seconds before the newest one's `created`; whose `created` cannot be read is kept. None: no such rule. Raises
    UsageError naming the field.
    """

    keep_last: int = 2
    keep_every: int = 0
    keep_within: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("keep_last", 1), ("keep_every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        if self.keep_within is not None and not _is_duration(self.keep_within):
            raise UsageError(f"keep_within is {self.keep_within!r}; it must be finite and above 0 seconds, or None")

    def kept(self, published: Sequence[Stored]) -> dict[str, str]:
        """What these rules keep of published checkpoints, newest first: id -> why, for people."""
        last = [stored.checkpoint_id for stored in published if stored.manifest][: self.keep_last]
        reasons = {}
        for stored in published:
            if stored.checkpoint_id in last:
                reasons[stored.checkpoint_id] = f"among the last {self.keep_last}"
            elif self.keep_every and stored.place % self.keep_every == 0:
                reasons[stored.checkpoint_id] = f"publication {stored.place}, one of every {self.keep_every}"
            elif self.keep_within is not None and (why := _within(stored, published[0], self.keep_within)):
                reasons[stored.checkpoint_id] = why
        return reasons


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or seconds == length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def _within(stored: Stored, newest: Stored, limit: float) -> str:
    times = [_created(each) for each in (stored, newest)]
    if times[0] is None or times[1] is None:
        return "when it was made cannot be told"
    age = (times[1] - times[0]).total_seconds()
    return f"made within {_span(limit)} of the newest" if age <= limit else ""


def _created(stored: Stored) -> datetime.datetime | None:
    try:
        created = datetime.datetime.fromisoformat(stored.manifest.created if stored.manifest else "")
    except ValueError:
        return None
    return created if created.tzinfo is not None else None


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to become of one checkpoint or file. reason: for people. bytes: of its files, 0 if unknown.

    name: a checkpoint's id, or a file's path from the root. number: of its publication; 0 if it is not published.
    """

    name: str
    removed: bool
    reason: str
    number: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What `pruning.apply` would do, for whom, and the state of the root that it was made from.

    published: newest first. unpublished: directories without a publication. files: left under construction.
    interrupted: names of directories whose removal was begun. problems: why nothing is removed at all, or empty.
    """

    caller: Caller
    inventory: Inventory
    published: tuple[Decision, ...]
    unpublished: tuple[Decision, ...]
    files: tuple[Decision, ...]
    interrupted: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def checkpoints(self) -> tuple[Decision, ...]:
        """All checkpoints to be removed, in that order: what names files of another goes before it."""
        return tuple(each for each in (*self.unpublished, *self.published) if each.removed)


def plan(
    root: CheckpointRoot,
    policy: Retention | None,
    *,
    epoch: int | None,
    open_ids: Collection[str] = (),
    aborted: Collection[str] = (),
    grace: float = GRACE,
) -> Plan:
    """Say what is kept and what would be removed, and why. Changes nothing; blocks.

    policy: None keeps every published checkpoint. epoch: the caller's, or None if it has claimed none. open_ids:
    checkpoints that it has open, or is restoring. aborted: its own that ended unpublished. grace: seconds.

    Raises StaleController if a higher epoch was claimed, StateCorrupt where a directory cannot be read.
    """
    caller, inventory = Caller.of(epoch, open_ids, aborted), read_inventory(root)
    inventory.require_newest(caller)
    problems = inventory.problems(caller)
    clock = StoreClock(root)
    readable = [stored.checkpoint_id for stored in inventory.published if stored.manifest]
    begun, unreadable = under_construction(root, readable)
    kept = (policy.kept(inventory.published) if policy else {}) | {
        checkpoint_id: f"it cannot be read ({problem})" for checkpoint_id, problem in unreadable.items()
    }
    published, unpublished = _decide(root, inventory, kept, caller, clock, grace, unasked=policy is None)
    files = _left_files(root, begun, clock, grace)
    if problems:
        stay = "kept, since what is published is not known"
        published, unpublished, files = (
            [Decision(each.name, False, stay, each.number, each.bytes) for each in decisions]
            for decisions in (published, unpublished, files)
        )
    return Plan(
        caller,
        inventory,
        published=tuple(published),
        unpublished=tuple(unpublished),
        files=tuple(files),
        interrupted=tuple(sorted(name for name in inventory.names if removing_id(name))),
        problems=problems,
    )


def _decide(
    root: CheckpointRoot,
    inventory: Inventory,
    chosen: Mapping[str, str],
    caller: Caller,
    clock: StoreClock,
    grace: float,
    *,
    unasked: bool,
) -> tuple[list[Decision], list[Decision]]:
    """chosen: what rules keep, id -> why. unasked: every published one is kept."""
    reasons: dict[str, str] = {}
    for stored in inventory.published:
        why = inventory.holder(stored.checkpoint_id, caller) or chosen.get(stored.checkpoint_id, "")
        reasons[stored.checkpoint_id] = why or ("nothing was asked to be removed" if unasked else "")
    for directory in inventory.unpublished:
        why = inventory.holder(directory.checkpoint_id, caller)
        reasons[directory.checkpoint_id] = why or _too_young(root, clock, directory, grace)
    staying = [needs for needs in inventory.needs if reasons[needs.checkpoint_id]]
    going = [needs for needs in inventory.needs if not reasons[needs.checkpoint_id]]
    reasons |= needed(staying, going)
    published = [
        Decision(stored.checkpoint_id, not why, why or "no rule keeps it", stored.publication.number, stored.bytes)
        for stored in inventory.published
        for why in [reasons[stored.checkpoint_id]]
    ]
    unpublished = [
        Decision(each.checkpoint_id, not why, why or _orphaned(each), bytes=size_of(root.files, _path(root, each)))
        for each in inventory.unpublished
        for why in [reasons[each.checkpoint_id]]
    ]
    return published, unpublished


def _path(root: CheckpointRoot, directory: Unpublished) -> str:
    return root.location(directory.checkpoint_id).directory


def _orphaned(directory: Unpublished) -> str:
    assert directory.intent is not None
    return f"never published, of epoch {directory.intent.epoch}"


def _too_young(root: CheckpointRoot, clock: StoreClock, directory: Unpublished, grace: float) -> str:
    """Why an orphan has to wait; empty if its time has come."""
    try:
        age = age_of(root, clock, _path(root, directory))
    except ControlError as error:
        return f"not published, and its age cannot be told ({error.message})"
    if age is not None and age < grace:
        return f"not published, written {_span(max(0.0, age))} ago; removed once that is {_span(grace)}"
    return ""


def _left_files(root: CheckpointRoot, begun: Sequence[str], clock: StoreClock, grace: float) -> list[Decision]:
    """Files under construction that are to go, or whose age cannot be told. Younger ones are at work: not listed."""
    found = []
    for path in begun:
        name = path.removeprefix(f"{root.path}/")
        try:
            age = clock.age(path)
        except StateNotFound:
            continue
        except ControlError as error:
            found.append(Decision(name, False, f"its age cannot be told ({error.message})"))
            continue
        if age >= grace:
            found.append(Decision(name, True, "begun and never named", bytes=size_of(root.files, path)))
    return found
