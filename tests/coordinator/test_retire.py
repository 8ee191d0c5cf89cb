"""Retire and Forget over the fleet."""

from __future__ import annotations

import asyncio

import pytest

from gym_ckpt_grpc.coordinator import ForgetFailed, RetireFailed
from gym_ckpt_grpc.protocol.errors import InternalError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.coordinator.fleet_of_nodes import Gate, Nodes, episodes, refuse


@pytest.mark.behaviour("C252")
async def test_retire_goes_to_all_at_once_also_while_a_checkpoint_is_open(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    gates = {node.name: Gate() for node in nodes}
    for node in nodes:
        node.script["Retire"] = [gates[node.name].hold()]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        retiring = asyncio.create_task(coordinator.retire(in_flight[:1]))
        await asyncio.gather(*(gate.entered.wait() for gate in gates.values()))
        for gate in gates.values():
            gate.open.set()
        result = await retiring
    assert result.retired == (in_flight[0],)
    assert all(node.calls["Retire"][0].context.checkpoint_id == checkpoint.id for node in nodes)


@pytest.mark.behaviour("C252", "C253")
async def test_forget_goes_from_callers_to_callees_and_leaves_no_mark(nodes: Nodes) -> None:
    retired = [EpisodeId("r0", 2), EpisodeId("r0", 1), EpisodeId("r1")]
    async with nodes.coordinator() as coordinator:
        await coordinator.retire(retired)
        nodes.journal.clear()
        gates = [Gate(), Gate()]
        nodes["model"].script["Forget"], nodes["res"].script["Forget"] = [gates[0].hold()], [gates[1].hold()]
        forgetting = asyncio.create_task(coordinator.forget(retired))
        await asyncio.gather(*(gate.entered.wait() for gate in gates))
        for gate in gates:
            gate.open.set()
        await forgetting
    stages = [(e.node, e.what) for e in nodes.journal if e.method == "Forget"]
    assert stages[:4] == [("env", "begin"), ("env", "end"), ("agent", "begin"), ("agent", "end")]
    assert {name for name, _ in stages[4:6]} == {"model", "res"}
    assert {what for _, what in stages[4:6]} == {"begin"}
    asked = nodes["env"].calls["Forget"][0].rollouts
    assert [(r.rollout_id, r.through_attempt) for r in asked] == [("r0", 2), ("r1", 0)]
    assert all(node.plane.status().marks_held == 0 for node in nodes)


async def test_a_forget_stops_after_the_failing_stage(nodes: Nodes) -> None:
    nodes["agent"].script["Forget"] = [refuse(InternalError("incident 3"))]
    async with nodes.coordinator() as coordinator:
        await coordinator.retire(episodes(1))
        with pytest.raises(ForgetFailed, match="incident 3"):
            await coordinator.forget(episodes(1))
        assert nodes["model"].calls["Forget"] == []
        await coordinator.forget(episodes(1))
    assert all(node.plane.status().marks_held == 0 for node in nodes)


async def test_a_retire_has_one_outcome_per_episode(nodes: Nodes) -> None:
    fine, stuck = nodes.add(*episodes(2))
    nodes["agent"].owner.stuck.add(stuck)
    async with nodes.coordinator() as coordinator:
        with pytest.raises(RetireFailed, match="1 of 2 episodes are not retired everywhere: r1") as raised:
            await coordinator.retire([fine, stuck])
        assert raised.value.result.retired == (fine,)
        assert list(raised.value.result.incomplete[stuck]) == ["agent/agent/0"]
        nodes["agent"].owner.stuck.clear()
        assert (await coordinator.retire([stuck])).incomplete == {}


async def test_many_episodes_are_retired_in_batches_of_a_thousand(nodes: Nodes) -> None:
    many = [EpisodeId(f"x{i}") for i in range(2500)]
    async with nodes.coordinator() as coordinator:
        assert len((await coordinator.retire(many)).retired) == 2500
        assert [len(call.episodes.rollout_ids) for call in nodes["env"].calls["Retire"]] == [1000, 1000, 500]
        await coordinator.forget(many)
    assert nodes["env"].plane.status().marks_held == 0


async def test_an_empty_list_makes_no_call(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator:
        nodes.journal.clear()
        await coordinator.retire([])
        assert await coordinator.forget([]) == []
    assert nodes.journal == []


async def test_a_server_that_is_down_does_not_stop_the_others(nodes: Nodes) -> None:
    """It gets the mark when it comes back, before it is prepared."""
    (episode,) = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        await nodes["agent"].stop()
        with pytest.raises(RetireFailed, match="agent/agent/0") as raised:
            await coordinator.retire([episode])
        assert list(raised.value.result.incomplete[episode]) == ["agent/agent/0"]
        assert all(node.episodes == set() for node in nodes if node.name != "agent")
        with pytest.raises(ForgetFailed, match="agent/agent/0"):
            await coordinator.forget([episode])
        assert nodes["env"].calls["Forget"] == []
        await nodes["agent"].start()
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
        assert nodes["agent"].plane._core.retirement.refuses(episode)
