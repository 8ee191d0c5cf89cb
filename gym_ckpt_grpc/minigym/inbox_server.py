"""The injection inbox as a resources server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from gym_ckpt_grpc.minigym.inbox import FOLDERS, PEOPLE, Inbox
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer, UnknownSession, built_aside, choice_tool, session_of
from gym_ckpt_grpc.participants import ResourcesMode, RestoredState, VerifyMode

TONES = ("thanks", "yes", "no")


TOOLS: tuple[dict[str, Any], ...] = (
    choice_tool("read", "Open the next unread mail of a folder.", "folder", FOLDERS),
    choice_tool("move", "Move the open mail to a folder.", "folder", FOLDERS),
    choice_tool("reply", "Answer the open mail.", "tone", TONES),
    choice_tool("forward", "Send the open mail to somebody.", "to", PEOPLE),
)
"""The tools as offered to the model."""


class InboxServer(ResourcesServer):
    """A mailbox per session. Setup: `seed` of the order of its mails."""

    checkpoint_mode = ResourcesMode.EXPORTED
    checkpoint_verify = VerifyMode.WAIT
    name = "inbox"
    tools = TOOLS

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._inboxes

    def open(self, session_id: str, setup: Mapping[str, Any]) -> None:
        self._inboxes[session_id] = Inbox.seeded(setup["seed"])

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        inbox = self._inbox(session_id)
        if tool == "read" and set(arguments) == {"folder"}:
            return inbox.read(arguments["folder"])
        if tool == "move" and set(arguments) == {"folder"}:
            return inbox.move(arguments["folder"])
        if tool == "reply" and set(arguments) == {"tone"} and arguments["tone"] in TONES:
            return inbox.reply(arguments["tone"])
        if tool == "forward" and set(arguments) == {"to"}:
            return inbox.forward(arguments["to"])
        raise ValueError(f"no tool {tool!r} with arguments {arguments!r:.200}")

    async def _verify(self, request: Request) -> Response:
        """Judge, and free the session whatever comes of it: a mailbox with a secret outlives no verification."""
        session_id = session_of(request)
        try:
            return await super()._verify(request)
        finally:
            self.close(session_id)
            if self.owner is not None:
                self.owner.session_ended(session_id)

    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        inbox = self._inbox(session_id)
        if type(setup["seed"]) is not int:
            raise ValueError(f"seed is {setup['seed']!r}, not an integer")
        return inbox.reward(), inbox.export()

    def close(self, session_id: str) -> None:
        self._inboxes.pop(session_id, None)

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        return {each: self._inboxes[each].export() for each in session_ids if each in self._inboxes}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        self._inboxes.update(built_aside(sessions, Inbox.from_state))

    def _inbox(self, session_id: str) -> Inbox:
        try:
            return self._inboxes[session_id]
        except KeyError:
            raise UnknownSession(f"no inbox of session {session_id}") from None
