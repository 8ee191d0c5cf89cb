"""What minigym's resources servers share: their routes over a store of sessions, named by a cookie.

Everything about checkpoints is in the three hooks and the two declarations; the routes know nothing of it. `install`
gives a server the owner of its sessions.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import orjson
from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.minigym.mcp_route import mcp_reply
from gym_ckpt_grpc.participants import (
    DataPlaneNames,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    RestoredState,
    SessionTokens,
    VerifyMode,
    declared_mode,
    declared_verify,
)

T = TypeVar("T")

SESSION_COOKIE = "session"


class UnknownSession(LookupError):
    """There is no session of this id; answered with 404."""


class ResourcesServer(ABC):
    """A resources server: `/seed_session`, one route per tool, `/verify`, `/close_session`.

    frees_at_verify: off for a stateful server whose verify may run twice; then only a close frees. tokens: set before
    `build_app`, they add an MCP route, and a token for it to each seed's reply. owner: tracks the sessions, once
    `install` made it; a server without one is not checkpointed, and works as well.
    """

    checkpoint_mode: ClassVar[ResourcesMode]
    checkpoint_verify: ClassVar[VerifyMode]
    name: ClassVar[str]
    tools: ClassVar[Sequence[Mapping[str, Any]]]
    seed_paths: ClassVar[tuple[str, ...]] = ("/seed_session",)
    frees_at_verify: ClassVar[bool] = True
    tokens: SessionTokens | None = None
    owner: ResourcesOwner | None = None

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title=f"minigym {self.name}", openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        for path in self.seed_paths:
            app.add_api_route(path, self._seed, methods=["POST"])
        app.add_api_route("/verify", self._verify, methods=["POST"])
        app.add_api_route("/close_session", self._close, methods=["POST"])
        if self.tokens is not None:
            app.add_api_route("/mcp", self._mcp, methods=["POST"])
        app.add_api_route("/{tool}", self._tool, methods=["POST"])
        return app

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": self.name, "pid": os.getpid()}

    async def _seed(self, request: Request) -> Response:
        session_id = session_of(request)
        try:
            opened = self.open(session_id, await body_of(request))
        except (KeyError, TypeError, ValueError) as error:
            return answer({"error": f"cannot seed: {error}"}, status=400)
        token = {"mcp_token": self.tokens.issue(session_id)} if self.tokens is not None else {}
        reply = answer({"tools": list(self.tools), **token, **(opened or {})})
        reply.set_cookie(SESSION_COOKIE, session_id)
        return reply

    async def _tool(self, tool: str, request: Request) -> Response:
        try:
            return answer(self.call(session_of(request), tool, await body_of(request)))
        except UnknownSession as error:
            return answer({"error": str(error)}, status=404)
        except ValueError as error:
            return answer({"error": str(error)}, status=400)

    async def _mcp(self, request: Request) -> Response:
        assert self.tokens is not None, "the route exists with tokens only"
        names = self.owner.names if self.owner is not None else DataPlaneNames()
        session_id = self.tokens.read(request.headers.get(names.session_header))
        status, body = mcp_reply(self.name, self.tools, self.call, session_id, await request.body())
        return answer(body, status=status) if body is not None else Response(status_code=status)

    async def _verify(self, request: Request) -> Response:
        session_id = session_of(request)
        try:
            reward, state = await self.verdict(session_id, await body_of(request))
        except UnknownSession as error:
            return answer({"error": str(error)}, status=404)
        except (KeyError, TypeError, ValueError) as error:
            return answer({"error": f"cannot verify: {error}"}, status=400)
        if self.frees_at_verify:
            self.close(session_id)
        return answer({"reward": reward, "state": state})

    async def _close(self, request: Request) -> Response:
        self.close(session_of(request))
        return answer({"closed": True})

    async def verdict(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        """What `judge` says, for a server that must ask somebody for it."""
        return self.judge(session_id, setup)

    @abstractmethod
    def open(self, session_id: str, setup: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Seed a session; one that is there already begins anew. May give more for the reply."""

    @abstractmethod
    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a tool. Raises UnknownSession, or ValueError for bad arguments."""

    @abstractmethod
    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        """Reward (0 to 1) and final state of a session. Raises UnknownSession."""

    @abstractmethod
    def close(self, session_id: str) -> None:
        """Forget a session; harmless if there is none."""

    async def retire_session(self, session_id: str) -> None:
        """The hook that frees a session; an exported server adds the other two of `ResourcesHooks`."""
        self.close(session_id)


def install(server: ResourcesServer, *, verify: VerifyMode | None = None) -> ResourcesOwner:
    """Make the owner of a server's sessions, as its class declares it, and tell the server; the first one stays.

    verify: instead of the declared one; `wait` is always right.
    """
    if server.owner is None:
        mode = declared_mode(type(server))
        settings = ResourcesSettings(
            mode=mode,
            verify=verify or declared_verify(type(server)),
            tokens=server.tokens,
            seed_path=server.seed_paths,
        )
        hooks: Any = server if mode is ResourcesMode.EXPORTED else None  # the owner checks that it has them
        server.owner = ResourcesOwner(hooks, settings)
    return server.owner


def built_aside(sessions: Sequence[RestoredState], build: Callable[[Any], T]) -> dict[str, T]:
    """Session id -> what `build` makes of its state. The first ValueError becomes InvalidState naming the session."""
    made: dict[str, T] = {}
    for session in sessions:
        try:
            made[session.session_id] = build(session.state)
        except ValueError as error:
            raise InvalidState(f"session {session.session_id}: {error}", session.episode) from error
    return made


def choice_tool(name: str, description: str, parameter: str, choices: Sequence[str | int]) -> dict[str, Any]:
    """An OpenAI function tool with one parameter, a choice among texts or among integers."""
    kind = "integer" if isinstance(choices[0], int) else "string"
    schema = {"type": "object", "properties": {parameter: {"type": kind, "enum": list(choices)}}}
    described = {"name": name, "description": description, "parameters": {**schema, "required": [parameter]}}
    return {"type": "function", "function": described}


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
