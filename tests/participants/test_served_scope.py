"""What the scope of a checkpoint names, and what it leaves out, with real owners behind real control planes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.participants import EpisodeContext, PolicyReply, ResourcesMode
from gym_ckpt_grpc.protocol.errors import RestartInScope
from gym_ckpt_grpc.testing import serve
from gymckpt.v1 import participant_pb2 as pb
from tests.participants.agent_rig import GATE
from tests.participants.fakes import R1, R, S, spin
from tests.participants.kinds import EnvironmentKind
from tests.participants.legacy_rig import LegacyRig
from tests.participants.resources_rig import ResourcesRig
from tests.participants.served_kinds import S1, restored, served, written


class Scene:
    """A participant with r, which cannot be captured, beside s, which can (of resources, r alone)."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []

    async def owner(self, kind: str) -> Any:
        make = {"environment": self._environment, "legacy agent": self._agent, "resources": self._resources}[kind]
        owner = await make()
        owner.admission._port = None  # the rig attached a fake one
        return owner

    async def end(self) -> None:
        self.go.set()
        await asyncio.gather(*self.tasks)

    async def _environment(self) -> Any:
        rig = EnvironmentKind()

        async def protocol(ctx: EpisodeContext) -> None:
            await ctx.boundary({"next": "invoke"})
            if ctx.episode == R:
                await ctx.seed_reply({"x-gymckpt-restart": "1"})
            async with ctx.step("invoke", "replay"):
                await self.go.wait()

        self.tasks = [asyncio.create_task(rig.owner.run(episode, {}, protocol)) for episode in (R, S)]
        await spin()
        return rig.owner

    async def _agent(self) -> Any:
        rig = LegacyRig()
        rig.holds["seed"] = self.go
        self.tasks = [rig.run(R), rig.run(S)]
        for answer in ("one", "two"):
            rig.replies.put_nowait(PolicyReply(200, answer, GATE))
        await spin()
        await rig.contexts[R].mark_restart()
        return rig.owner

    async def _resources(self) -> Any:
        rig = ResourcesRig(ResourcesMode.RESTART_ONLY)
        await rig.seed("k", R)
        return rig.owner


@pytest.mark.behaviour("P68")
@pytest.mark.parametrize("kind", ["environment", "legacy agent", "resources"])
async def test_a_scope_naming_a_restart_is_refused_and_the_same_checkpoint_commits_without_it(
    kind: str, tmp_path: Path
) -> None:
    scene = Scene()
    async with serve(await scene.owner(kind), roots=[tmp_path]) as p:
        assert (await p.client.prepare("c")).phase == pb.PHASE_PREPARED
        assert await p.client.listed(EpisodeListKind.RESTART) == [R]
        for named in ([R, S], [R]):
            with pytest.raises(RestartInScope) as caught:
                await p.client.commit("c", named)
            assert caught.value.episodes == (R,)
        reply = await p.client.commit("c", [S])
        assert reply.record_count == (0 if kind == "resources" else 1)
        await p.client.resume("c")
        await scene.end()


@pytest.mark.behaviour("P87")
async def test_a_commit_that_omits_a_restored_episode_deletes_it_and_it_starts_from_its_input(tmp_path: Path) -> None:
    """The one that it names stays, and continues."""
    await written("environment", tmp_path, R, S)
    async with served("environment", tmp_path) as kind:
        await restored(kind, R, S)
        started: dict[str, Any] = {}

        async def protocol(ctx: EpisodeContext) -> None:
            started[str(ctx.episode)] = ctx.restored

        assert await kind.pending() == {R1, S1}
        await kind.commit("c", S1)
        assert await kind.pending() == {S1}
        for episode in (R1, S1):
            await kind.owner.run(episode, {}, protocol)
        assert started == {"r-a1": None, "s-a1": {"next": "x"}}
        assert await kind.p.client.listed(EpisodeListKind.RETIRED) == []
