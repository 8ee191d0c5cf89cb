"""The agent: a conversation with a tool loop, in native sessions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.integrations import episode_of
from gym_ckpt_grpc.minigym.peers import Peers, cookie
from gym_ckpt_grpc.minigym.resources_server import answer, body_of
from gym_ckpt_grpc.participants import (
    AgentOwner,
    PolicyClient,
    PolicyReply,
    PolicyRequest,
    RestoredSession,
    SessionContext,
    raise_refusal,
)

MODEL = "minigym"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an agent session is about, fixed when it is seeded.

    resources_url, session_id: where its tools are. seed: of sampling. turns: most tool calls before the answer.
    """

    prompt: str
    tools: list[dict[str, Any]]
    resources_url: str
    session_id: str
    seed: int
    turns: int

    @classmethod
    def from_state(cls, state: object) -> Assignment:
        """Build it from JSON; raises ValueError naming what is wrong."""
        if not isinstance(state, Mapping) or set(state) != set(cls.__slots__):
            raise ValueError(f"an assignment has exactly the fields {', '.join(cls.__slots__)}")
        return cls(**state)


class AgentServer:
    """Sessions, and the loop that asks the policy and runs the tools it calls."""

    def __init__(self, peers: Peers, policy_url: str) -> None:
        self._peers = peers
        self._policy_url = policy_url
        self._assignments: dict[str, Assignment] = {}
        self.policy = PolicyClient(self._send, service="policy_model")
        self.owner = AgentOwner(self)

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

        return answer(await self.owner.seed(episode_of(request.scope), key, body, build))

    async def _responses(self, request: Request) -> Response:
        key = (await body_of(request))["agent_session_id"]
        index = request.headers.get(self.owner.names.activation_header)
        return answer(await self.owner.invoke(episode_of(request.scope), key, self._loop, index=index))

    async def _close(self, request: Request) -> Response:
        key = (await body_of(request))["agent_session_id"]

        async def free() -> dict[str, Any]:
            await self.retire_session(key)
            return {"closed": True}

        return answer(await self.owner.close_session(episode_of(request.scope), key, free) or {"closed": True})

    async def _loop(self, session: SessionContext, state: Any) -> dict[str, Any]:
        """Ask, run the tool calls, ask again; at last once without tools, for the answer."""
        assignment = self._assignments[session.key]
        messages: list[dict[str, Any]] = [{"role": "user", "content": assignment.prompt}]
        done = False
        if state is not None:
            messages, done = list(state["messages"]), state["done"]
        while True:
            await session.boundary(_pinned(messages, done))
            turn = sum(message["role"] == "assistant" for message in messages)
            tools = [] if done or turn >= assignment.turns else assignment.tools
            message = await self._ask(session, assignment, messages, tools)
            messages.append(message)
            if not message.get("tool_calls"):
                return {"messages": messages}
            for call in message["tool_calls"]:
                content, done = await self._run_tool(assignment, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    async def _ask(
        self, session: SessionContext, assignment: Assignment, messages: list[dict[str, Any]], tools: list[Any]
    ) -> dict[str, Any]:
        body = {"model": MODEL, "messages": messages, "tools": tools, "seed": assignment.seed}
        reply = await self.policy.call(session, "/v1/chat/completions", body)
        if reply.status >= 300:
            raise RuntimeError(f"the policy answered {reply.status}: {str(reply.body)[:300]}")
        message: dict[str, Any] = reply.body["choices"][0]["message"]
        return message

    async def _run_tool(self, assignment: Assignment, function: Mapping[str, str]) -> tuple[str, bool]:
        """The tool's output as the model sees it, and whether the tool has nothing more to give.

        An error of the tool is its output; a refusal of a gate is not, and goes through.
        """
        url = f"{assignment.resources_url}/{function['name']}"
        arguments = orjson.loads(function["arguments"])
        reply = await self._peers.request("POST", url, arguments, headers=cookie(assignment.session_id))
        raise_refusal(reply.status, reply.body, reply.headers)
        done = reply.status >= 300 or bool(reply.body.get("done"))
        return orjson.dumps(reply.body, option=orjson.OPT_SORT_KEYS).decode(), done

    async def _send(self, request: PolicyRequest) -> PolicyReply:
        url = self._policy_url + request.path
        reply = await self._peers.request(request.method, url, request.body, headers=request.headers)
        return PolicyReply(reply.status, reply.body, reply.headers)

    # The hooks.

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Each session's assignment; its conversation is in its boundary."""
        return {key: asdict(self._assignments[key]) for key in keys}

    async def restore_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        """Check all, then install all."""
        checked = [(session.key, Assignment.from_state(session.state)) for session in sessions]
        self._assignments.update(checked)

    async def retire_session(self, key: str) -> None:
        """Free a session."""
        self._assignments.pop(key, None)


def _pinned(messages: list[dict[str, Any]], done: bool) -> Any:
    """A boundary as of now: the length is pinned and nothing is copied unless a checkpoint asks."""
    length = len(messages)
    return lambda: {"messages": messages[:length], "done": done}
