"""Holding, not refusing: whichever client of the released framework calls, what comes while a server is closed waits.

Each test closes one server, lets calls arrive there, sees them held, reopens it, and compares what the rollouts were
told with what undisturbed ones were: no row fails, no tool result and no reward changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from gym_ckpt_grpc.coordinator import Coordinator
from gym_ckpt_grpc.minigym.ports import LOOPBACK
from gym_ckpt_grpc.protocol import EpisodeId
from tests.nemo_gym.deployment import Collection, Deployment, framework_loop, row_of, told
from tests.nemo_gym.scripted_model import example_rows

COUNTER = ("counter", "counter_agent", "counter_relay")
WEATHER = ("weather", "session_agent", "turn")
SERVERS = ("policy_model", *COUNTER, *WEATHER, "mcp_weather")
EACH = 5
"""Rollouts of a test: one of each example row."""

Test = Callable[[Deployment], Coroutine[Any, Any, Any]]

pytestmark = [
    pytest.mark.timeout(180),  # the first one waits for nine processes
    pytest.mark.filterwarnings("ignore:.* rows routed via their baked-in agent_ref:DeprecationWarning"),
]


class Rig:
    """The deployment, on its loop."""

    def __init__(self, deployment: Deployment, runner: asyncio.Runner) -> None:
        self._deployment, self._runner = deployment, runner
        self._undisturbed: dict[str, list[dict[str, Any]]] = {}

    def run(self, test: Test) -> Any:
        """Run a coroutine function with the deployment."""
        return self._runner.run(test(self._deployment))

    def undisturbed(self, task: str) -> list[dict[str, Any]]:
        """What the rollouts of a task are told when nothing is ever closed."""
        if task not in self._undisturbed:
            self._undisturbed[task] = self.run(lambda deployment: undisturbed(deployment, task))
        return self._undisturbed[task]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    deployment = Deployment(tmp_path_factory.mktemp("holding"), SERVERS)
    with framework_loop() as runner:
        try:
            runner.run(deployment.__aenter__())
            yield Rig(deployment, runner)
        finally:
            runner.run(deployment.__aexit__(None, None, None))


def collection_of(deployment: Deployment, task: str, name: str) -> Collection:
    return Collection(deployment, [row_of(task, number, rollout=f"{name}.{task}-{number}") for number in range(EACH)])


async def told_in_order(collection: Collection) -> list[dict[str, Any]]:
    results = await collection.ended()
    return [told(results[row["_ng_rollout_id"]]) for row in collection.rows]


async def undisturbed(deployment: Deployment, task: str) -> list[dict[str, Any]]:
    return await told_in_order(collection_of(deployment, task, "undisturbed").begin())


@contextlib.asynccontextmanager
async def closed(deployment: Deployment, *servers: str) -> AsyncIterator[Coordinator]:
    """These servers at their cut, for as long as the block lasts."""
    async with deployment.coordinator(*servers) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=30)
        yield coordinator


async def until_waiting(coordinator: Coordinator, calls: int) -> None:
    """Ask the one closed server until it holds so many."""
    while True:
        [sighting] = await coordinator.status()
        assert sighting.status is not None
        if sighting.status.report.counts["waiting"] >= calls:
            return


@pytest.mark.parametrize("task", ["counter", "weather"])
def test_undisturbed_rollouts_solve_their_tasks(rig: Rig, task: str) -> None:
    """What the others are compared with is worth something."""
    assert [each["reward"] for each in rig.undisturbed(task)] == [1.0] * EACH
    assert all(each["heard"] for each in rig.undisturbed(task))


@dataclass(frozen=True)
class Case:
    """A call of one client. behind: the model's step behind which it is made; 0: a rollout begins with it."""

    call: str
    task: str
    server: str
    behind: int

    def __str__(self) -> str:
        return self.call.replace(" ", "-")


ARRIVING = (
    Case("run at a legacy agent from the collector through the relay", "counter", "counter_agent", 0),
    Case("seed from an agent", "counter", "counter", 0),
    Case("generation of an agent's loop", "counter", "policy_model", 0),
    Case("tool call of an agent by its ServerClient", "counter", "counter", 2),
    Case("verify from an agent", "counter", "counter", 4),
    Case("run at an environment from the collector", "weather", "turn", 0),
    Case("seed from an environment", "weather", "weather", 0),
    Case("seed of an agent session", "weather", "session_agent", 0),
    Case("generation in an agent session", "weather", "policy_model", 0),
    Case("tool call of an agent session by the module function", "weather", "weather", 1),
    Case("verify from an environment", "weather", "weather", 3),
)


@pytest.mark.parametrize("case", ARRIVING, ids=str)
def test_what_arrives_at_a_closed_server_is_held(rig: Rig, case: Case) -> None:
    """Five calls wait at the server, one of each rollout, and no rollout ends before it reopens."""

    async def held(deployment: Deployment) -> list[dict[str, Any]]:
        collection = collection_of(deployment, case.task, str(case).split("-", 1)[0] + f".{ARRIVING.index(case)}")
        if case.behind:
            await deployment.model.hold({row["_ng_rollout_id"]: case.behind for row in collection.rows})
            assert len(await collection.begin().met()) == EACH
        async with closed(deployment, case.server) as coordinator:
            if case.behind:
                await deployment.model.hold({})
            else:
                collection.begin()
            await until_waiting(coordinator, EACH)
            assert collection.results == {}
        return await told_in_order(collection)

    assert rig.run(held) == rig.undisturbed(case.task)


@pytest.mark.parametrize(
    ("task", "server"),
    [("counter", "counter_agent"), ("weather", "session_agent"), ("weather", "turn"), ("counter", "policy_model")],
)
def test_what_is_under_way_at_the_close_goes_no_further(rig: Rig, task: str, server: str) -> None:
    """A self-call or an activation, an episode, a generation: its server closes around it, and no reply is lost."""

    async def under_way(deployment: Deployment) -> list[dict[str, Any]]:
        collection = collection_of(deployment, task, f"under.{server}")
        rollouts = {row["_ng_rollout_id"] for row in collection.rows}
        await deployment.model.hold(dict.fromkeys(rollouts, 1))
        assert len(await collection.begin().met()) == EACH
        async with closed(deployment, server):
            await deployment.model.hold({})
            await deployment.model.answered(rollouts)
            assert collection.results == {}
        return await told_in_order(collection)

    assert rig.run(under_way) == rig.undisturbed(task)


def test_a_tool_call_of_an_mcp_client_is_held(rig: Rig) -> None:
    """The framework's own MCP route, called by the SDK: the call waits, and the verifier has seen it in the end."""
    row = example_rows("example_mcp_weather")[1]

    async def over_mcp(deployment: Deployment) -> Any:
        client = deployment.client()
        seeded = await client.post("mcp_weather", f"/ng-rollout/{EpisodeId('mcp')}/seed_session", json=row)
        assert seeded.status == 200
        access = (await seeded.json())["mcp"]
        url = f"http://{LOOPBACK}:{deployment.port('mcp_weather')}/mcp"
        async with (
            create_mcp_http_client(headers=access["headers"]) as http,
            streamable_http_client(url, http_client=http) as (reading, writing, _),
            ClientSession(reading, writing) as session,
        ):
            await session.initialize()
            async with closed(deployment, "mcp_weather") as coordinator:
                calling = asyncio.create_task(session.call_tool("get_weather", {"city": "Tokyo"}))
                await until_waiting(coordinator, 1)
                assert not calling.done()
            heard = await calling
            assert not heard.isError
        output = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
        text = {"type": "output_text", "text": "The weather in Tokyo is sunny and 72 F.", "annotations": []}
        response = {"id": "r", "object": "response", "created_at": 1, "model": "scripted", "tool_choice": "auto"}
        told = {**response, "parallel_tool_calls": True, "tools": [], "output": [{**output, "content": [text]}]}
        verified = await client.post("mcp_weather", "/verify", json={**row, "response": told}, cookies=seeded.cookies)
        return await verified.json()

    verified = rig.run(over_mcp)
    assert verified["tool_call_seen"] is True
    assert verified["reward"] == 1.0


@pytest.mark.parametrize("task", ["counter", "weather"])
def test_checkpoints_all_the_while(rig: Rig, task: str) -> None:
    """One checkpoint of all servers after the other, from dispatch to the last result, wherever they meet it."""

    async def under_fire(deployment: Deployment) -> tuple[list[dict[str, Any]], list[int]]:
        collection, continued = collection_of(deployment, task, "fire").begin(), []
        episodes = [EpisodeId(row["_ng_rollout_id"]) for row in collection.rows]
        async with deployment.coordinator() as coordinator:
            while len(collection.results) < EACH:
                async with coordinator.checkpoint() as checkpoint:
                    report = await checkpoint.prepare(ready_within=30)
                    assert report.restarts == ()
                    await checkpoint.commit(report.continued(episodes))
                    await checkpoint.publish()
                assert checkpoint.result is not None
                continued.append(checkpoint.result.continued)
        return await told_in_order(collection), continued

    heard, continued = rig.run(under_fire)
    assert heard == rig.undisturbed(task)
    assert max(continued) > 0  # at least one of them met rollouts on their way
