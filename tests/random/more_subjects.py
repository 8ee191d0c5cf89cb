"""More servers of the sequences: legacy runs beside native sessions, replayed verifies, and those with no state."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.participants import (
    PolicyClient,
    PolicyReply,
    PolicyRequest,
    ResourcesMode,
    ResourcesSettings,
    RestartOnlyOwner,
    RunContext,
    SessionContext,
    VerifyMode,
    run_key,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import App, Call, call
from tests.random.subjects import FINISH, RESTART, STEP, Agent, Clock, Outside, Resources, Subject

STEPS = ("seed", "loop", "verify", "return")
EACH = 1000
"""What a step of a run's protocol counts; turns of its loop count 1."""
LIVELY = ("arrive",) * 6 + ("step",) * 12 + ("finish", "restart")
GATE = {"x-gymckpt-gate": "policy/1"}


class LegacyAgent(Agent):
    """Rollouts with odd numbers are legacy runs, the others native sessions. Every second turn asks the policy."""

    moves = LIVELY

    def __init__(self, clock: Clock, outside: Outside) -> None:
        super().__init__(clock, outside)
        self.policy = PolicyClient(self._ask, service="policy")
        self.policy.gated = True

    @staticmethod
    def is_run(episode: EpisodeId) -> bool:
        return int(episode.rollout_id[1:]) % 2 == 1

    def start(self, episode: EpisodeId) -> None:
        if self.is_run(episode):
            self.spawn(self.real.run(episode, {"task": episode.rollout_id}, self._protocol))
        else:
            super().start(episode)

    async def _protocol(self, ctx: RunContext) -> Any:
        self.states.setdefault(ctx.session_key, {"of": ctx.session_key})
        queue = self.queues[ctx.episode] = asyncio.Queue()
        state = dict(ctx.restored or {"next": "seed"})
        try:
            while True:
                self.at[ctx.episode] = EACH * STEPS.index(state["next"])
                await ctx.boundary(dict(state))
                if state["next"] == "return":
                    return state["reply"]
                state = await self._step(ctx, state, queue)
        finally:
            if self.queues.get(ctx.episode) is queue:
                del self.queues[ctx.episode]

    async def _step(self, ctx: RunContext, state: dict[str, Any], queue: asyncio.Queue[str]) -> dict[str, Any]:
        step = state["next"]
        async with ctx.step(step, "wait" if step == "verify" and ctx.episode.rollout_id == "r1" else "replay"):
            if step == "loop":
                index = ctx.self_call_headers()[self.real.names.activation_header]
                reply = await self.real.invoke(ctx.episode, run_key(ctx.episode), self._turns, index=index)
                return {"next": "verify", "reply": reply}
            word = await queue.get()
            if word == RESTART:
                await ctx.mark_restart()
            elif word == FINISH:
                raise RuntimeError(f"{step} fails on purpose")
            return {"next": "loop"} if step == "seed" else {"next": "return", "reply": state["reply"]}

    async def _turns(self, session: SessionContext, state: Any) -> int:
        n, queue = state["n"] if state else 0, self.queues[session.episode]
        base = EACH * STEPS.index("loop") if self.is_run(session.episode) else 0
        while True:
            self.at[session.episode] = base + n
            await session.boundary(lambda n=n: {"n": n})
            if n % 2:
                await self.policy.call(session, "/v1/responses", {"of": str(session.episode), "turn": n})
            elif await queue.get() == FINISH:
                break
            n += 1
        self.at[session.episode] = base
        return n

    async def _loop(self, session: SessionContext, state: Any) -> int:
        queue = self.queues[session.episode] = asyncio.Queue()
        try:
            n = await self._turns(session, state)
        finally:
            if self.queues.get(session.episode) is queue:
                del self.queues[session.episode]
        self.spawn(self.real.close_session(session.episode, session.key, lambda: self.retire_session(session.key)))
        return n

    async def _ask(self, request: PolicyRequest) -> PolicyReply:
        word = await self.queues[EpisodeId.from_capture_key(request.body["of"])].get()
        if word == FINISH:
            raise ConnectionError("the policy is gone on purpose")
        return PolicyReply(200, {"turn": request.body["turn"]}, GATE)

    def restart(self, episode: EpisodeId) -> None:
        self.say(episode, RESTART if self.is_run(episode) else STEP)

    def value(self, record: Record) -> int:
        protocol = record.decode("protocol_boundary") if "protocol_boundary" in record.payloads else None
        return super().value(record) + (EACH * STEPS.index(protocol["next"]) if protocol else 0)


class ReplayedVerify(Resources):
    """A resources server whose verifies may run twice; `restart` is a verify."""

    moves = LIVELY

    settings = ResourcesSettings(mode=ResourcesMode.EXPORTED, verify=VerifyMode.REPLAY)

    def __init__(self, clock: Clock, outside: Outside) -> None:
        super().__init__(clock, outside)
        self.app.routes["/verify"] = self._verify
        self.verifying: dict[str, asyncio.Event] = {}

    async def _verify(self, scope: MutableMapping[str, Any], body: bytes) -> Any:
        key = str(dict(scope["headers"])[b"cookie"].decode())
        going = self.verifying[key] = asyncio.Event()
        await going.wait()
        return 200, {}, None

    def restart(self, episode: EpisodeId) -> None:
        key = f"session={self.keys.get(episode)}"
        if key in self.verifying:
            self.verifying.pop(key).set()
        elif self.keys.get(episode) in self.counters:
            self._call(episode, "/verify")


class Stateless(ReplayedVerify):
    """A resources server without state: its records say only that there is a session."""

    settings = ResourcesSettings(mode=ResourcesMode.STATELESS, verify=VerifyMode.REPLAY)

    def _call(self, episode: EpisodeId, path: str) -> None:
        tracked = [each.key for each in self.real._sessions.of_rollout(episode.rollout_id) if each.episode == episode]
        self.keys[episode] = tracked[0] if tracked else f"s.{episode.capture_key}"  # no hook told of restored ones
        super()._call(episode, path)

    def value(self, record: Record) -> int:
        assert record.decode("state") is None
        return 0

    def expected(self, episode: EpisodeId) -> int | None:
        return 0


class RestartOnly(Subject):
    """An agent whose runs cannot be captured."""

    moves = LIVELY

    def __init__(self, clock: Clock, outside: Outside) -> None:
        self.real = RestartOnlyOwner(clock=clock)
        self.owner = self.real
        self.served = CheckpointMiddleware(
            App({"/run": self._work, "/v1/responses": self._work, "/seed_session": self._seed}), self.real
        )
        self.going: dict[EpisodeId, asyncio.Event] = {}
        self.calls: list[Call] = []

    async def _work(self, scope: MutableMapping[str, Any], body: bytes) -> Any:
        episode = scope["state"]["gymckpt_episode"]
        await self.going.setdefault(episode, asyncio.Event()).wait()
        return 200, {}, None

    async def _seed(self, scope: MutableMapping[str, Any], body: bytes) -> Any:
        return 200, {}, None

    def _call(self, episode: EpisodeId, path: str) -> None:
        self.calls = [each for each in self.calls if not each.task.done()]
        self.calls.append(call(self.served, f"/rollout/{episode}{path}", {}))

    def is_open(self) -> bool:
        return not self.real.admission.closed

    def here(self, rollout_id: str) -> list[EpisodeId]:
        return self.real._here(rollout_id)

    def start(self, episode: EpisodeId) -> None:
        self._call(episode, "/seed_session")
        self._call(episode, "/run")

    def step(self, episode: EpisodeId) -> None:
        if self.here(episode.rollout_id) == [episode]:
            self._call(episode, "/v1/responses")

    def finish(self, episode: EpisodeId) -> None:
        if episode in self.going:
            self.going.pop(episode).set()

    def value(self, record: Record) -> int:
        raise AssertionError(f"a record of a server that has none: {record.episode}")

    async def end(self) -> None:
        tasks = [each.task for each in self.calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
