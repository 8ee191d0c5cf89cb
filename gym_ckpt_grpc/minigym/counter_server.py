"""The counter as a resources server: the template for one with state of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.minigym.counter import TOOLS, CounterSession, CounterSessions
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer, built_aside
from gym_ckpt_grpc.participants import ResourcesMode, RestoredState, VerifyMode


class CounterServer(ResourcesServer):
    """Counts per session. Setup: `target`, at which the reward is 1."""

    checkpoint_mode = ResourcesMode.EXPORTED
    checkpoint_verify = VerifyMode.WAIT
    name = "counter"
    tools = TOOLS

    def __init__(self) -> None:
        self._sessions = CounterSessions()

    def open(self, session_id: str, setup: Mapping[str, Any]) -> None:
        self._sessions.install(session_id, CounterSession())

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._sessions.call(session_id, tool, arguments)

    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        session = self._sessions.get(session_id)
        return session.reward(setup["target"]), {"count": session.count, "increments": session.increments}

    def close(self, session_id: str) -> None:
        self._sessions.close(session_id)

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        return {session_id: self._sessions.export(session_id) for session_id in session_ids}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        checked = built_aside(sessions, CounterSession.from_state)
        for session_id, session in checked.items():
            self._sessions.install(session_id, session)
