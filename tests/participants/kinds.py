"""The four kinds behind one face, for what holds of each: start something that blocks, restore, look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.participants import EnvironmentOwner, EpisodeContext, PolicyModelOwner, SessionContext
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from tests.participants.agent_rig import AgentRig
from tests.participants.fakes import App, Call, FakeClock, FakePort, call, close, exported, reopen, spin
from tests.participants.resources_rig import ResourcesRig


class KindRig(Protocol):
    """One server of a kind.

    begin: start work of an episode that blocks. Its task ends when `go` is set, and only then, also if cancelled.
    fresh: start an episode as a client would; gives a task that raises what a refusal is.
    """

    owner: Any
    port: FakePort
    go: asyncio.Event

    async def begin(self, episode: EpisodeId) -> None: ...
    async def fresh(self, episode: EpisodeId) -> bool: ...
    async def records(self, *episodes: EpisodeId) -> list[Record]: ...
    async def end(self) -> None: ...


async def stubborn(go: asyncio.Event) -> None:
    """Wait for `go`, whatever cancels."""
    try:
        await go.wait()
    except asyncio.CancelledError:
        await go.wait()
        raise


class EnvironmentKind:
    def __init__(self) -> None:
        self.owner = EnvironmentOwner(clock=FakeClock())
        self.port = FakePort(ParticipantKind.ENVIRONMENT)
        self.owner.attach(self.port)
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []

    async def begin(self, episode: EpisodeId) -> None:
        async def protocol(ctx: EpisodeContext) -> None:
            async with ctx.step("verify", "wait"):
                await stubborn(self.go)

        self.tasks.append(asyncio.create_task(self.owner.run(episode, {}, protocol)))
        await spin(3)

    async def fresh(self, episode: EpisodeId) -> bool:
        async def protocol(ctx: EpisodeContext) -> bool:
            return ctx.restored is None

        return await self.owner.run(episode, {}, protocol)

    async def records(self, *episodes: EpisodeId) -> list[Record]:
        go = asyncio.Event()

        async def protocol(ctx: EpisodeContext) -> None:
            await ctx.boundary({"next": "x"})
            async with ctx.step("invoke", "replay"):
                await go.wait()

        tasks = [asyncio.create_task(self.owner.run(episode, {}, protocol)) for episode in episodes]
        await spin()
        await close(self.owner)
        taken = await exported(self.owner)
        await reopen(self.owner)
        go.set()
        await asyncio.gather(*tasks)
        return taken

    async def end(self) -> None:
        self.go.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class AgentKind:
    def __init__(self) -> None:
        self.rig = AgentRig()
        self.owner, self.port = self.rig.owner, self.rig.port
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []

    async def begin(self, episode: EpisodeId) -> None:
        async def loop(session: SessionContext, state: Any) -> None:
            await stubborn(self.go)

        await self.rig.seed(f"key-{episode}", episode)
        self.tasks.append(asyncio.create_task(self.owner.invoke(episode, f"key-{episode}", loop)))
        await spin(3)

    async def fresh(self, episode: EpisodeId) -> bool:
        self.rig.states.pop(f"key-{episode}", None)
        await self.rig.seed(f"key-{episode}", episode)
        return f"key-{episode}" in self.rig.states

    async def records(self, *episodes: EpisodeId) -> list[Record]:
        for episode in episodes:
            await self.rig.seed(f"key-{episode}", episode)
        return await self.rig.checkpoint()

    async def end(self) -> None:
        self.go.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class PolicyKind:
    def __init__(self) -> None:
        self.owner = PolicyModelOwner(clock=FakeClock())
        self.port = FakePort(ParticipantKind.POLICY_MODEL)
        self.owner.attach(self.port)
        self.go = asyncio.Event()
        self.app = CheckpointMiddleware(App({"/v1/responses": self.stream, "/v1/messages": self.ok}), self.owner.gate())
        self.calls: list[Call] = []

    async def ok(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        return 200, {}, None

    async def stream(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await stubborn(self.go)

        return 200, {"content-type": "text/event-stream"}, pieces()

    async def begin(self, episode: EpisodeId) -> None:
        self.calls.append(call(self.app, f"/rollout/{episode}/v1/responses"))
        await spin(3)

    async def fresh(self, episode: EpisodeId) -> bool:
        return (await call(self.app, f"/rollout/{episode}/v1/messages").end()).status == 200

    async def records(self, *episodes: EpisodeId) -> list[Record]:
        return []

    async def end(self) -> None:
        self.go.set()
        await asyncio.gather(*(each.end() for each in self.calls))


class ResourcesKind:
    def __init__(self) -> None:
        self.rig = ResourcesRig()
        self.owner, self.port = self.rig.owner, self.rig.port
        self.go = asyncio.Event()
        self.calls: list[Call] = []
        self.rig.app.routes["/add"] = self.slow

    async def slow(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        await stubborn(self.go)
        return 200, {}, None

    async def begin(self, episode: EpisodeId) -> None:
        await self.rig.seed(f"key-{episode}", episode)
        self.calls.append(self.rig.call("/add", f"key-{episode}"))
        await spin(3)

    async def fresh(self, episode: EpisodeId) -> bool:
        return (await self.rig.call("/seed_session", f"key-{episode}", episode).end()).status == 200

    async def records(self, *episodes: EpisodeId) -> list[Record]:
        for episode in episodes:
            await self.rig.seed(f"key-{episode}", episode)
        return await self.rig.checkpoint()

    async def end(self) -> None:
        self.go.set()
        await asyncio.gather(*(each.end() for each in self.calls))


KINDS: dict[str, Callable[[], KindRig]] = {
    "environment": EnvironmentKind,
    "agent": AgentKind,
    "policy_model": PolicyKind,
    "resources": ResourcesKind,
}
