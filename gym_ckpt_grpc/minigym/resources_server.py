"""What minigym's resources servers share: their routes over a store of sessions, named by a cookie.

Everything about checkpoints is in the three hooks and the two declarations; the routes know nothing of it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson
from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.participants import ResourcesMode, RestoredState, VerifyMode

SESSION_COOKIE = "session"


class UnknownSession(LookupError):
    """There is no session of this id; answered with 404."""


class ResourcesServer(ABC):
    """A resources server: `/seed_session`, one route per tool, `/verify`, `/close_session`."""

    checkpoint_mode: ClassVar[ResourcesMode]
    checkpoint_verify: ClassVar[VerifyMode]
    name: ClassVar[str]
    tools: ClassVar[Sequence[Mapping[str, Any]]]

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title=f"minigym {self.name}", openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/seed_session", self._seed, methods=["POST"])
        app.add_api_route("/verify", self._verify, methods=["POST"])
        app.add_api_route("/close_session", self._close, methods=["POST"])
        app.add_api_route("/{tool}", self._tool, methods=["POST"])
        return app

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": self.name, "pid": os.getpid()}

    async def _seed(self, request: Request) -> Response:
        session_id = session_of(request)
        try:
            self.open(session_id, await body_of(request))
        except (KeyError, TypeError, ValueError) as error:
            return answer({"error": f"cannot seed: {error}"}, status=400)
        reply = answer({"tools": list(self.tools)})
        reply.set_cookie(SESSION_COOKIE, session_id)
        return reply

    async def _tool(self, tool: str, request: Request) -> Response:
        try:
            return answer(self.call(session_of(request), tool, await body_of(request)))
        except UnknownSession as error:
            return answer({"error": str(error)}, status=404)
        except ValueError as error:
            return answer({"error": str(error)}, status=400)

    async def _verify(self, request: Request) -> Response:
        session_id = session_of(request)
        try:
            reward, state = self.judge(session_id, await body_of(request))
        except UnknownSession as error:
            return answer({"error": str(error)}, status=404)
        self.close(session_id)
        return answer({"reward": reward, "state": state})

    async def _close(self, request: Request) -> Response:
        self.close(session_of(request))
        return answer({"closed": True})

    @abstractmethod
    def open(self, session_id: str, setup: Mapping[str, Any]) -> None:
        """Seed a session; one that is there already begins anew."""

    @abstractmethod
    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a tool. Raises UnknownSession, or ValueError for bad arguments."""

    @abstractmethod
    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        """Reward (0 to 1) and final state of a session. Raises UnknownSession."""

    @abstractmethod
    def close(self, session_id: str) -> None:
        """Forget a session; harmless if there is none."""

    # The hooks.

    @abstractmethod
    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        """JSON-able state of each session."""

    @abstractmethod
    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        """Check all, then install all. Raises ValueError, and installs nothing, if one is bad."""

    async def retire_session(self, session_id: str) -> None:
        """Free a session."""
        self.close(session_id)


def session_of(request: Request) -> str:
    """The session id in the request's cookie; empty if there is none."""
    return request.cookies.get(SESSION_COOKIE, "")


async def body_of(request: Request) -> dict[str, Any]:
    """The request's JSON object; empty for an empty body. Raises ValueError if it is something else."""
    raw = await request.body()
    body = orjson.loads(raw) if raw else {}
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    return body


def answer(body: Any, *, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
