"""Blackjack on the real `gymnasium` package, as a resources server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.minigym import blackjack
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer, UnknownSession, built_aside
from gym_ckpt_grpc.participants import ResourcesMode, RestoredState, VerifyMode


class BlackjackServer(ResourcesServer):
    """Several games per session. Setup: `seed` of the cards, number of `games`."""

    checkpoint_mode = ResourcesMode.EXPORTED
    checkpoint_verify = VerifyMode.WAIT
    name = "blackjack"
    tools = blackjack.TOOLS

    def __init__(self) -> None:
        self._sessions = blackjack.BlackjackSessions()

    def open(self, session_id: str, setup: Mapping[str, Any]) -> None:
        self._sessions.close(session_id)
        self._sessions.open(session_id, seed=setup["seed"], games=setup["games"])

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self._sessions.call(session_id, tool, arguments)
        except blackjack.UnknownSession as error:
            raise UnknownSession(str(error)) from error

    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        try:
            session = self._sessions.get(session_id)
        except blackjack.UnknownSession as error:
            raise UnknownSession(str(error)) from error
        return session.reward, session.export()

    def close(self, session_id: str) -> None:
        self._sessions.close(session_id)

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        return {each: self._sessions.export(each) for each in session_ids if each in self._sessions}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        checked = built_aside(sessions, self._sessions.stage)
        for session_id, session in checked.items():
            self._sessions.install(session_id, session)
