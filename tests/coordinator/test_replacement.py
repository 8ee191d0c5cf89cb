"""A server that another process has replaced: what was lost with it, and what was not."""

from __future__ import annotations

import pytest

from gym_ckpt_grpc.coordinator import Checkpoint, Coordinator, EventKind
from gym_ckpt_grpc.coordinator.replacement import Replacements
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot
from tests.coordinator.fleet_of_nodes import Nodes, episodes

ONE, TWO, THREE = episodes(3)


async def take(coordinator: Coordinator, in_flight: list[EpisodeId]) -> Checkpoint:
    async with coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued(in_flight))
        await checkpoint.publish()
    return checkpoint


@pytest.mark.behaviour("C198")
async def test_membership_is_looked_up_again_and_lost_episodes_are_restarts(nodes: Nodes) -> None:
    """Other servers still hold a part of them: without the lost part they must not continue."""
    in_flight = nodes.add(ONE, TWO)
    async with nodes.coordinator() as coordinator:
        assert (await take(coordinator, in_flight)).continued == (ONE, TWO)
        await nodes["agent"].restart()
        nodes["agent"].add(TWO)  # begun again there: what it held before is gone all the same
        fresh = EpisodeId("fresh")
        nodes.add(fresh)
        second = await take(coordinator, [ONE, TWO, fresh])
        assert second.continued == (fresh,)
        assert second.restarts == {ONE: "lost", TWO: "lost"}
        (told,) = [e for e in coordinator.events if e.kind is EventKind.FINDING]
        assert (told.participant, "replaced" in told.message) == ("agent/agent/0", True)
        third = await take(coordinator, [ONE, TWO.next(), fresh])
        assert third.restarts == {ONE: "lost", TWO.next(): "no_record"}  # lost for good; the next attempt is not
    assert CheckpointRoot(str(nodes.root)).find().manifest.episodes is not None


@pytest.mark.behaviour("C198")
async def test_an_episode_begun_since_the_last_checkpoint_is_lost_too(nodes: Nodes) -> None:
    """Nobody knows what the old process held by then: what the new one has no record of may have been there."""
    async with nodes.coordinator() as coordinator:
        nodes.add(ONE)
        await nodes["res"].restart()
        assert (await take(coordinator, [ONE])).restarts == {ONE: "lost"}


async def test_an_added_server_is_noticed_and_prepared_like_any_other(nodes: Nodes) -> None:
    nodes["env"].declared = {"instances": 1}
    fleet = nodes.fleet()
    async with nodes.coordinator(fleet=fleet) as coordinator:
        await nodes.start("res-2", service="res", instance="1")
        assert coordinator._session is not None
        coordinator._session._discovery = nodes.fleet()
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            assert [m.name for m in checkpoint.members][-1] == "resources/res/1"
        (told,) = [e for e in coordinator.events if e.kind is EventKind.FINDING]
        assert (told.participant, told.message.split(":")[0]) == ("resources/res/1", "added")


def test_an_episode_of_another_instance_is_not_lost() -> None:
    known = Replacements()
    held = {"environment/env/0": {ONE}, "environment/env/1": {TWO}, "agent/agent/0": {ONE, TWO}}
    assert known.judge([ONE, TWO], held) == {}
    known.note("environment/env/0")
    now = {"environment/env/0": set[EpisodeId](), "environment/env/1": {TWO}, "agent/agent/0": {ONE, TWO, THREE}}
    assert known.judge([ONE, TWO, THREE], now) == {ONE: "environment/env/0", THREE: "environment/env/0"}
    assert known.judge([TWO], now) == {}
    assert known.judge([ONE], now) == {ONE: "environment/env/0"}
    known.restored()
    assert known.judge([ONE], now) == {}


def test_one_that_takes_no_part_is_judged_when_it_does() -> None:
    known = Replacements()
    known.judge([ONE], {"agent/agent/0": {ONE}, "resources/res/0": {ONE}})
    known.note("resources/res/0")
    assert known.judge([ONE], {"agent/agent/0": {ONE}}) == {}
    assert known.judge([ONE], {"agent/agent/0": {ONE}, "resources/res/0": {ONE}}) == {ONE: "resources/res/0"}


@pytest.mark.behaviour("C198")
async def test_what_a_restore_brought_back_is_not_lost(nodes: Nodes) -> None:
    in_flight = nodes.add(ONE)
    nodes["res"].owner.live.pop(ONE)
    async with nodes.coordinator() as coordinator:
        await take(coordinator, in_flight)
        for node in nodes:
            await node.restart()
        async with coordinator.restoring() as restored:
            pass
        assert (await take(coordinator, list(restored.continued))).continued == (ONE.next(),)
