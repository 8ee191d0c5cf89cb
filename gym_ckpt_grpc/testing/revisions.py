"""Whether a server's `session_revisions` keeps its promise: a number that does not move when the state did is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gym_ckpt_grpc.storage import PayloadRefused, encode


class RevisedHooks(Protocol):
    """The author's hooks that are looked at, of a resources server or an agent."""

    async def export_sessions(self, ids: Sequence[str], /) -> Mapping[str, Any]: ...

    def session_revisions(self) -> Mapping[str, int]: ...


class RevisionAudit:
    """Compares states with revisions while a test plays with the server.

    audit = RevisionAudit(server)
    for step in play:
        step()
        assert await audit.look() == []

    A participant whose revisions fail this writes old states into its checkpoints, and nothing tells.
    """

    def __init__(self, hooks: RevisedHooks) -> None:
        self._hooks = hooks
        self._known: dict[str, dict[int, bytes]] = {}
        self._last: dict[str, int] = {}

    async def look(self) -> list[str]:
        """What is wrong now, one text for each session. A session that changes meanwhile is looked at the next time."""
        before = dict(self._hooks.session_revisions())
        states = await self._hooks.export_sessions(list(before))
        after = dict(self._hooks.session_revisions())
        found = [self._judge(key, before[key], states) for key in before if before[key] == after.get(key)]
        self._last = before
        return [problem for problem in found if problem]

    def _judge(self, key: str, revision: int, states: Mapping[str, Any]) -> str:
        if type(revision) is not int or not 0 <= revision < 2**64 - 1:
            return f"session {key}: revision {revision!r:.40} is no integer from 0 to 2**64 - 2"
        if key not in states:
            return f"session {key}: session_revisions knows it, export_sessions does not"
        try:
            digest = encode(states[key]).digest()
        except PayloadRefused as refused:
            return f"session {key}: its state cannot be stored: {refused}"
        if self._known.setdefault(key, {}).setdefault(revision, digest) == digest:
            return ""
        if self._last.get(key) == revision:
            return f"session {key}: its state has changed, and its revision is {revision} still"
        return f"session {key}: revision {revision} has come back for another state"
