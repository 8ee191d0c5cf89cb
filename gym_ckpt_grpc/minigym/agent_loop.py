"""The loop of minigym's agents: ask the policy, run the tools it calls, ask again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from gym_ckpt_grpc.minigym.event_stream import data_of, split_events
from gym_ckpt_grpc.minigym.peers import Peers, cookie
from gym_ckpt_grpc.participants import (
    PolicyClient,
    PolicyReply,
    PolicyRequest,
    SessionContext,
    StreamReply,
    raise_refusal,
)

MODEL = "minigym"
COMPLETIONS = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an agent session is about, fixed when it is seeded.

    resources, session_id: where its tools are: the resources server by its name, since a checkpoint may be restored
    where the servers have other addresses. seed: of sampling. turns: most tool calls before the answer.
    stream: read the policy's replies as streams.
    """

    prompt: str
    tools: list[dict[str, Any]]
    resources: str
    session_id: str
    seed: int
    turns: int
    stream: bool = False

    @classmethod
    def from_state(cls, state: object) -> Assignment:
        """Build it from JSON; raises ValueError naming what is wrong."""
        if not isinstance(state, Mapping) or {"stream", *state} != set(cls.__slots__):
            raise ValueError(f"an assignment has exactly the fields {', '.join(cls.__slots__)}")
        return cls(**state)


class AgentLoop:
    """Asks one policy server for many sessions. policy: the client of all their calls.

    resources: name of each resources server -> base URL.
    """

    def __init__(self, peers: Peers, policy_url: str, resources: Mapping[str, str]) -> None:
        self._peers = peers
        self._policy_url = policy_url
        self._resources = dict(resources)
        self.policy = PolicyClient(self._send, service="policy_model", open_stream=self._open_stream)

    async def run(self, session: SessionContext, assignment: Assignment, state: Any) -> dict[str, Any]:
        """Ask, run the tool calls, ask again; at last once without tools, for the answer.

        state: of the boundary to go on from, or None. Boundaries: before each policy call, and before the tools of
        a reply are run, so that a reply that was delivered is never asked for again.
        """
        messages: list[dict[str, Any]] = [{"role": "user", "content": assignment.prompt}]
        done = False
        if state is not None:
            messages, done = list(state["messages"]), state["done"]
        while True:
            if not _tools_pending(messages):
                await session.boundary(_pinned(messages, done))
                messages.append(await self._ask(session, assignment, messages, done))
                if not _tools_pending(messages):
                    return {"messages": messages}
            await session.boundary(_pinned(messages, done))
            answers = []
            for call in messages[-1]["tool_calls"]:
                content, done = await self._run_tool(assignment, call["function"])
                answers.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            messages += answers

    async def _ask(
        self, session: SessionContext, assignment: Assignment, messages: list[dict[str, Any]], done: bool
    ) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in messages)
        tools = [] if done or turn >= assignment.turns else assignment.tools
        body = {"model": MODEL, "messages": messages, "tools": tools, "seed": assignment.seed}
        if assignment.stream:
            return await self._streamed(session, body)
        reply = await self.policy.call(session, COMPLETIONS, body)
        if reply.status >= 300:
            raise RuntimeError(f"the policy answered {reply.status}: {str(reply.body)[:300]}")
        message: dict[str, Any] = reply.body["choices"][0]["message"]
        return message

    async def _streamed(self, session: SessionContext, body: Mapping[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        async with self.policy.stream(session, COMPLETIONS, body) as events:
            if events.status >= 300:
                raise RuntimeError(f"the policy answered {events.status}: {str(events.body)[:300]}")
            async for chunk in events:
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    message["content"] += delta.get("content") or ""
                    for call in delta.get("tool_calls") or ():
                        plain = {name: value for name, value in call.items() if name != "index"}
                        message.setdefault("tool_calls", []).append(plain)
        return message

    async def _run_tool(self, assignment: Assignment, function: Mapping[str, str]) -> tuple[str, bool]:
        """The tool's output as the model sees it, and whether the tool has nothing more to give.

        An error of the tool is its output; a refusal of a gate is not, and goes through.
        """
        url = f"{self._resources[assignment.resources]}/{function['name']}"
        arguments = orjson.loads(function["arguments"])
        reply = await self._peers.request("POST", url, arguments, headers=cookie(assignment.session_id))
        raise_refusal(reply.status, reply.body, reply.headers)
        done = reply.status >= 300 or bool(reply.body.get("done"))
        return orjson.dumps(reply.body, option=orjson.OPT_SORT_KEYS).decode(), done

    # ---- transports

    async def _send(self, request: PolicyRequest) -> PolicyReply:
        url = self._policy_url + request.path
        reply = await self._peers.request(request.method, url, request.body, headers=request.headers)
        return PolicyReply(reply.status, reply.body, reply.headers)

    @asynccontextmanager
    async def _open_stream(self, request: PolicyRequest) -> AsyncIterator[StreamReply]:
        url = self._policy_url + request.path
        async with self._peers.stream(request.method, url, request.body, headers=request.headers) as reply:
            if reply.status >= 300:
                body = orjson.loads(b"".join([chunk async for chunk in reply.chunks]) or b"null")
                yield StreamReply(reply.status, reply.headers, _nothing(), body)
                return
            yield StreamReply(reply.status, reply.headers, _decoded(reply.chunks))


async def _decoded(chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """The data of each event; raises ValueError for a stream that ends before its last one."""
    async for event in split_events(chunks):
        data = data_of(event)
        if data is None:
            return
        yield data
    raise ValueError("the policy's stream ended before its last event")


async def _nothing() -> AsyncIterator[Any]:
    nothing: tuple[Any, ...] = ()
    for each in nothing:
        yield each


def _tools_pending(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is a reply whose tool calls have not been run."""
    return bool(messages[-1].get("tool_calls"))


def _pinned(messages: list[dict[str, Any]], done: bool) -> Any:
    """A boundary as of now: the length is pinned and nothing is copied unless a checkpoint asks."""
    length = len(messages)
    return lambda: {"messages": messages[:length], "done": done}
