"""Capture, Commit and publication over the fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import CaptureFailed, CheckpointState, CommitFailed, EventKind, PublishFailed
from gym_ckpt_grpc.protocol.errors import (
    IncarnationChanged,
    InternalError,
    PublishUnknown,
    StaleController,
    StateUnwritable,
    UsageError,
)
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles, decode, encode, read_episodes
from tests.coordinator.fleet_of_nodes import Gate, Nodes, broken, edit, episodes, refuse, then


def published(nodes: Nodes) -> list[str]:
    return [p.checkpoint_id for p in CheckpointRoot(str(nodes.root)).sequence.publications()]


@pytest.mark.behaviour("C213")
async def test_all_get_the_same_scope_as_a_list(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(3))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
    for method in ("Capture", "Commit"):
        scopes = [node.calls[method][0].scope for node in nodes]
        assert all(scope.WhichOneof("scope") == "episodes" for scope in scopes)
        assert all(list(scope.episodes.rollout_ids) == ["r0", "r1", "r2"] for scope in scopes)


@pytest.mark.behaviour("C214", "C215")
@pytest.mark.parametrize("before", ["capture", "commit"])
async def test_a_process_that_was_replaced_after_prepare_fails_the_checkpoint(nodes: Nodes, before: str) -> None:
    in_flight = nodes.add(*episodes(1))
    expected = nodes["agent"].identity.incarnation_id
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        if before == "commit":
            await checkpoint.capture(in_flight)
        await nodes["agent"].restart()
        with pytest.raises((CaptureFailed, CommitFailed)) as raised:
            await checkpoint.commit(in_flight)
    error = raised.value.cause
    assert isinstance(error, IncarnationChanged)
    assert expected in error.message
    assert nodes["agent"].identity.incarnation_id in error.message
    assert published(nodes) == []
    assert nodes.all_open()
    assert checkpoint.result is not None
    assert [identity.service for identity in checkpoint.result.replaced] == ["agent"]


@pytest.mark.behaviour("C217")
async def test_a_commit_that_fails_on_one_publishes_nothing(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    nodes["agent"].always["Commit"] = refuse(InternalError("incident 1"))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        with pytest.raises(CommitFailed, match="incident 1") as raised:
            await checkpoint.commit(in_flight)
        with pytest.raises(UsageError):
            await checkpoint.publish()
    assert sorted(o.ok for o in raised.value.outcomes) == [False, True, True, True]
    assert published(nodes) == []
    assert not (nodes.root / "LATEST").exists()
    assert nodes.all_open()


@pytest.mark.behaviour("C218")
async def test_a_commit_that_could_not_write_is_sent_again_within_the_deadline(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    nodes["agent"].script["Commit"] = [refuse(StateUnwritable("no space")), broken(after=True)]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
    assert len(nodes["agent"].calls["Commit"]) == 3
    assert len(published(nodes)) == 1


async def test_a_failed_commit_may_be_repeated(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    nodes["agent"].script["Commit"] = [refuse(InternalError("once"))]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        with pytest.raises(CommitFailed):
            await checkpoint.commit(in_flight)
        with pytest.raises(UsageError, match="another one than was captured"):
            await checkpoint.commit(in_flight[:1])
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
    assert len(published(nodes)) == 1


@pytest.mark.behaviour("C219", "C228")
async def test_the_aggregate_manifest_has_every_part(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(3))
    nodes["res"].owner.live.pop(in_flight[0])
    nodes["agent"].owner.restarts.update(episodes(1, attempt=7))
    async with nodes.coordinator(run_id="run-7") as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight[1:], trainer=encode({"step": 5}), policy_versions={"policy": "v3"})
        assert not list(nodes.root.glob("checkpoints/*/checkpoint.json"))
        await checkpoint.publish()
    manifest = checkpoint.manifest
    assert manifest is not None
    assert (manifest.checkpoint_id, manifest.run_id, manifest.controller_id) == (checkpoint.id, "run-7", "trainer")
    assert manifest.epoch == 1
    assert manifest.frontier is None  # there is no proof
    assert manifest.policy_versions == {"policy": "v3"}
    assert manifest.trainer is not None
    assert decode(manifest.trainer.payload()) == {"step": 5}
    replies = {o.name: o.answer for o in checkpoint.outcomes["Commit"]}
    for node in nodes:
        member = manifest.member(node.identity.place)
        assert member is not None
        reply = replies[node.place]
        assert member.participant.incarnation_id == node.identity.incarnation_id
        assert (member.manifest_digest, member.records) == (reply.manifest_digest, reply.record_count)
        assert member.restarts == (1 if node.name == "agent" else 0)


@pytest.mark.behaviour("C220")
async def test_episodes_without_a_record_and_those_left_out_are_restarts(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(4))
    for node in nodes:
        node.owner.live.pop(in_flight[1])
    nodes["agent"].owner.left_out.add(in_flight[2])
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
    assert checkpoint.continued == (in_flight[0], in_flight[3])
    assert checkpoint.restarts == {in_flight[1]: "no_record", in_flight[2]: "left_out"}
    root = CheckpointRoot(str(nodes.root))
    found = root.find("latest")
    lists = read_episodes(root.files, found.location, found.manifest)
    assert (lists.continued, dict(lists.restarts)) == (checkpoint.continued, checkpoint.restarts)
    assert checkpoint.result is not None
    assert (checkpoint.result.continued, checkpoint.result.restarts) == (2, 2)


@pytest.mark.behaviour("C221")
async def test_an_episode_captured_and_not_written_fails_the_commit_by_name(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(3))

    def drop_one(replies: list[Any]) -> None:
        del replies[0].episodes.rollout_ids[1]
        del replies[0].episodes.attempts[1]

    nodes["agent"].script["ListEpisodes"] = [edit(drop_one)]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        with pytest.raises(CommitFailed, match=r"agent/agent/0 .* without one: r1$"):
            await checkpoint.commit(in_flight)
    assert published(nodes) == []


@pytest.mark.behaviour("C221")
async def test_a_count_that_differs_from_the_capture_fails_the_commit(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    nodes["agent"].script["Capture"] = [edit(lambda reply: setattr(reply, "record_count", 3))]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        with pytest.raises(CommitFailed, match="agent/agent/0 captured 3 records and wrote 2"):
            await checkpoint.commit(in_flight)


async def test_readiness_lost_is_prepared_again(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    agent = nodes["agent"]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        agent.owner.run(in_flight[0])
        agent.script["Prepare"] = [then(lambda: agent.owner.park(in_flight[0]))]
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
    assert len(agent.calls["Prepare"]) == 2
    assert len(published(nodes)) == 1


async def test_readiness_lost_for_good_fails(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint(deadline=1.5) as checkpoint:
        await checkpoint.prepare(ready_within=1)
        nodes["agent"].owner.run(in_flight[0])
        with pytest.raises(CaptureFailed, match="INVALID_PHASE"):
            await checkpoint.commit(in_flight)
    assert nodes.all_open()


async def test_an_optional_server_that_cannot_commit_is_excluded(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    nodes["res"].declared = {"required": False}
    nodes["res"].always["Commit"] = refuse(InternalError("incident 9"))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
    assert checkpoint.restarts == dict.fromkeys(in_flight, "excluded")
    assert checkpoint.manifest is not None
    assert [member.participant.service for member in checkpoint.manifest.members] == ["env", "model", "agent"]
    assert [e.service for e in checkpoint.manifest.excluded] == ["res"]


async def test_the_intent_is_there_before_the_first_commit(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    seen: list[str] = []
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        root = CheckpointRoot(str(nodes.root))
        nodes["env"].script["Commit"] = [then(lambda: seen.append(root.read_intent(checkpoint.id).run_id))]
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
    assert seen == ["trainer"]


async def test_the_fleet_works_on_while_records_are_written(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    gate = Gate()
    nodes["env"].script["Commit"] = [gate.hold()]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        committing = asyncio.create_task(checkpoint.commit(in_flight, reopen_when_captured=True))
        await gate.entered.wait()
        assert nodes.all_open()
        for node in nodes:
            node.owner.live[in_flight[0]] = "changed after the cut"
        gate.open.set()
        await committing
        await checkpoint.publish()
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.PUBLISHED
    assert len(nodes["env"].owner.openings) == 1
    assert checkpoint.result.timing.pause_ms > 0
    for node in nodes:
        await node.restart()
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert len(restored.continued) == 2
    assert nodes["env"].owner.live[in_flight[0].next()] == {"at": "env", "turn": 0}


async def test_kept_records_of_an_aborted_checkpoint_are_dropped(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.capture(in_flight)
        await checkpoint.reopen()
        assert nodes.all_open()
    assert [call.keep_write for call in nodes["env"].calls["Resume"]] == [True, False]


async def test_a_rollout_twice_in_the_scope_sends_nothing(nodes: Nodes) -> None:
    (one,) = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        with pytest.raises(UsageError, match="twice"):
            await checkpoint.commit([one, one.next()])
    assert nodes["env"].calls["Capture"] == []


@pytest.mark.behaviour("C223")
async def test_publishing_twice_gives_the_same_number(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        assert await checkpoint.publish() == await checkpoint.publish()
    assert published(nodes) == [checkpoint.id]


@pytest.mark.behaviour("C223", "C239")
async def test_publishing_under_a_passed_epoch_is_refused(nodes: Nodes) -> None:
    """And the replaced coordinator makes no call after that: its fleet belongs to another one."""
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight)
            coordinator.root.sequence.claim("another", "another")
            with pytest.raises(StaleController):
                await checkpoint.publish()
            nodes.journal.clear()
        assert [e for e in nodes.journal if e.method != "RenewLease"] == []
        with pytest.raises(StaleController):
            await coordinator.retire(in_flight)
    assert published(nodes) == []
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.ABORTED


async def test_a_part_changed_after_its_commit_is_not_published(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        manifest = nodes.root / "checkpoints" / checkpoint.id / "participants/agent/agent/0/manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"restarts": 0', b'"restarts": 1'))
        with pytest.raises(PublishFailed, match="agent/agent/0"):
            await checkpoint.publish()
    assert published(nodes) == []


async def test_a_reply_that_differs_from_its_part_is_not_published(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    nodes["agent"].script["Commit"] = [edit(lambda reply: setattr(reply, "restart_count", 5))]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        with pytest.raises(PublishFailed, match="agent/agent/0"):
            await checkpoint.publish()
    assert published(nodes) == []


class Faulty(LocalFiles):
    """Fails on purpose once told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_sync_of = ""
        self.fail_replace = False

    def sync_dir(self, path: str) -> None:
        if self.fail_sync_of and path.endswith(self.fail_sync_of):
            raise StateUnwritable("the sync failed")
        super().sync_dir(path)

    def replace(self, temporary: str, path: str) -> None:
        if self.fail_replace:
            raise StateUnwritable("cannot replace")
        super().replace(temporary, path)


@pytest.mark.behaviour("C226")
@pytest.mark.parametrize("again", [True, False])
async def test_a_sync_that_fails_after_naming_is_unknown_and_settled_later(nodes: Nodes, again: bool) -> None:
    """By the same call again, or by the exit, which reads the root again."""
    in_flight = nodes.add(*episodes(1))
    files = Faulty()
    async with nodes.coordinator(files=files) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        files.fail_sync_of = "sequence"
        with pytest.raises(PublishUnknown):
            await checkpoint.publish()
        files.fail_sync_of = ""
        if again:
            await checkpoint.publish()
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.PUBLISHED
    assert published(nodes) == [checkpoint.id]


async def test_a_latest_that_cannot_be_moved_is_reported_and_no_failure(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    files = Faulty()
    async with nodes.coordinator(files=files) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        files.fail_replace = True
        await checkpoint.publish()
    assert published(nodes) == [checkpoint.id]
    (event,) = [e for e in coordinator.events if e.kind is EventKind.PUBLICATION]
    assert "LATEST was not moved" in event.message


async def test_an_empty_scope_is_a_checkpoint_too(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit([])
        await checkpoint.publish()
    assert checkpoint.result is not None
    assert (checkpoint.result.state, checkpoint.result.continued) == (CheckpointState.PUBLISHED, 0)
