"""A legacy agent at its simplest: seed, loop, verify, return; each step can be held."""

from __future__ import annotations

import asyncio
from typing import Any

from gym_ckpt_grpc.participants import AgentSettings, RunContext, run_key
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from tests.participants.agent_rig import AgentRig
from tests.participants.fakes import R, spin


class LegacyRig(AgentRig):
    """holds: what a step, or the time before it, waits for, by name. log: what ran, as (capture key, step)."""

    def __init__(self, *, verify: str = "wait", settings: AgentSettings | None = None) -> None:
        super().__init__(settings)
        self.verify = verify
        self.holds: dict[str, asyncio.Event] = {}
        self.log: list[tuple[str, str]] = []
        self.contexts: dict[EpisodeId, RunContext] = {}

    def hold(self, place: str) -> asyncio.Event:
        """Hold a step (`verify`) or the time before it (`before verify`)."""
        return self.holds.setdefault(place, asyncio.Event())

    def run(self, episode: EpisodeId = R, **options: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.owner.run(episode, {"task": 1}, self.protocol, **options))

    async def protocol(self, ctx: RunContext) -> Any:
        self.contexts[ctx.episode] = ctx
        self.states.setdefault(ctx.session_key, {"of": ctx.session_key})
        state = dict(ctx.restored or {"next": "seed"})
        while True:
            await ctx.boundary(dict(state))
            await self._at(f"before {state['next']}")
            if state["next"] == "return":
                return state["result"]
            state = await self._step(ctx, state)

    async def _step(self, ctx: RunContext, state: dict[str, Any]) -> dict[str, Any]:
        step = state["next"]
        async with ctx.step(step, self.verify if step == "verify" else "replay"):
            self.log.append((ctx.episode.capture_key, step))
            await self._at(step)
            if step == "seed":
                return {"next": "loop"}
            if step == "loop":
                return {"next": "verify", "reply": await self.self_call(ctx)}
            return {"next": "return", "result": [ctx.episode.capture_key, state["reply"]]}

    async def self_call(self, ctx: RunContext) -> Any:
        """What the run's HTTP call to its own `/v1/responses` does."""
        index = ctx.self_call_headers()[self.owner.names.activation_header]
        return await self.owner.invoke(ctx.episode, run_key(ctx.episode), self.loop, index=index)

    async def _at(self, place: str) -> None:
        if place in self.holds:
            await self.holds[place].wait()

    async def record_at(self, place: str, episode: EpisodeId = R) -> Record:
        """The record of a run that is held at a place; this rig is of no more use then."""
        self.hold(place)
        self.run(episode)
        await spin()
        (record,) = await self.checkpoint()
        return record
