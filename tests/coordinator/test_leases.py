"""Leases: who renews them, who counts them, and what their loss ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gym_ckpt_grpc.coordinator import Checkpoint, CheckpointState, Coordinator, Event, EventKind, Fleet
from gym_ckpt_grpc.coordinator.fleet import Endpoint
from gym_ckpt_grpc.coordinator.holds import Hold, Holds
from gym_ckpt_grpc.coordinator.member import Connections, Credentials, Member
from gym_ckpt_grpc.protocol.errors import LeaseLost, StaleController, UsageError
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles
from tests.coordinator.fleet_of_nodes import Gate, Nodes, broken, episodes, nodes_elsewhere, refuse, then


def published(nodes: Nodes) -> list[str]:
    return [p.checkpoint_id for p in CheckpointRoot(str(nodes.root)).sequence.publications()]


class LeaseEvent(asyncio.Event):
    """Set by the first event about a lease."""

    def __call__(self, event: Event) -> None:
        if event.kind is EventKind.LEASE:
            self.set()


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest_asyncio.fixture
async def member(nodes: Nodes) -> AsyncIterator[Member]:
    node = nodes["agent"]
    connections = Connections(Credentials())
    yield connections.member(Endpoint(node.server, node.address), node.identity)
    await connections.close()


async def test_a_lease_counts_from_the_sending_of_the_last_accepted_call(member: Member) -> None:
    clock, lost = FakeClock(), list[Hold]()
    holds = Holds(lost.append, clock)
    hold = holds.begin(member, "c", 30.0)
    clock.now = 129.9
    holds.hear(hold, sent_at=129.0)  # a refused renewal: its Prepare has not arrived yet, but it is there
    clock.now = 158.9
    assert holds.check(hold)
    holds.count(hold, sent_at=150.0)
    clock.now = 179.9
    assert holds.check(hold)
    clock.now = 180.0
    assert not holds.check(hold)
    assert [h.member for h in lost] == [member]
    holds.count(hold, sent_at=179.0)
    assert isinstance(hold.lost, LeaseLost)  # lost stays lost
    assert hold.lost.participant == "agent/agent/0"


async def test_a_participant_that_answers_nothing_for_a_whole_lease_is_lost_before_its_first_reply(
    member: Member,
) -> None:
    """A Prepare that waits behind a cable that was cut is not waited for until its own deadline."""
    clock, lost = FakeClock(), list[Hold]()
    holds = Holds(lost.append, clock)
    hold = holds.begin(member, "c", 30.0)
    clock.now = 130.0
    assert not holds.check(hold)
    assert [h.member for h in lost] == [member]


async def test_a_reply_that_took_longer_than_the_lease_finds_it_lost(member: Member) -> None:
    clock, lost = FakeClock(), list[Hold]()
    holds = Holds(lost.append, clock)
    hold = holds.begin(member, "c", 30.0)
    clock.now = 131.0
    holds.count(hold, sent_at=100.0)
    assert hold.lost is not None


async def test_a_released_lease_is_never_lost(member: Member) -> None:
    clock, lost = FakeClock(), list[Hold]()
    holds = Holds(lost.append, clock)
    hold = holds.begin(member, "c", 30.0)
    holds.count(hold, sent_at=100.0)
    holds.release(member, "c")
    clock.now = 200.0
    assert holds.check(hold)
    holds.lose(hold, LeaseLost("a refusal that came late"))
    assert (lost, hold.lost) == ([], None)


@pytest.mark.behaviour("C236")
async def test_each_lease_is_renewed_from_prepare_to_its_own_resume(nodes: Nodes) -> None:
    ttl = 0.9
    nodes.add(*episodes(1))
    gate = Gate()
    nodes["model"].script["Resume"] = [gate.hold()]
    renewed = {node.name: asyncio.Event() for node in nodes}
    for node in nodes:
        node.script["RenewLease"] = [then(lambda: None)] * 3 + [then(renewed[node.name].set)]
    async with nodes.coordinator(lease_ttl=ttl, stage_grace=0.05) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await asyncio.gather(*(event.wait() for event in renewed.values()))
            assert nodes.phases() == {"PREPARED"}
            asyncio.get_running_loop().call_later(3 * ttl, gate.open.set)
        assert nodes.all_open()
    for node in nodes:
        calls = [e.method for e in nodes.journal if e.node == node.name and e.what == "begin"]
        assert "RenewLease" not in calls[calls.index("Resume") :]
    assert checkpoint.result is not None
    assert not [event for event in coordinator.events if event.kind is EventKind.LEASE]


@pytest.mark.behaviour("C236")
async def test_leases_are_renewed_while_a_prepare_waits_longer_than_the_lease(nodes: Nodes) -> None:
    (parking,) = nodes.add(*episodes(1))
    nodes["env"].owner.running.add(parking)
    async with nodes.coordinator(lease_ttl=1.0) as coordinator, coordinator.checkpoint() as checkpoint:
        asyncio.get_running_loop().call_later(2.0, nodes["env"].owner.park, parking)
        report = await checkpoint.prepare(ready_within=9)
        await checkpoint.commit(report.continued([parking]))
        await checkpoint.publish()
    assert published(nodes) == [checkpoint.id]


class SlowPublication(LocalFiles):
    """Takes its time to name the sequence entry."""

    armed = False

    def publish(self, temporary: str, path: str) -> None:
        if self.armed and "sequence/" in path:
            time.sleep(2.0)
        super().publish(temporary, path)


@pytest.mark.behaviour("C236")
async def test_leases_are_renewed_while_publication_is_slow(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    files = SlowPublication()
    async with nodes.coordinator(lease_ttl=1.0, files=files) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        files.armed = True
        await checkpoint.publish()
        files.armed = False
        assert nodes.phases() == {"COMMITTED"}
    assert all(node.plane.status().leases_expired == 0 for node in nodes)


@pytest.mark.behaviour("C237")
async def test_renewal_goes_on_while_the_loop_is_blocked_for_three_leases(tmp_path: Path) -> None:
    ttl = 1.0
    with nodes_elsewhere(tmp_path / "root") as nodes:
        in_flight = nodes.add(*episodes(1))
        async with nodes.coordinator(lease_ttl=ttl) as coordinator, coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            time.sleep(3 * ttl)  # noqa: ASYNC251  what a trainer's own work does to its loop
            assert nodes.phases() == {"PREPARED"}
            await checkpoint.commit(in_flight)
            await checkpoint.publish()
        assert published(nodes) == [checkpoint.id]
        assert nodes.all_open()


@pytest.mark.behaviour("C239")
@pytest.mark.parametrize("where", ["commit", "between"])
async def test_a_lost_lease_ends_the_pending_call_and_nothing_is_published(nodes: Nodes, where: str) -> None:
    """All renewals of one participant are lost: the holder's own count decides, within one lease period."""
    in_flight = nodes.add(*episodes(1))
    gate = Gate()
    nodes["agent"].always["RenewLease"] = broken()
    if where == "commit":
        nodes["res"].script["Commit"] = [gate.hold()]
    lost = LeaseEvent()

    async def block(coordinator: Coordinator) -> None:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            if where == "between":
                await lost.wait()
            await checkpoint.commit(in_flight)

    async with nodes.coordinator(lease_ttl=1.0, on_event=lost) as coordinator:
        begun = time.monotonic()
        with pytest.raises(LeaseLost) as raised:
            await block(coordinator)
        assert time.monotonic() - begun < 2.5
        assert raised.value.participant == "agent/agent/0"
        gate.open.set()
        assert nodes.all_open()
    if where == "between":
        assert nodes["res"].calls["Commit"] == []
    assert published(nodes) == []
    assert not [e for e in nodes.journal.under_way() if e.method == "Commit"]


@pytest.mark.behaviour("C239")
async def test_a_renewal_refused_as_stale_is_a_loss_at_once(nodes: Nodes) -> None:
    nodes.add(*episodes(1))
    lost = LeaseEvent()
    coordinating = nodes.coordinator(lease_ttl=1.5, on_event=lost)
    async with coordinating as coordinator, coordinator.checkpoint() as checkpoint:
        begun = time.monotonic()
        await checkpoint.prepare(ready_within=5)
        await nodes["agent"].restart()
        await lost.wait()
        assert time.monotonic() - begun < 1.4
        with pytest.raises(LeaseLost, match="agent/agent/0"):
            await checkpoint.commit([])


@pytest.mark.behaviour("C239")
async def test_a_higher_epoch_seen_by_a_renewal_stops_the_coordinator(nodes: Nodes) -> None:
    """The pending call raises, and from then on it makes no call and changes no name."""
    in_flight = nodes.add(*episodes(1))
    gate = Gate()
    nodes["res"].script["Commit"] = [gate.hold()]
    nodes["agent"].always["RenewLease"] = refuse(StaleController("epoch 1 is below 2"))
    async with nodes.coordinator(lease_ttl=1.2) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            with pytest.raises(StaleController):
                await checkpoint.commit(in_flight)
        assert nodes.journal.begun("Resume") == []
        gate.open.set()
    assert published(nodes) == []
    assert CheckpointRoot(str(nodes.root)).sequence.epoch() == (1, False)  # not even a release
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.ABORTED


async def test_once_all_is_committed_a_lost_lease_does_not_stop_the_publication(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    lost = LeaseEvent()
    coordinating = nodes.coordinator(lease_ttl=0.6, on_event=lost)
    async with coordinating as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        nodes["agent"].always["RenewLease"] = broken()
        await lost.wait()
        await checkpoint.publish()
    assert published(nodes) == [checkpoint.id]


async def test_an_optional_member_s_lost_lease_does_not_end_the_checkpoint(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    nodes["res"].declared = {"required": False}
    lost = LeaseEvent()
    coordinating = nodes.coordinator(lease_ttl=0.6, on_event=lost)
    async with coordinating as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await nodes["res"].restart()
        await lost.wait()
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
    assert published(nodes) == [checkpoint.id]
    assert checkpoint.restarts == dict.fromkeys(in_flight, "excluded")


@pytest.mark.behaviour("C235")
@pytest.mark.parametrize("after", ["prepare", "capture", "commit", "publish"])
async def test_a_controller_that_is_gone_leaves_a_fleet_that_opens_by_itself(nodes: Nodes, after: str) -> None:
    """Nothing of it is published half way."""
    in_flight = nodes.add(*episodes(1))
    coordinator = nodes.coordinator(lease_ttl=0.5)
    await coordinator.__aenter__()
    checkpoint: Checkpoint = coordinator.checkpoint()
    await checkpoint.__aenter__()
    await checkpoint.prepare(ready_within=5)
    if after != "prepare":
        await checkpoint.capture(in_flight)
    if after in ("commit", "publish"):
        await checkpoint.commit(in_flight)
    if after == "publish":
        await checkpoint.publish()
    session = coordinator._session
    assert session is not None
    await session.renewal.stop()
    await session.connections.close()
    for node in nodes:
        await node.owner.opened.wait()
    assert published(nodes) == ([checkpoint.id] if after == "publish" else [])
    async with nodes.coordinator() as second:
        assert second.epoch == 2


def test_a_coordinator_s_durations_are_checked(tmp_path: Path) -> None:
    fleet = [{"kind": "policy_model", "service": "p", "address": "h:1"}]
    for bad in ({"lease_ttl": 0}, {"lease_ttl": 601}, {"exit_timeout": float("inf")}, {"controller_id": "a b"}):
        with pytest.raises(UsageError):
            Coordinator(Fleet.from_mapping({"servers": fleet}), root=str(tmp_path), **bad)
