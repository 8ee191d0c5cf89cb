"""The numbered sequence of a root: epoch claims, releases and publications (coordination sections 8 and 9).

Entries are create-only, without gaps, from 1. Claiming and publishing both need the next number, so they
exclude each other. An entry that cannot be read is passed over by readers and reported by `problems`; a
writer refuses to go on over one that no later claim has been made in sight of, since it could hold a higher
epoch.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InvalidArgument,
    PublishUnknown,
    StaleController,
    StateCorrupt,
    StateNotFound,
    StateUnwritable,
)
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.documents import Document
from gym_ckpt_grpc.storage.files import FileLayer, NameTaken
from gym_ckpt_grpc.storage.part_manifest import Count
from gym_ckpt_grpc.storage.placing import replace_hint, sync_up, write_temporary

_WIDTH = 12
_MAX_MISSING = 10_000  # entries that damage may have taken; a number beyond is a stray file's
_TRIES = 1000  # of losing the next number to somebody else


class Entry(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry.

    kind: `claim` (controller_id, run_id), `release`, or `publication` (checkpoint_id, manifest_digest: the
    sha256 of its checkpoint.json). nonce: tells a writer its own entry from an equal one.
    """

    FORMAT: ClassVar[str] = "gymckpt.sequence"

    format: str = "gymckpt.sequence"
    schema_version: int = 1
    kind: Literal["claim", "release", "publication"]
    number: Annotated[int, msgspec.Meta(ge=1)]
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    controller_id: str = ""
    run_id: str = ""
    checkpoint_id: str = ""
    manifest_digest: str = ""
    nonce: str = ""


class _Latest(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    FORMAT: ClassVar[str] = "gymckpt.latest"

    number: Count
    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class Claim:
    """An epoch that is this process's alone. number: of its entry."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Publication:
    """A published checkpoint. number: of its entry; the newest has the highest."""

    number: int
    epoch: int
    checkpoint_id: str
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class History:
    """What all entries say together.

    last: the highest number. epoch: the highest claimed one, 0 before the first. released: whether it was released.
    claims: epoch -> (controller_id, run_id). publications: oldest first. problems: what is damaged or missing. blind:
    the first problem that no later claim covers.
    """

    last: int
    epoch: int
    released: bool
    claims: Mapping[int, tuple[str, str]]
    publications: tuple[Publication, ...]
    problems: tuple[StateCorrupt, ...]
    blind: StateCorrupt | None

    @property
    def controller_id(self) -> str:
        """Whose the highest epoch is."""
        return self.claims.get(self.epoch, ("", ""))[0]


class Sequence:
    """The sequence of one root. Safe to share between threads and processes; keeps nothing in memory."""

    def __init__(self, files: FileLayer, root: str) -> None:
        self._files = files
        self._root = root
        self.directory = f"{root}/sequence"
        self.latest_path = f"{root}/LATEST"

    def path(self, number: int) -> str:
        """The file of an entry."""
        return f"{self.directory}/{number:0{_WIDTH}d}"

    # ---- reading

    def entries(self) -> Iterator[Entry | StateCorrupt]:
        """Every entry in order; an error in the place of one that is damaged or missing.

        Raises StateCorrupt itself only if the directory cannot be read, or has a number that no run of entries leads
        to: whoever counted up to it would not come back.
        """
        numbers = self.numbers()
        last = max(numbers, default=0)
        if last > len(numbers) + _MAX_MISSING:
            raise StateCorrupt(f"{self.path(last)!r} is no entry of a sequence of {len(numbers)}; take it away")
        for number in range(1, last + 1):
            yield self._try_read(number)

    def _try_read(self, number: int) -> Entry | StateCorrupt:
        try:
            return self._read(number)
        except StateCorrupt as error:
            return error
        except StateNotFound as error:
            return StateCorrupt(f"{error.message}, and the sequence has later entries")

    def _read(self, number: int) -> Entry:
        entry, _ = documents.read(self._files, self.path(number), Entry)
        if entry.number != number:
            raise StateCorrupt(f"{self.path(number)!r} is entry {entry.number}")
        if entry.kind == "publication" and not (entry.checkpoint_id and documents.is_digest(entry.manifest_digest)):
            raise StateCorrupt(f"{self.path(number)!r} publishes nothing")
        return entry

    def problems(self) -> list[StateCorrupt]:
        """What is damaged or missing in the sequence, in order."""
        return list(self.history().problems)

    def publications(self) -> tuple[Publication, ...]:
        """All readable publications, newest first."""
        return self.history().publications[::-1]

    def latest(self) -> Publication | None:
        """The newest readable publication, or None. LATEST is a hint where to begin, and never trusted."""
        hint = self._hint()
        newest = self._publication(hint)
        if hint is None or newest is None or newest.checkpoint_id != hint.checkpoint_id:
            return next(iter(self.publications()), None)
        number = hint.number + 1
        while True:
            try:
                entry = self._read(number)
            except StateNotFound:
                break
            except StateCorrupt:
                return next(iter(self.publications()), None)
            newest = _as_publication(entry) or newest
            number += 1
        if any(_is_number(name) and int(name) > number for name in self._files.names(self.directory)):
            return next(iter(self.publications()), None)  # a gap: look at everything
        return newest

    def _publication(self, hint: _Latest | None) -> Publication | None:
        if hint is None:
            return None
        try:
            return _as_publication(self._read(hint.number))
        except (StateNotFound, StateCorrupt):
            return None

    def _hint(self) -> _Latest | None:
        try:
            return documents.read(self._files, self.latest_path, _Latest)[0]
        except (StateNotFound, StateCorrupt):
            return None

    def epoch(self) -> tuple[int, bool]:
        """The highest claimed epoch (0: none yet), and whether it was released."""
        state = self.history()
        return state.epoch, state.released

    def history(self) -> History:
        """Read every entry once. Raises StateCorrupt only if the directory cannot be read."""
        last, epoch, released = 0, 0, False
        blind: StateCorrupt | None = None
        claims: dict[int, tuple[str, str]] = {}
        publications: list[Publication] = []
        problems: list[StateCorrupt] = []
        for entry in self.entries():
            last += 1
            if isinstance(entry, StateCorrupt):
                problems.append(entry)
                blind = blind or entry
                continue
            if entry.kind == "claim":
                blind = None  # whoever made it had read all before it
                claims.setdefault(entry.epoch, (entry.controller_id, entry.run_id))
                if entry.epoch > epoch:
                    epoch, released = entry.epoch, False
            elif entry.kind == "release":
                released = released or entry.epoch == epoch
            elif publication := _as_publication(entry):
                publications.append(publication)
        return History(last, epoch, released, claims, tuple(publications), tuple(problems), blind)

    def numbers(self) -> tuple[int, ...]:
        """The numbers that have an entry, read or not: entries never change, so the same numbers say the same."""
        return tuple(int(name) for name in self._files.names(self.directory) if _is_number(name))

    def _history_for_writing(self) -> History:
        state = self.history()
        if state.blind is not None:
            raise StateCorrupt(
                f"{state.blind.message}; it may hold a higher epoch, so nothing is added to the sequence"
            ) from state.blind
        return state

    # ---- writing

    def claim(self, controller_id: str, run_id: str, *, above: int = 0) -> Claim:
        """Claim a new epoch, higher than every claimed one and than `above` (what participants report).

        No two processes ever get the same. Raises StateCorrupt (an entry that cannot be read),
        StateUnwritable (an epoch may be used up then; claim again).
        """
        for _ in range(_TRIES):
            state = self._history_for_writing()
            entry = Entry(
                kind="claim",
                number=state.last + 1,
                epoch=max(state.epoch, above) + 1,
                controller_id=controller_id,
                run_id=run_id,
                nonce=uuid.uuid4().hex,
            )
            try:
                self._append(entry)
            except NameTaken:
                continue
            except PublishUnknown as error:
                raise StateUnwritable(error.message) from error
            return Claim(entry.epoch, entry.number)
        raise StateUnwritable(f"{self.directory!r}: lost the next number {_TRIES} times")

    def release(self, claim: Claim) -> None:
        """Say that the owner of a claim closed cleanly. Does nothing if it was replaced or released before.

        Raises StateCorrupt, StateUnwritable.
        """
        for _ in range(_TRIES):
            state = self._history_for_writing()
            if state.epoch != claim.epoch or state.released:
                return
            try:
                self._append(Entry(kind="release", number=state.last + 1, epoch=claim.epoch, nonce=uuid.uuid4().hex))
            except NameTaken:
                continue
            except PublishUnknown as error:
                raise StateUnwritable(error.message) from error
            return
        raise StateUnwritable(f"{self.directory!r}: lost the next number {_TRIES} times")

    def publish(self, checkpoint_id: str, manifest_digest: str, *, epoch: int) -> Publication:
        """Publish a complete checkpoint: the commit point.

        The same call again gives the same publication. Raises StaleController if a higher epoch was claimed
        or this one released, CheckpointConflict if the id is published with another manifest, InvalidArgument
        for an epoch nobody claimed, StateUnwritable if nothing was named, StateCorrupt (see `claim`), and
        PublishUnknown if the entry may or may not be there: the same call again finds out.
        """
        if not documents.is_digest(manifest_digest):
            raise InvalidArgument(f"{manifest_digest[:80]!r} is no sha256 in hex")
        for _ in range(_TRIES):
            state = self._history_for_writing()
            if (done := self._published(state, checkpoint_id, manifest_digest)) is not None:
                self._settle(done.number)
                return done
            _check_epoch(state, epoch)
            entry = Entry(
                kind="publication",
                number=state.last + 1,
                epoch=epoch,
                checkpoint_id=checkpoint_id,
                manifest_digest=manifest_digest,
                nonce=uuid.uuid4().hex,
            )
            try:
                self._append(entry)
            except NameTaken:
                continue
            return Publication(entry.number, epoch, checkpoint_id, manifest_digest)
        raise StateUnwritable(f"{self.directory!r}: lost the next number {_TRIES} times")

    def _published(self, state: History, checkpoint_id: str, manifest_digest: str) -> Publication | None:
        for publication in state.publications:
            if publication.checkpoint_id == checkpoint_id:
                if publication.manifest_digest == manifest_digest:
                    return publication
                raise CheckpointConflict(f"{checkpoint_id!r} is published with another manifest")
        return None

    def _settle(self, number: int) -> None:
        """Sync an entry that an earlier try named."""
        try:
            self._files.sync_file(self.path(number))
            sync_up(self._files, self.directory, self._root)
        except StateUnwritable as error:
            raise PublishUnknown(f"entry {number} is there, but not known to last: {error.message}") from error

    def _append(self, entry: Entry) -> None:
        """Create an entry. Raises NameTaken, StateUnwritable (not named), PublishUnknown (perhaps named)."""
        path = self.path(entry.number)
        self._files.make_dirs(self.directory)
        with write_temporary(self._files, self.directory, documents.to_bytes(entry)) as temporary:
            try:
                temporary.publish(path)
                sync_up(self._files, self.directory, self._root)
            except StateUnwritable as error:
                raise PublishUnknown(f"{path!r} may be there or not: {error.message}") from error

    def move_latest(self, publication: Publication) -> bool:
        """Let LATEST name a publication unless it names a later one; says whether. Raises StateUnwritable."""
        hint = self._hint()
        # A hint beyond the sequence itself is damage, not news.
        if hint is not None and hint.number > publication.number and self._publication(hint) is not None:
            return False
        latest = _Latest(
            format=_Latest.FORMAT,
            schema_version=_Latest.VERSION,
            number=publication.number,
            checkpoint_id=publication.checkpoint_id,
        )
        replace_hint(self._files, self.latest_path, documents.to_bytes(latest))
        return True


def _check_epoch(state: History, epoch: int) -> None:
    if epoch < state.epoch:
        raise StaleController(f"epoch {epoch} was replaced by {state.epoch}, of controller {state.controller_id!r}")
    if epoch > state.epoch:
        raise InvalidArgument(f"epoch {epoch} was never claimed here; the last one is {state.epoch}")
    if state.released:
        raise StaleController(f"epoch {epoch} was released")


def _as_publication(entry: Entry) -> Publication | None:
    if entry.kind != "publication":
        return None
    return Publication(entry.number, entry.epoch, entry.checkpoint_id, entry.manifest_digest)


def _is_number(name: str) -> bool:
    return len(name) == _WIDTH and name.isascii() and name.isdecimal() and int(name) > 0
