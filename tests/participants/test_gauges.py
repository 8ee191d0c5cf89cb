"""What owners show while a checkpoint is open: requests and replies that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.participants import EnvironmentOwner, EpisodeContext, RestartOnlyOwner
from gym_ckpt_grpc.telemetry.catalogue import HELD_REQUESTS, HELD_RESPONSES
from gym_ckpt_grpc.testing import serve
from tests.participants.fakes import App, FakePort, R, S, call, close, reopen, spin
from tests.participants.kinds import KINDS
from tests.participants.policy_rig import PolicyServer
from tests.participants.test_refused_and_held import PATHS, ok
from tests.telemetry.kept import Kept


@pytest.mark.behaviour("C308")
@pytest.mark.parametrize("name", list(KINDS))
async def test_each_kind_shows_the_requests_that_wait_at_its_gate(tmp_path: Path, name: str) -> None:
    """By kind and service, and nothing that names a rollout."""
    kept, rig = Kept(), KINDS[name]()
    rig.owner.admission._port = None  # here the control plane gives one
    served = CheckpointMiddleware(App({PATHS[name]: ok}), rig.owner.gate())
    async with serve(rig.owner, roots=[tmp_path], telemetry=kept.telemetry) as p:
        await p.client.prepare("c")
        held = [call(served, f"/rollout/{episode}{PATHS[name]}", {}) for episode in (R, S)]
        await spin()
        assert rig.owner.gauges()[HELD_REQUESTS] == 2
        assert kept.points(HELD_REQUESTS) == [({"participant_kind": name, "service": "test"}, 2)]
        await p.client.resume("c")
        for each in held:
            await each.end()
        assert kept.points(HELD_REQUESTS) == [({"participant_kind": name, "service": "test"}, 0)]
        kept.check_declared()


async def test_a_restart_only_agent_shows_its_seeds_that_wait() -> None:
    owner = RestartOnlyOwner()
    owner.attach(FakePort())
    served = CheckpointMiddleware(App({"/seed_session": ok, "/run": ok}), owner.gate())
    await close(owner)
    await call(served, "/rollout/r/run", {}).end()
    held = call(served, "/rollout/r/seed_session", {})
    await spin()
    assert owner.gauges() == {HELD_REQUESTS: 1}
    await reopen(owner)
    await held.end()
    assert owner.gauges() == {HELD_REQUESTS: 0}


async def test_a_policy_model_shows_replies_and_streams_that_wait() -> None:
    server = PolicyServer(None)
    running = [await server.begin(R), await server.begin(S)]
    pieces = asyncio.Event()

    async def stream(scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await pieces.wait()
            yield b"data: 2\n\n"

        return 200, {"content-type": "text/event-stream"}, events()

    server.app.routes["/v1/messages"] = stream
    running.append(await server.begin(R, path="/v1/messages", stream=True))
    await server.close()
    assert server.owner.gauges() == {HELD_REQUESTS: 0, HELD_RESPONSES: 0}
    server.go.set()
    pieces.set()
    await spin()
    assert server.owner.gauges() == {HELD_REQUESTS: 0, HELD_RESPONSES: 3}
    await server.open()
    for each in running:
        await each.end()
    assert server.owner.gauges() == {HELD_REQUESTS: 0, HELD_RESPONSES: 0}
    await server.end()


async def test_an_environment_shows_ended_episodes_whose_callers_wait() -> None:
    owner, go = EnvironmentOwner(), asyncio.Event()
    owner.attach(FakePort())

    async def fails(ctx: EpisodeContext) -> None:
        await ctx.boundary({})
        async with ctx.step("x", mode="replay"):
            await go.wait()
        raise RuntimeError("told after the checkpoint")

    running = asyncio.create_task(owner.run(R, {}, fails))
    await spin()
    await close(owner)
    go.set()
    await spin()
    assert owner.gauges() == {HELD_REQUESTS: 0, HELD_RESPONSES: 1}
    await reopen(owner)
    with pytest.raises(RuntimeError):
        await running
    assert owner.gauges()[HELD_RESPONSES] == 0
