"""`SessionTable`: sessions by key and by rollout, and those that a restore installed and nobody has started.

Shared by agent and resources.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from gym_ckpt_grpc.participants.reports import covers
from gym_ckpt_grpc.protocol.ids import EpisodeId


class TrackedSession(Protocol):
    """What the table needs to know of a session."""

    @property
    def key(self) -> str: ...

    @property
    def episode(self) -> EpisodeId | None: ...


S = TypeVar("S", bound=TrackedSession)


class SessionTable(Generic[S]):
    """Sessions by key; a per-rollout index, so that retiring one of many rollouts scans no other.

    turned: told of each key whose session begins or ends.
    """

    def __init__(self) -> None:
        self.turned: Callable[[str], None] = lambda key: None
        self._sessions: dict[str, S] = {}
        self._by_rollout: dict[str, dict[str, S]] = {}
        self._pending: dict[EpisodeId, dict[str, S]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._sessions.values()))

    def get(self, key: str | None) -> S | None:
        """The session, or None."""
        return self._sessions.get(key) if key is not None else None

    def add(self, session: S, *, pending: bool = False) -> None:
        """Track a session. pending: a restore installed it and nobody has started it yet."""
        self._sessions[session.key] = session
        self.turned(session.key)
        if session.episode is not None:
            self._by_rollout.setdefault(session.episode.rollout_id, {})[session.key] = session
            if pending:
                self._pending.setdefault(session.episode, {})[session.key] = session

    def remove(self, session: S) -> None:
        """Track it no more. Harmless if it is not tracked; never touches another session of the same key."""
        if self._sessions.get(session.key) is not session:
            return
        del self._sessions[session.key]
        self.turned(session.key)
        if session.episode is None:
            return
        of_rollout = self._by_rollout[session.episode.rollout_id]
        del of_rollout[session.key]
        if not of_rollout:
            del self._by_rollout[session.episode.rollout_id]
        waiting = self._pending.get(session.episode, {})
        waiting.pop(session.key, None)
        if not waiting:
            self._pending.pop(session.episode, None)

    def of_rollout(self, rollout_id: str) -> list[S]:
        """The sessions of a rollout, any attempt."""
        return list(self._by_rollout.get(rollout_id, {}).values())

    def covered_by(self, retired: EpisodeId) -> list[S]:
        """The sessions that a retire of this attempt frees: its own and those of earlier attempts."""
        return [each for each in self.of_rollout(retired.rollout_id) if each.episode and covers(retired, each.episode)]

    # ---- restored, not started

    def claim(self, episode: EpisodeId) -> None:
        """Something of this episode has started: nothing of it is pending any more."""
        self._pending.pop(episode, None)

    def pending(self) -> Iterable[EpisodeId]:
        """Episodes that a restore installed and nothing has started."""
        return self._pending.keys()

    def pending_sessions(self, episode: EpisodeId) -> list[S]:
        """The sessions of such an episode; none if it has started."""
        return list(self._pending.get(episode, {}).values())

    def is_pending(self, session: S) -> bool:
        """Whether this session was restored and nothing of its episode has started."""
        return session.episode is not None and session.key in self._pending.get(session.episode, {})


async def free_each(sessions: Iterable[S], free: Callable[[S], Awaitable[None]]) -> None:
    """Free every session, whichever of them fails; raises the first failure afterwards."""
    failures: list[Exception] = []
    for session in sessions:
        try:
            await free(session)
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
