"""What is in a root now, and what keeps each checkpoint of it whatever a policy says: one place for that rule.

Read as a whole once, and looked at again before each removal, which is cheap where nothing has changed: entries of the
sequence and manifests are created once and never change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from gym_ckpt_grpc.protocol.errors import StaleController, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem
from gym_ckpt_grpc.storage.aggregate import AggregateManifest, read_aggregate
from gym_ckpt_grpc.storage.holds import Hold
from gym_ckpt_grpc.storage.intent import Intent
from gym_ckpt_grpc.storage.locations import CHECKPOINTS, CheckpointLocation
from gym_ckpt_grpc.storage.pins import Pin
from gym_ckpt_grpc.storage.references import Needs, named_by, named_by_parts, needed
from gym_ckpt_grpc.storage.removal import undecided
from gym_ckpt_grpc.storage.root import CheckpointRoot
from gym_ckpt_grpc.storage.sequence import History, Publication


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is about to remove something.

    epoch: its own, or None if it has claimed none. open_ids: checkpoints that it has open, or is restoring. aborted:
    checkpoints of its own that it has ended unpublished.
    """

    epoch: int | None
    open_ids: frozenset[str] = frozenset()
    aborted: frozenset[str] = frozenset()

    @classmethod
    def of(cls, epoch: int | None, open_ids: Collection[str] = (), aborted: Collection[str] = ()) -> Caller:
        """The same from any collections."""
        return cls(epoch, frozenset(open_ids), frozenset(aborted))


@dataclass(frozen=True, slots=True)
class Stored:
    """A published checkpoint that is there. place: its count among all publications ever made, from 1.

    manifest: None if it cannot be read; problem says why.
    """

    publication: Publication
    place: int
    manifest: AggregateManifest | None
    needs: Needs
    problem: str = ""

    @property
    def checkpoint_id(self) -> str:
        return self.publication.checkpoint_id

    @property
    def bytes(self) -> int:
        """Of the files of all parts; 0 if that is not known."""
        return sum(member.bytes for member in self.manifest.members) if self.manifest else 0


@dataclass(frozen=True, slots=True)
class Unpublished:
    """A directory without a publication. intent: None if it cannot be read, or there is none; problem says so."""

    checkpoint_id: str
    intent: Intent | None
    needs: Needs
    problem: str = ""


@dataclass(frozen=True)
class Inventory:
    """A root at one moment. published: newest first. numbers: of the sequence's entries. names: in `checkpoints`."""

    history: History
    numbers: tuple[int, ...]
    names: frozenset[str]
    pins: tuple[Pin, ...]
    holds: tuple[Hold, ...]
    published: tuple[Stored, ...]
    unpublished: tuple[Unpublished, ...]

    @property
    def newest(self) -> Publication | None:
        """The newest publication, whether its checkpoint can be read or not."""
        return self.history.publications[-1] if self.history.publications else None

    @cached_property
    def needs(self) -> tuple[Needs, ...]:
        """Of everything that is there."""
        return (*(each.needs for each in self.published), *(each.needs for each in self.unpublished))

    def void_pins(self) -> tuple[Pin, ...]:
        """Pins of an epoch below the one that published last: their run is over."""
        return tuple(pin for pin in self.pins if self.newest and pin.epoch < self.newest.epoch)

    def require_newest(self, caller: Caller) -> None:
        """Raise StaleController if a higher epoch than the caller's was claimed."""
        if caller.epoch is not None and self.history.epoch > caller.epoch:
            raise StaleController(f"epoch {caller.epoch} was replaced by {self.history.epoch}")

    def problems(self, caller: Caller) -> tuple[str, ...]:
        """Why it is not known what is published, so that nothing may be removed; empty if it is known."""
        problems = [problem.message for problem in self.history.problems]
        if caller.epoch is not None and self.history.epoch < caller.epoch:
            problems.append(f"the claim of epoch {caller.epoch} is not there")
        return tuple(problems)

    # ---- what keeps one

    def holder(self, checkpoint_id: str, caller: Caller) -> str:
        """What keeps a checkpoint or directory for its own sake, for people; empty if nothing does."""
        if self.newest and checkpoint_id == self.newest.checkpoint_id:
            return "it is the newest published one"
        if why := self.guard(checkpoint_id):
            return why
        if checkpoint_id in caller.open_ids:
            return "it is open"
        for stored in self.published:
            if stored.checkpoint_id == checkpoint_id:
                return f"it cannot be read ({stored.problem})" if stored.problem else ""
        for directory in self.unpublished:
            if directory.checkpoint_id == checkpoint_id:
                return directory.problem or self._owner(directory, caller)
        return ""

    def guard(self, checkpoint_id: str) -> str:
        """Who keeps it from outside: a pin or a hold."""
        void = self.void_pins()
        for pin in self.pins:
            if pin.checkpoint_id == checkpoint_id and pin not in void:
                return f"it is pinned by the restore of epoch {pin.epoch}"
        names = [repr(hold.name) for hold in self.holds if hold.checkpoint_id == checkpoint_id]
        return f"it is held by {', '.join(names)}" if names else ""

    def _owner(self, directory: Unpublished, caller: Caller) -> str:
        """Who else may be at work in an unpublished directory, or own it."""
        intent, history = directory.intent, self.history
        assert intent is not None
        mine = history.epoch if caller.epoch is None else caller.epoch
        if intent.epoch > mine:
            return f"controller {intent.controller_id!r} writes it under epoch {intent.epoch}"
        if history.claims.get(intent.epoch) != (intent.controller_id, intent.run_id):
            return f"it is none of ours (epoch {intent.epoch} of this root is not {intent.controller_id!r}'s)"
        over = history.released if caller.epoch is None else directory.checkpoint_id in caller.aborted
        if intent.epoch == mine and not over:
            return f"controller {intent.controller_id!r} may be writing it, epoch {intent.epoch} is the present one"
        return ""

    def needed_by_others(self, checkpoint_id: str) -> str:
        """Which other checkpoint that is there needs its files, for people; empty if none does."""
        numbers = [each.number for each in self.history.publications if each.checkpoint_id == checkpoint_id]
        mine = Needs(checkpoint_id, numbers[0] if numbers else 0, frozenset())
        others = [each for each in (*self.needs, *self._undecided()) if each.checkpoint_id != checkpoint_id]
        return needed(others, [mine]).get(checkpoint_id, "")

    def _undecided(self) -> list[Needs]:
        """What is aside may come back, so what it may need has to stay until then."""
        numbers = {each.checkpoint_id: each.number for each in self.history.publications}
        return [Needs(each, numbers.get(each, self.history.last + 1), None) for each in undecided(self.names)]


def read_inventory(root: CheckpointRoot, known: Inventory | None = None) -> Inventory:
    """Read what is in a root. known: an earlier one, of which is kept what cannot have changed.

    Raises StateCorrupt where a directory cannot be read: nothing is known then.
    """
    numbers = root.sequence.numbers()
    history = known.history if known and known.numbers == numbers else root.sequence.history()
    # Pins and holds come after what they may be about: one placed meanwhile is seen.
    names = frozenset(root.files.names(f"{root.path}/{CHECKPOINTS}"))
    before: dict[str, Stored | None] = {}
    if known:
        before = dict.fromkeys((each.checkpoint_id for each in known.history.publications), None)
        before |= {each.checkpoint_id: each for each in known.published}
    published = [
        stored
        for place, publication in enumerate(history.publications, 1)
        if (stored := _stored(root, publication, place, names, before, newest=place == len(history.publications)))
    ]
    ids = {publication.checkpoint_id for publication in history.publications}
    directories = sorted(name for name in names - ids if not checkpoint_id_problem(name))
    unpublished = [_unpublished(root, name) for name in directories]
    return Inventory(history, numbers, names, root.pins(), root.holds(), tuple(reversed(published)), tuple(unpublished))


def _stored(
    root: CheckpointRoot,
    publication: Publication,
    place: int,
    names: frozenset[str],
    before: Mapping[str, Stored | None],
    *,
    newest: bool,
) -> Stored | None:
    """None for one that was deleted: no name in the directory, and nothing to open; the newest is missing then.

    before: what is known of earlier ones, None for one that was deleted.
    """
    checkpoint_id = publication.checkpoint_id
    there = checkpoint_id in names or newest
    earlier = before.get(checkpoint_id)
    if there and earlier and not earlier.problem:
        return earlier
    if not there and earlier is None and checkpoint_id in before:
        return None
    if problem := checkpoint_id_problem(checkpoint_id):
        needs = Needs(checkpoint_id, publication.number, frozenset())
        return Stored(publication, place, None, needs, f"its id {problem}")
    location = CheckpointLocation(root.path, checkpoint_id)
    try:
        manifest, _ = read_aggregate(root.files, location, expected_digest=publication.manifest_digest)
    except (StateNotFound, StateCorrupt) as error:
        if isinstance(error, StateNotFound) and not there:
            return None
        needs = Needs(checkpoint_id, publication.number, named_by_parts(root.files, location))
        return Stored(publication, place, None, needs, error.message)
    return Stored(publication, place, manifest, Needs(checkpoint_id, publication.number, named_by(manifest)))


def _unpublished(root: CheckpointRoot, checkpoint_id: str) -> Unpublished:
    nothing = Needs(checkpoint_id, 0, frozenset())
    try:
        intent = root.read_intent(checkpoint_id)
    except StateNotFound as error:
        return Unpublished(checkpoint_id, None, nothing, f"it is none of ours ({error.message})")
    except StateCorrupt as error:
        return Unpublished(checkpoint_id, None, nothing, f"it cannot be read ({error.message})")
    named = named_by_parts(root.files, CheckpointLocation(root.path, checkpoint_id))
    return Unpublished(checkpoint_id, intent, Needs(checkpoint_id, 0, named))
