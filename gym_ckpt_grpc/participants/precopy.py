"""`Precopy`: states of sessions that are encoded ahead of a cut, each as of a revision that its author gives.

The one rule: a payload is used only for a session whose revision is the one that was read *before* its state was asked
for. Since a revision differs whenever the state may differ, and none comes back, nothing has changed in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from gym_ckpt_grpc.control.ports import Pace, Precopied
from gym_ckpt_grpc.control.tasks import hook_cancelled
from gym_ckpt_grpc.participants.records import Encoded, payload
from gym_ckpt_grpc.participants.revisions import check_revisions, revision_in
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Payload

log = logging.getLogger(__name__)

MOST = 32
"""Sessions whose states are asked for at a time, at most, while admission is open."""
PIECE = 0.004
"""Seconds of work after which a pass rests."""
A_PASS = 5000
"""Sessions of one pass, at most."""


class ExportHook(Protocol):
    """The part of an author's hooks that is used here. `session_revisions` is looked for by its name."""

    async def export_sessions(self, keys: Sequence[str], /) -> Mapping[str, Any]: ...


class Precopy:
    """Encoded states by session key. what: they are, for errors.

    episode_of: whose a tracked session is; None for one that is unknown or that no checkpoint would export now.
    """

    def __init__(self, hooks: ExportHook | None, episode_of: Callable[[str], EpisodeId | None], what: str) -> None:
        check_revisions(hooks)
        self._hooks = hooks
        self._episode_of = episode_of
        self._what = what
        self._entries: dict[str, Encoded] = {}
        self._bytes = 0
        self._max_bytes = 0  # until a pass says how much
        self._seen: dict[str, int] = {}
        self._waiting: dict[str, None] = {}  # to be encoded once they rest, the longest unchanged first
        self._asked: dict[str, None] = {}  # by the pass under way
        self._size = 1
        self._told: set[str] = set()

    @property
    def possible(self) -> bool:
        """Whether the author gives revisions."""
        return getattr(self._hooks, "session_revisions", None) is not None

    def counts(self) -> dict[str, str]:
        """What is encoded ahead, for GetStatus; nothing without revisions."""
        if not self.possible:
            return {}
        return {"precopied_sessions": str(len(self._entries)), "precopied_bytes": str(self._bytes)}

    def drop(self, key: str) -> None:
        """A session of this key begins, begins anew, or has ended: what is known of its state is not of now."""
        self._asked.pop(key, None)
        self._discard(key)
        if self._max_bytes:  # else no pass comes
            self._waiting[key] = None

    # ---- at a cut

    def revisions(self) -> dict[str, int]:
        """The revisions of this moment; empty without revisions, or if the author fails, which is told once."""
        if not self.possible:
            return {}
        try:
            return dict(self._hooks.session_revisions())  # type: ignore[union-attr]
        except Exception as error:
            self._tell("session_revisions failed", error)
            return {}

    async def cut(self, keys: Sequence[str]) -> Cut:
        """The states of these sessions as of now; the author is asked only for what is not encoded as of now."""
        assert self._hooks is not None
        now, entries = self.revisions(), self._entries
        current: dict[str, Encoded] = {}
        for key in keys:
            entry = entries.get(key)
            if entry is not None and entry.revision == now.get(key):
                current[key] = entry
        asked = [key for key in keys if key not in current]
        states = await self._hooks.export_sessions(asked) if asked else {}
        after = self.revisions() if asked else now
        steady = {key: now[key] for key in asked if revision_in(now, key) is not None and after.get(key) == now[key]}
        return Cut(self, current, states, steady)

    def encode(self, key: str, state: Any, revision: int | None, episode: EpisodeId) -> Encoded:
        """Encode what the author gave at a cut, and keep it. revision: read before it was asked for, and still so.

        Raises HookFailed naming the episode.
        """
        encoded = Encoded(payload(state, episode, self._what), revision)
        if revision is not None:
            self._keep(key, encoded)
        return encoded

    # ---- a pass while admission is open

    async def run(self, pace: Pace) -> Precopied:
        """Encode what has changed and was left alone since the pass before. A session that changes between every two
        passes is not touched; a state that cannot be had or stored waits for the cut, which tells why."""
        if not self.possible:
            return Precopied.NEVER
        self._max_bytes = pace.max_bytes
        with pace.working():
            now, before = self.revisions(), self._seen
            self._seen = now
            restless = 0 if now == before else self._put_back(now, before)
            rested = len(self._waiting) - restless
            ready = list(islice(self._waiting, min(rested, A_PASS)))
        for batch in self._batches(ready):
            if pace.over:
                return Precopied.MORE
            await self._encode_ahead(batch, now, pace)
            self._fit(len(batch), pace.spent)
            await pace.rest()
        if rested > A_PASS:
            return Precopied.MORE
        return Precopied.QUIET if now == before else Precopied.CHANGING

    def _put_back(self, now: Mapping[str, int], before: Mapping[str, int]) -> int:
        """Put sessions that have changed at the end of those that wait; gives how many stand there."""
        restless = 0
        for key, revision in now.items():
            if before.get(key) != revision:
                entry = self._entries.get(key)
                if entry is None or entry.revision != revision:
                    self._discard(key)
                    self._waiting.pop(key, None)
                    self._waiting[key] = None
                    restless += 1
        return restless

    def _batches(self, keys: Sequence[str]) -> Iterator[list[str]]:
        start = 0
        while start < len(keys):
            size = self._size
            yield list(keys[start : start + size])
            start += size

    def _fit(self, done: int, spent: float) -> None:
        """Choose how many sessions come next, so that they take about PIECE; twice as many at most."""
        wanted = int(done * PIECE / spent) if spent > 0 else 2 * done
        self._size = max(1, min(wanted, 2 * self._size, MOST))

    async def _encode_ahead(self, keys: Sequence[str], now: Mapping[str, int], pace: Pace) -> None:
        asked: dict[str, int] = {}
        for key in keys:
            self._waiting.pop(key, None)
            revision = revision_in(now, key)
            if revision is not None and self._episode_of(key) is not None:
                asked[key] = revision
        if not asked:
            return
        self._asked = dict.fromkeys(asked)
        try:
            made = await self._made(asked, pace)
            await pace.digest([encoded.payload for _, encoded in made])
            for key, encoded in made:
                if key in self._asked:  # its session is the same still
                    self._keep(key, encoded)
        except BaseException:
            self._waiting.update(self._asked)  # cancelled in the middle: they are still to be encoded
            raise
        finally:
            self._asked = {}

    async def _made(self, asked: Mapping[str, int], pace: Pace) -> list[tuple[str, Encoded]]:
        """Ask and encode in one go: there is no turn of the loop between what the hook gave and its bytes."""
        assert self._hooks is not None
        made = []
        with pace.working():
            try:
                with hook_cancelled():
                    states = await self._hooks.export_sessions(list(asked))
                for key, revision in asked.items():
                    episode = self._episode_of(key)
                    if key in states and episode is not None and (ahead := self._try(key, states[key], episode)):
                        made.append((key, Encoded(ahead, revision)))
                return made
            except Exception as error:
                self._tell("export_sessions failed while admission was open", error)
        if len(asked) == 1:
            return []
        for key, revision in asked.items():  # one of them is to blame: the others are not to wait for the cut
            made += await self._made({key: revision}, pace)
        return made

    def _try(self, key: str, state: Any, episode: EpisodeId) -> Payload | None:
        try:
            return payload(state, episode, self._what)
        except Exception as error:
            self._tell("a state cannot be stored", error)
            return None

    # ---- inside

    def _keep(self, key: str, encoded: Encoded) -> None:
        """Keep it if there is room and its session is one that a checkpoint would export."""
        self._discard(key)
        size = len(encoded.payload.data)
        if self._bytes + size <= self._max_bytes and self._episode_of(key) is not None:
            self._entries[key] = encoded
            self._bytes += size
            self._waiting.pop(key, None)

    def _discard(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry.payload.data)

    def _tell(self, what: str, error: Exception) -> None:
        """Log a failure of an author's hook the first time; it hinders nothing."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s; what it is about is encoded at the cut: %r", what, error, exc_info=error)


class Cut:
    """States of sessions as of one moment: encoded ahead, or encoded when they are taken."""

    __slots__ = ("_current", "_precopy", "_states", "_steady")

    def __init__(
        self, precopy: Precopy, current: Mapping[str, Encoded], states: Mapping[str, Any], steady: Mapping[str, int]
    ) -> None:
        self._precopy = precopy
        self._current = current
        self._states = states
        self._steady = steady

    def __contains__(self, key: str) -> bool:
        return key in self._current or key in self._states

    def take(self, key: str, episode: EpisodeId) -> Encoded:
        """A session's state, encoded. Raises KeyError if the author gave none, HookFailed naming the episode."""
        found = self._current.get(key)
        return found or self._precopy.encode(key, self._states[key], self._steady.get(key), episode)
