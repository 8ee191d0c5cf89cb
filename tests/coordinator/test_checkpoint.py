"""A checkpoint of a whole fleet, from Prepare to the reopening."""

from __future__ import annotations

from gym_ckpt_grpc.coordinator import CheckpointState
from tests.coordinator.fleet_of_nodes import Nodes, episodes


async def test_a_checkpoint_is_published_and_the_fleet_is_open(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(3))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        assert nodes.phases() == {"PREPARED"}
        await checkpoint.commit(report.continued(in_flight))
        assert nodes.phases() == {"COMMITTED"}
        number = await checkpoint.publish()
    assert nodes.all_open()
    result = checkpoint.result
    assert result is not None
    assert result.state is CheckpointState.PUBLISHED
    assert (result.sequence_number, result.continued, result.restarts, result.records) == (number, 3, 0, 12)
    assert result.timing.pause_ms > 0
    assert not result.resume_pending
    for node in nodes:
        await node.restart()
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert restored.continued == tuple(e.next() for e in in_flight)
        assert nodes.phases() == {"RESTORED"}
    assert nodes.all_open()
    for node in nodes:
        assert node.episodes == set(restored.continued)
