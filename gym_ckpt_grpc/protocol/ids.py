"""Identity: rollouts, attempts, checkpoints, and the text form that travels in paths.

Source of the rules: protocol section 3. An id is safe as a path segment, a header value and a file name
on every system this project runs on, so nothing else has to escape it to be correct.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

MAX_ROLLOUT_ID = 256
MAX_CHECKPOINT_ID = 128
MAX_ATTEMPT = 2**32 - 2  # the next attempt must still fit a uint32

# `\Z`, not `$`: `$` would let a trailing newline through.
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_ATTEMPT_SUFFIX = re.compile(r"(?P<rollout>.+)-a(?P<attempt>[1-9][0-9]*)\Z")


def checkpoint_id_problem(text: str) -> str | None:
    """Say why `text` is no checkpoint id, or None if it is one (1 to 128 safe characters)."""
    return _id_problem(text, MAX_CHECKPOINT_ID)


def rollout_id_problem(text: str) -> str | None:
    """Say why `text` is no rollout id, or None if it is one.

    1 to 256 safe characters; not ending in `-a<N>` (N >= 1, no leading zero), which is how a capture key
    names an attempt.
    """
    problem = _id_problem(text, MAX_ROLLOUT_ID)
    if problem is None and "-a" in text and _ATTEMPT_SUFFIX.match(text):  # the search backtracks over all of it
        return "ends in -a<number>, which names an attempt"
    return problem


def _id_problem(text: str, limit: int) -> str | None:
    if not text:
        return "is empty"
    if len(text) > limit:
        return f"has {len(text)} characters, at most {limit} are allowed"
    if not _SAFE.match(text):
        return "has characters other than A-Z a-z 0-9 . _ - or does not begin with a letter or digit"
    return None


class EpisodeId(msgspec.Struct, frozen=True, order=True, gc=False):
    """One attempt of one rollout.

    rollout_id: see `rollout_id_problem`. attempt: 0 and up; it rises by one per restore or restart.
    Raises ValueError for an illegal id, so that an EpisodeId in hand is always a legal one.
    """

    rollout_id: str
    attempt: int = 0

    def __post_init__(self) -> None:
        if problem := rollout_id_problem(self.rollout_id):
            raise ValueError(f"rollout_id {self.rollout_id[:80]!r} {problem}")
        if not 0 <= self.attempt <= MAX_ATTEMPT:
            raise ValueError(f"attempt {self.attempt} is not in 0..{MAX_ATTEMPT}")

    @property
    def capture_key(self) -> str:
        """The text form: `<rollout_id>` for attempt 0, else `<rollout_id>-a<attempt>`."""
        return self.rollout_id if self.attempt == 0 else f"{self.rollout_id}-a{self.attempt}"

    @classmethod
    def from_capture_key(cls, key: str) -> EpisodeId:
        """Convert a capture key back; raises ValueError if it is none."""
        if match := _ATTEMPT_SUFFIX.match(key):
            return cls(match["rollout"], int(match["attempt"]))
        return cls(key)

    def next(self) -> EpisodeId:
        """The attempt that a restore of this one installs, unless it names a higher one."""
        return EpisodeId(self.rollout_id, self.attempt + 1)

    def __str__(self) -> str:
        return self.capture_key


_SOME = EpisodeId("some")
_CHARACTERS = f"{string.ascii_letters}{string.digits}._-".encode()
_BAD_START = re.compile(rb"\n[^A-Za-z0-9]")


def episode_ids(rollout_ids: Sequence[str], attempts: Sequence[int]) -> list[EpisodeId]:
    """The EpisodeId of each pair of two columns of one length, checked as every one is, at a third of the time.

    Raises ValueError for the first illegal one.
    """
    if len(rollout_ids) != len(attempts):
        raise ValueError(f"{len(rollout_ids)} rollout ids and {len(attempts)} attempts")
    if not (_all_plain(rollout_ids) and min(attempts) >= 0 and max(attempts) <= MAX_ATTEMPT):
        return [EpisodeId(*pair) for pair in zip(rollout_ids, attempts, strict=True)]
    copy, change = cast(Any, _SOME).__copy__, msgspec.structs.force_setattr  # what a copy gets was checked above
    found: list[EpisodeId] = []
    for rollout_id, attempt in zip(rollout_ids, attempts, strict=True):
        episode = copy()
        change(episode, "rollout_id", rollout_id)
        if attempt:
            change(episode, "attempt", attempt)
        found.append(episode)
    return found


def _all_plain(rollout_ids: Sequence[str]) -> bool:
    """Whether all of them are rollout ids that need no closer look, without a look at each; False if there is none.

    A name that could end like an attempt needs one.
    """
    lines = "\n".join(rollout_ids)
    if not rollout_ids or "-a" in lines or not lines.isascii() or max(map(len, rollout_ids)) > MAX_ROLLOUT_ID:
        return False
    data = lines.encode()
    used = data.translate(None, delete=_CHARACTERS)  # the line ends, and whatever does not belong there
    return used == b"\n" * (len(rollout_ids) - 1) and _BAD_START.search(b"\n" + data + b"\n") is None


@dataclass(frozen=True, slots=True)
class EpisodeScope:
    """Which episodes an operation is about: all of them, or a list (which may be empty).

    Scopes are compared as sets; `all` and an empty list are different. Order is kept for reading only.
    """

    episodes: tuple[EpisodeId, ...] | None
    _members: frozenset[EpisodeId] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_members", frozenset(self.episodes or ()))

    @classmethod
    def all(cls) -> EpisodeScope:
        return cls(None)

    @classmethod
    def of(cls, episodes: Iterable[EpisodeId]) -> EpisodeScope:
        return cls(tuple(episodes))

    @property
    def is_all(self) -> bool:
        return self.episodes is None

    @property
    def members(self) -> frozenset[EpisodeId]:
        """The episodes of a list, empty for `all`; for set operations, which hash none of them anew."""
        return self._members

    def __contains__(self, episode: EpisodeId) -> bool:
        return self.episodes is None or episode in self._members

    def __iter__(self) -> Iterator[EpisodeId]:
        return iter(self.episodes or ())

    def __len__(self) -> int:
        return len(self.episodes or ())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpisodeScope):
            return NotImplemented
        return self.is_all == other.is_all and self._members == other._members

    def __hash__(self) -> int:
        return hash((self.is_all, self._members))


@dataclass(frozen=True, slots=True)
class RestoreScope:
    """The episodes of a Restore, each with the attempt it is installed as.

    Built by `plan`. `targets` maps a checkpointed episode to its next attempt.
    """

    targets: Mapping[EpisodeId, EpisodeId]

    @classmethod
    def plan(cls, episodes: Iterable[EpisodeId], install_as: Iterable[int] = ()) -> RestoreScope:
        """Pair each episode with its target: `install_as` in the same order, or attempt + 1 for all.

        Raises ValueError if the lengths differ, a target is not above its source, or a rollout stands twice.
        """
        sources = tuple(episodes)
        attempts = tuple(install_as) or tuple(source.attempt + 1 for source in sources)
        if len(attempts) != len(sources):
            raise ValueError(f"install_as has {len(attempts)} entries for {len(sources)} episodes")
        targets: dict[EpisodeId, EpisodeId] = {}
        rollouts: set[str] = set()
        for source, attempt in zip(sources, attempts, strict=True):
            if attempt <= source.attempt:
                raise ValueError(f"install_as {attempt} of {source} is not above its attempt")
            if source.rollout_id in rollouts:
                raise ValueError(f"rollout {source.rollout_id} stands twice in the scope")
            rollouts.add(source.rollout_id)
            targets[source] = EpisodeId(source.rollout_id, attempt)
        return cls(targets)

    def __contains__(self, episode: EpisodeId) -> bool:
        return episode in self.targets

    def __len__(self) -> int:
        return len(self.targets)
