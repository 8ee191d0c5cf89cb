"""Epochs: one coordinator at a time, and what a new one does about what it finds."""

from __future__ import annotations

import asyncio
import random
import shutil

import pytest

from gym_ckpt_grpc.coordinator import Checkpoint, Coordinator, DiscoveryFailed, EventKind
from gym_ckpt_grpc.protocol.errors import ControlError, GymCkptError, StaleController
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, check_members
from tests.coordinator.fleet_of_nodes import Nodes, episodes, refuse


async def test_every_start_claims_anew_and_releases_at_its_end(nodes: Nodes) -> None:
    sequence = CheckpointRoot(str(nodes.root)).sequence
    for expected in (1, 2, 3):
        async with nodes.coordinator() as coordinator:
            assert coordinator.epoch == expected
            assert sequence.epoch() == (expected, False)
        assert sequence.epoch() == (expected, True)
        assert coordinator.epoch == 0


@pytest.mark.behaviour("C324")
async def test_on_a_fresh_root_the_epoch_is_above_what_servers_of_an_earlier_run_obeyed(
    nodes: Nodes,
) -> None:
    """Servers may outlive a root: they obey the first coordinator of the next one."""
    in_flight = nodes.add(*episodes(1))
    for expected in (1, 2, 3):
        async with nodes.coordinator() as earlier, earlier.checkpoint() as checkpoint:
            assert earlier.epoch == expected
            await checkpoint.prepare(ready_within=5)
    shutil.rmtree(nodes.root)
    async with nodes.coordinator() as coordinator:
        assert coordinator.epoch == 4
        async with coordinator.checkpoint() as checkpoint:
            report = await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(report.continued(in_flight))
            await checkpoint.publish()
    assert [entry.epoch for entry in CheckpointRoot(str(nodes.root)).sequence.publications()] == [4]
    assert {node.plane.status().highest_epoch for node in nodes} == {4}


async def test_a_higher_epoch_seen_later_means_replaced(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator:
        nodes["agent"].plane._core.machine.epochs.obey(9)
        async with coordinator.checkpoint() as checkpoint:
            with pytest.raises(StaleController, match="9"):
                await checkpoint.prepare(ready_within=5)
    assert nodes.journal.begun("Prepare") == []


async def left_open(nodes: Nodes, in_flight: list[EpisodeId], *, publish: bool) -> Checkpoint:
    """A checkpoint whose controller is gone."""
    coordinator = nodes.coordinator(controller_id="first")
    await coordinator.__aenter__()
    checkpoint = coordinator.checkpoint()
    await checkpoint.__aenter__()
    await checkpoint.prepare(ready_within=5)
    await checkpoint.commit(in_flight)
    if publish:
        await checkpoint.publish()
    session = coordinator._session
    assert session is not None
    await session.renewal.stop()
    await session.connections.close()
    return checkpoint


@pytest.mark.behaviour("C240")
@pytest.mark.parametrize("publish", [True, False])
async def test_a_new_coordinator_ends_what_it_finds_open(nodes: Nodes, publish: bool) -> None:
    """What is published stands; the rest is aborted, and its parts are in no manifest."""
    in_flight = nodes.add(*episodes(1))
    first = await left_open(nodes, in_flight, publish=publish)
    async with nodes.coordinator(controller_id="second") as second:
        assert nodes.all_open()
        (told,) = [e for e in second.events if "found open" in e.message]
        assert ("it stands" if publish else "aborted") in told.message
        async with second.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight)
            await checkpoint.publish()
    found = [p.checkpoint_id for p in CheckpointRoot(str(nodes.root)).sequence.publications()]
    assert found == ([checkpoint.id, first.id] if publish else [checkpoint.id])


@pytest.mark.behaviour("C240")
async def test_pending_state_of_an_unknown_restore_is_freed(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
    for node in nodes:
        await node.restart()
    first = nodes.coordinator(controller_id="first")
    await first.__aenter__()
    await first.restoring().__aenter__()
    assert nodes.phases() == {"RESTORED"}
    assert first._session is not None
    await first._session.renewal.stop()
    await first._session.connections.close()
    async with nodes.coordinator(controller_id="second"):
        assert nodes.all_open()
        assert all(node.episodes == set() for node in nodes)
        assert all(node.plane.status().marks_held == 0 for node in nodes)


async def test_a_failed_start_leaves_nothing_behind(nodes: Nodes) -> None:
    await nodes["env"].stop()
    coordinator = nodes.coordinator()
    for _ in range(2):
        with pytest.raises(DiscoveryFailed):
            await coordinator.__aenter__()
    await nodes["env"].start()
    async with coordinator:
        assert coordinator.epoch == 1


@pytest.mark.behaviour("C239", "C241")
async def test_a_replaced_coordinator_cannot_go_on(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(controller_id="first") as first:
        async with nodes.coordinator(controller_id="second") as second, second.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            with pytest.raises(StaleController):
                async with first.checkpoint() as other:
                    await other.prepare(ready_within=5)
            assert nodes.phases() == {"PREPARED"}
            await checkpoint.commit(in_flight)
            await checkpoint.publish()
        assert nodes.all_open()
    found = CheckpointRoot(str(nodes.root)).sequence.publications()
    assert [p.checkpoint_id for p in found] == [checkpoint.id]


async def contend(coordinator: Coordinator, in_flight: list[EpisodeId], rng: random.Random, rounds: int) -> int:
    """Try to take checkpoints, with pauses in between; how many were published."""
    done = 0
    for _ in range(rounds):
        try:
            async with coordinator.checkpoint(deadline=5) as checkpoint:
                await checkpoint.prepare(ready_within=1)
                await asyncio.sleep(rng.random() / 50)
                await checkpoint.commit(in_flight)
                await asyncio.sleep(rng.random() / 50)
                await checkpoint.publish()
                done += 1
        except GymCkptError:
            pass
        await asyncio.sleep(rng.random() / 50)
    return done


@pytest.mark.behaviour("C241")
@pytest.mark.parametrize("seed", range(5))
async def test_two_coordinators_make_one_chain_and_mix_no_parts(nodes: Nodes, seed: int) -> None:
    rng = random.Random(seed)
    in_flight = nodes.add(*episodes(2))
    root = CheckpointRoot(str(nodes.root))
    async with nodes.coordinator(controller_id="first") as first:
        task = asyncio.create_task(contend(first, in_flight, rng, 6))
        await asyncio.sleep(rng.random() / 5)
        async with nodes.coordinator(controller_id="second") as second:
            count = await contend(second, in_flight, rng, 4)
        count += await task
    publications = root.sequence.publications()[::-1]
    assert len(publications) == count
    assert [p.epoch for p in publications] == sorted(p.epoch for p in publications)
    for publication in publications:
        found = root.find(publication.checkpoint_id)
        check_members(root.files, found.location, found.manifest)
        assert {1: "first", 2: "second"}[publication.epoch] == found.manifest.controller_id
    assert count >= 4
    assert nodes.all_open()


async def test_what_a_participant_says_of_epochs_is_final(nodes: Nodes) -> None:
    """One refusal as stale stops the whole fan-out's caller, with a typed error, not with a failed Prepare."""
    nodes["agent"].script["Prepare"] = [refuse(StaleController("epoch 1 is below 7"))]
    async with nodes.coordinator() as coordinator:
        with pytest.raises(ControlError) as raised:
            async with coordinator.checkpoint() as checkpoint:
                await checkpoint.prepare(ready_within=5)
        assert isinstance(raised.value, StaleController)
        assert [e.kind for e in coordinator.events if "replaced" in e.message] == [EventKind.TAKE_OVER]
    assert nodes.journal.begun("Resume") == []
