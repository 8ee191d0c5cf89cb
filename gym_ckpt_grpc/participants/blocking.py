"""What holds up a Prepare, kept so that counting is O(1) and the oldest come first at no cost."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import Blocker, BlockerReason

Clock = Callable[[], float]
"""Seconds of a monotonic clock."""


@dataclass(slots=True)
class Entry:
    """One blocking execution. since: clock seconds at which it began to block."""

    reason: BlockerReason
    episode: EpisodeId | None
    place: str
    since: float


class Blocking:
    """An insertion-ordered map of what blocks. A token that already blocks keeps its age and its place."""

    __slots__ = ("_clock", "_entries")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[Hashable, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, token: Hashable) -> bool:
        return token in self._entries

    def set(self, token: Hashable, reason: BlockerReason, episode: EpisodeId | None, place: str = "") -> None:
        """Block, or go on blocking for another reason."""
        entry = self._entries.get(token)
        if entry is None:
            self._entries[token] = Entry(reason, episode, place, self._clock())
        else:
            entry.reason, entry.episode, entry.place = reason, episode, place

    def clear(self, token: Hashable) -> None:
        """Block no more; harmless if it did not."""
        self._entries.pop(token, None)

    def oldest(self, limit: int) -> tuple[Blocker, ...]:
        """At most `limit` blockers, oldest first. Costs those listed, not all."""
        now = self._clock()
        return tuple(_blocker(entry, now) for entry in itertools.islice(self._entries.values(), limit))

    def episodes(self) -> Iterator[EpisodeId]:
        """The episodes that block, each once, oldest first."""
        return iter(dict.fromkeys(entry.episode for entry in self._entries.values() if entry.episode is not None))


def _blocker(entry: Entry, now: float) -> Blocker:
    return Blocker(entry.reason, max(0.0, now - entry.since), entry.episode, "", entry.place)


def oldest_of(limit: int, *sets: Blocking) -> tuple[Blocker, ...]:
    """The oldest blockers of several sets, which is what one owner reports."""
    merged = heapq.merge(*(each.oldest(limit) for each in sets), key=attrgetter("age"), reverse=True)
    return tuple(itertools.islice(merged, limit))
