"""The agent: a conversation with a tool loop, in native sessions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.integrations import episode_of
from gym_ckpt_grpc.minigym.agent_loop import AgentLoop, Assignment
from gym_ckpt_grpc.minigym.peers import Peers
from gym_ckpt_grpc.minigym.resources_server import answer, body_of
from gym_ckpt_grpc.participants import AgentOwner, DirectAgent, PolicyClient, RestoredSession, SessionContext


class AgentServer:
    """Sessions, each with its assignment; its conversation is in its boundary.

    resources: name of each resources server -> base URL. checkpointing: False runs sessions directly.
    """

    def __init__(
        self, peers: Peers, policy_url: str, resources: Mapping[str, str], *, checkpointing: bool = True
    ) -> None:
        self._assignments: dict[str, Assignment] = {}
        self._loop = AgentLoop(peers, policy_url, resources)
        self._sessions = AgentOwner(self) if checkpointing else DirectAgent()

    @property
    def owner(self) -> AgentOwner:
        """The owner of its state; there is none with checkpointing off."""
        assert isinstance(self._sessions, AgentOwner), "checkpointing is off"
        return self._sessions

    @property
    def policy(self) -> PolicyClient:
        """The client of all policy calls."""
        return self._loop.policy

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title="minigym agent", openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/seed_session", self._seed, methods=["POST"])
        app.add_api_route("/v1/responses", self._responses, methods=["POST"])
        app.add_api_route("/close_session", self._close, methods=["POST"])
        return app

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "agent", "pid": os.getpid()}

    async def _seed(self, request: Request) -> Response:
        body = await body_of(request)
        key = body.pop("agent_session_id")

        async def build() -> dict[str, Any]:
            self._assignments[key] = Assignment.from_state(body)
            return {"agent_session_id": key}

        return answer(await self._sessions.seed(episode_of(request.scope), key, body, build))

    async def _responses(self, request: Request) -> Response:
        key = (await body_of(request))["agent_session_id"]
        index = request.headers.get(self._sessions.names.activation_header)

        async def loop(session: SessionContext, state: Any) -> dict[str, Any]:
            return await self._loop.run(session, self._assignments[session.key], state)

        return answer(await self._sessions.invoke(episode_of(request.scope), key, loop, index=index))

    async def _close(self, request: Request) -> Response:
        key = (await body_of(request))["agent_session_id"]

        async def free() -> dict[str, Any]:
            await self.retire_session(key)
            return {"closed": True}

        return answer(await self._sessions.close_session(episode_of(request.scope), key, free) or {"closed": True})

    # The hooks.

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Each session's assignment."""
        return {key: asdict(self._assignments[key]) for key in keys}

    async def restore_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        """Check all, then install all."""
        checked = [(session.key, Assignment.from_state(session.state)) for session in sessions]
        self._assignments.update(checked)

    async def retire_session(self, key: str) -> None:
        """Free a session."""
        self._assignments.pop(key, None)
