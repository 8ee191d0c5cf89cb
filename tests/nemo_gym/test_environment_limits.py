"""Environment servers as participants: deadlines, slots, and which servers are captured at all."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.integrations.nemo_gym import checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.environment import Queue, QueueTimeout
from gym_ckpt_grpc.integrations.nemo_gym.environment_table import ENVIRONMENTS, is_replayable
from gym_ckpt_grpc.integrations.nemo_gym.participant import found
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.nemo_gym.environment_rig import (
    R0,
    Environment,
    Later,
    Network,
    Scripted,
    Steps,
    options_of,
    until,
)
from tests.nemo_gym.environment_rig import later as later
from tests.nemo_gym.environment_rig import network as network
from tests.participants.fakes import close, exported, listed, reopen, retire, spin

# ---- limits ------------------------------------------------------------------------------------------------------


async def test_the_deadline_of_an_episode_stands_still_while_it_is_parked(network: Network, later: Later) -> None:
    protocol = Steps()
    network.replies["/tool"] = protocol.wait
    environment = Environment(protocol, default_episode_timeout_seconds=60)
    async with environment.client() as client:
        running = client.start(R0)
        await protocol.inside.wait()
        await close(environment.owner)
        protocol.go.set()
        await until(environment.owner.is_ready)
        await later.pass_by(1000)
        await reopen(environment.owner)
        assert (await running).json()["result"] is not None


async def test_an_episode_that_takes_too_long_is_told_as_the_framework_tells_it(network: Network, later: Later) -> None:
    protocol = Steps()
    network.replies["/tool"] = protocol.wait
    async with Environment(protocol, default_episode_timeout_seconds=60).client() as client:
        running = client.start(R0)
        await protocol.inside.wait()
        await later.pass_by(61)
        response = await running
        protocol.go.set()
    assert response.status_code == 200
    failure = {name: value for name, value in response.json()["failure"].items() if value is not None}
    assert failure == {"failure_reason": "Episode timed out", "terminal": False}
    assert protocol.cleaned == 1


async def test_episodes_wait_for_a_slot_and_are_told_when_none_comes_free(network: Network, later: Later) -> None:
    protocol = Steps()
    network.replies["/tool"] = protocol.wait
    environment = Environment(protocol, max_concurrent_episodes=1, queue_timeout_seconds=60)
    async with environment.client() as client:
        first = client.start(R0)
        await protocol.inside.wait()
        second, third = client.start(EpisodeId("7-1")), client.start(EpisodeId("7-2"))
        await spin(50)
        await later.pass_by(30)
        await close(environment.owner)
        await later.pass_by(1000)
        assert not second.done()
        await retire(environment.owner, environment.port, EpisodeId("7-2"))
        await reopen(environment.owner)
        await later.pass_by(31)
        failure = (await second).json()["failure"]
        assert {name: value for name, value in failure.items() if value is not None} == {
            "failure_reason": "Episode admission timed out",
            "terminal": False,
            "stage": "admission",
        }
        assert (await third).status_code == 409  # retired: no failed row
        protocol.go.set()
        assert (await first).status_code == 200
        assert (await client.run(EpisodeId("7-3"))).status_code == 200


async def test_a_queue_gives_slots_in_order_and_counts_open_time_only(later: Later) -> None:
    queue = Queue(1, 60)
    order: list[str] = []

    async def take(name: str, until: asyncio.Event) -> None:
        try:
            async with queue.slot():
                order.append(name)
                await until.wait()
        except QueueTimeout:
            order.append(f"{name} gave up")

    end, never = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(take("a", end))
        await spin()
        group.create_task(take("b", end))
        queue.close()
        group.create_task(take("c", end))
        await spin()
        await later.pass_by(1000)
        assert order == ["a"]
        queue.open()
        await later.pass_by(59)
        assert order == ["a"]
        await later.pass_by(2)
        assert order == ["a", "b gave up", "c gave up"]
        group.create_task(take("d", end))
        await spin()
        end.set()
    assert order[-1] == "d"
    async with Queue(None, None).slot(), Queue(1, None).slot():
        assert not never.is_set()


# ---- which servers -----------------------------------------------------------------------------------------------


async def test_episodes_of_a_server_nobody_audited_start_over(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """They neither block a checkpoint nor stand in it; their calls carry their rollout all the same."""
    protocol = Steps()
    network.replies["/tool"] = protocol.wait
    with caplog.at_level(logging.WARNING):
        environment = Environment(protocol, mode=None)
    assert "Scripted is restart_only" in caplog.text
    async with environment.client() as client:
        running = client.start(R0)
        await protocol.inside.wait()
        await close(environment.owner)
        assert environment.owner.is_ready()
        assert await listed(environment.owner, EpisodeListKind.RESTART) == [R0]
        assert await exported(environment.owner) == []
        await reopen(environment.owner)
        protocol.go.set()
        assert (await running).json()["result"] is not None
    assert set(network.paths()) == {
        f"/ng-rollout/7-0/{each}" for each in ("seed_session", "tool", "verify", "close_session")
    }
    assert protocol.cleaned == 1


def test_the_released_single_agent_turn_servers_are_replayable() -> None:
    from environment_servers.single_agent_turn.app import SingleAgentTurnEnvironmentServer
    from environment_servers.single_agent_turn_legacy.app import SingleAgentTurnLegacyEnvironmentServer

    class Overridden(SingleAgentTurnEnvironmentServer):  # type: ignore[misc]
        async def run(self, request: Any, cleanup: Any) -> Any:
            return await super().run(request, cleanup)

    for cls, expected in (
        (SingleAgentTurnEnvironmentServer, True),
        (SingleAgentTurnLegacyEnvironmentServer, True),
        (Overridden, False),
        (Scripted, False),
    ):
        assert is_replayable(cls) is expected
        assert is_replayable(checkpointed(cls, options_of(None))) is expected
    assert set(ENVIRONMENTS) == {"environment_servers.single_agent_turn.app:SingleAgentTurnEnvironmentServer"}


def test_a_source_that_changed_is_no_audited_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from environment_servers.single_agent_turn.app import SingleAgentTurnEnvironmentServer

    (place,) = ENVIRONMENTS
    monkeypatch.setitem(ENVIRONMENTS, place, {**ENVIRONMENTS[place], "nemo_gym/base_environment_server.py": "0" * 64})
    assert not is_replayable(SingleAgentTurnEnvironmentServer)


def test_an_environment_that_says_stateless_is_refused() -> None:
    with pytest.raises(UsageError, match="stateless"):
        Environment(Steps(), mode="stateless")


def test_setting_it_up_again_makes_no_second_owner() -> None:
    environment = Environment(Steps())
    environment.server.setup_webserver()
    assert found(environment.server) is environment.participant
