"""An agent server at its simplest: sessions with a list of turns, a policy that answers when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.participants import (
    AgentOwner,
    AgentSettings,
    PolicyClient,
    PolicyReply,
    PolicyRequest,
    RestoredSession,
    SessionContext,
)
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import FakeClock, FakePort, R, close, exported, reopen, spin

GATE = {"X-GymCkpt-Gate": "policy/other-incarnation"}


class AgentRig:
    """An owner, its author's hooks, and a loop of two turns: boundary, policy call, boundary, reply."""

    def __init__(self, settings: AgentSettings | None = None) -> None:
        self.clock = FakeClock()
        self.owner = AgentOwner(self, settings or AgentSettings(close_receipts_for=300), clock=self.clock)
        self.port = FakePort(ParticipantKind.AGENT)
        self.owner.attach(self.port)
        self.states: dict[str, Any] = {}
        self.hooks: list[tuple[str, list[str]]] = []
        self.retire_gate: asyncio.Event | None = None
        self.restore_gate: asyncio.Event | None = None
        self.restore_error: Exception | None = None
        self.policy = PolicyClient(self.send, service="policy")
        self.policy.gated = True
        self.requests: list[PolicyRequest] = []
        self.replies: asyncio.Queue[PolicyReply | Exception] = asyncio.Queue()
        self.turns: list[Any] = []

    # ---- the author's side

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        self.hooks.append(("export", list(keys)))
        return {key: self.states[key] for key in keys if key in self.states}

    async def restore_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        self.hooks.append(("restore", [each.key for each in sessions]))
        if self.restore_gate is not None:
            await self.restore_gate.wait()
        if any(each.state == "bad" for each in sessions):
            raise InvalidState("bad state")
        self.states |= {each.key: each.state for each in sessions}
        if self.restore_error is not None:
            raise self.restore_error

    async def retire_session(self, key: str) -> None:
        self.hooks.append(("retire", [key]))
        if self.retire_gate is not None:
            await self.retire_gate.wait()
        self.states.pop(key, None)

    async def send(self, request: PolicyRequest) -> PolicyReply:
        self.requests.append(request)
        reply = await self.replies.get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def loop(self, session: SessionContext, state: Any) -> Any:
        self.turns.append(("start", state))
        turn = state["turn"] if state else 0
        await session.boundary(lambda: {"turn": turn})
        reply = await self.policy.call(session, "/v1/responses", {"turn": turn})
        self.turns.append(("reply", reply.body))
        await session.boundary({"turn": turn + 1})
        return {"answer": reply.body}

    # ---- calls

    async def seed(self, key: str = "k", episode: EpisodeId = R, body: Any = None) -> Any:
        async def build() -> Any:
            self.states[key] = {"of": key}
            return {"seeded": key}

        return await self.owner.seed(episode, key, body, build)

    def invoke(self, key: str = "k", episode: EpisodeId = R, index: str | None = None) -> asyncio.Task[Any]:
        return asyncio.create_task(self.owner.invoke(episode, key, self.loop, index=index))

    async def answer(self, body: Any = "ok", status: int = 200) -> None:
        self.replies.put_nowait(PolicyReply(status, body, GATE))
        await spin()

    async def checkpoint(self) -> list[Record]:
        await close(self.owner)
        await spin()
        records = await exported(self.owner)
        await reopen(self.owner)
        return records
