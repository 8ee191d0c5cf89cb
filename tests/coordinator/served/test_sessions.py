"""Sessions: a checkpoint lives as long as its client, and no longer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.protocol.errors import CheckpointConflict, ErrorCode, InvalidArgument, StaleCheckpoint, StateNotFound
from gym_ckpt_grpc.storage import CheckpointRoot
from gymckpt.v1 import coordinator_pb2 as pb
from tests.coordinator.fleet_of_nodes import Gate, Nodes, episodes, refuse
from tests.coordinator.served.conftest import Served, serving

PUBLISHED, ABORTED = pb.CHECKPOINT_STATE_PUBLISHED, pb.CHECKPOINT_STATE_ABORTED


def published(nodes: Nodes) -> list[str]:
    return [entry.checkpoint_id for entry in CheckpointRoot(str(nodes.root)).sequence.publications()]


@pytest.mark.behaviour("C257")
async def test_a_client_that_stops_calling_gets_its_checkpoint_aborted(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with serving(nodes, session_ttl=1.0) as served:
        await served.committed(in_flight)
        ended = await served.until("made no call for 1.0 s")
        assert ended.checkpoint_id == "ck-1"
        await served.until("ended without being published")
        assert nodes.all_open()
        assert published(nodes) == []
        assert (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).state == ABORTED
        assert isinstance(await served.refusal("PublishCheckpoint", checkpoint_id="ck-1"), StaleCheckpoint)
        assert isinstance(await served.refusal("RenewCheckpoint", checkpoint_id="ck-1"), StateNotFound)
        await served.prepared("ck-2")  # the next one is not in its way


async def test_a_published_one_whose_client_is_gone_is_resumed_and_stands(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with serving(nodes, session_ttl=1.0) as served:
        await served.committed(in_flight)
        await served.send("PublishCheckpoint", checkpoint_id="ck-1")
        await served.until("4 participants are open")
        assert published(nodes) == ["ck-1"]
        assert (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).state == PUBLISHED


async def test_a_restore_whose_client_is_gone_is_discarded(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with serving(nodes, session_ttl=1.0) as served:
        await served.taken(in_flight)
        for node in nodes:
            await node.restart()
        await served.send("RestoreCheckpoint", checkpoint_id="ck-1", restore_id="re-1")
        await served.until("was discarded")
        assert nodes.all_open()
        assert all(node.episodes == set() for node in nodes)


async def test_calls_and_renewals_keep_a_session(nodes: Nodes) -> None:
    """A call under way does, however long; so does each renewal."""
    nodes.add(*episodes(1))
    async with serving(nodes, session_ttl=0.8) as served:
        nodes["env"].owner.running.update(episodes(1))
        reply = await served.send("PrepareCheckpoint", checkpoint_id="ck-1", ready_within=wire.duration(1.2))
        assert reply.state == pb.CHECKPOINT_STATE_PREPARING
        for _ in range(4):
            await asyncio.sleep(0.4)  # half of a session each
            reply = await served.send("RenewCheckpoint", checkpoint_id="ck-1")
            assert wire.seconds(reply.session_remaining) == pytest.approx(0.8)
        assert nodes["env"].phase == "PREPARING"


def ends(served: Served) -> list[float]:
    """When the lease of each participant ends, on the clock of this process."""
    statuses = [node.plane.status() for node in served.nodes]
    assert all(status.lease_remaining is not None for status in statuses)
    return [time.monotonic() + (status.lease_remaining or 0.0) for status in statuses]


@pytest.mark.behaviour("C238")
async def test_renew_extends_every_lease_by_the_same_duration(served: Served) -> None:
    """At once, at all of them, and each has the whole duration again."""
    await served.prepared("ck-1", lease_ttl=wire.duration(60))
    before = ends(served)
    served.nodes.journal.clear()
    reply = await served.send("RenewCheckpoint", checkpoint_id="ck-1")
    assert sorted(served.nodes.journal.begun("RenewLease")) == ["agent", "env", "model", "res"]
    gained = [after - first for first, after in zip(before, ends(served), strict=True)]
    assert min(gained) > 0
    assert max(gained) - min(gained) < 1.0
    assert 59 < wire.seconds(reply.lease_remaining) <= 60
    assert {o.operation for o in reply.outcomes} == {"RenewLease"}
    assert len(reply.outcomes) == 4


async def test_a_lost_lease_is_told_by_renew(served: Served) -> None:
    await served.prepared("ck-1")
    await served.nodes["agent"].restart()
    reply = await served.send("RenewCheckpoint", checkpoint_id="ck-1")
    assert ErrorCode(reply.error.code) is ErrorCode.LEASE_LOST


async def test_stopping_the_service_aborts_what_is_open(nodes: Nodes) -> None:
    async with serving(nodes) as served:
        await served.prepared("ck-1")
        assert nodes.phases() == {"PREPARED"}
        await served.server.stop()
        assert nodes.all_open()


# ---- RunCheckpoint --------------------------------------------------------------------------------------------


def result_of(messages: list[Any]) -> pb.RunCheckpointResult:
    assert messages[-1].WhichOneof("step") == "result"
    assert all(message.WhichOneof("step") == "event" for message in messages[:-1])
    result = messages[-1].result
    assert isinstance(result, pb.RunCheckpointResult)
    return result


@pytest.mark.behaviour("C256")
async def test_run_does_the_whole_block(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(3))
    served.nodes["res"].owner.restarts.add(in_flight[0])
    messages = await served.stream("RunCheckpoint", checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight))
    result = result_of(messages)
    assert (result.checkpoint.state, result.HasField("error")) == (PUBLISHED, False)
    assert (result.checkpoint.continued_count, result.checkpoint.restart_count) == (2, 1)
    assert {o.operation for o in result.outcomes} == {"Prepare", "Capture", "Commit", "Resume"}
    assert len(result.outcomes) == 16
    kinds = [pb.EventKind.Name(m.event.kind).removeprefix("EVENT_KIND_") for m in messages[:-1]]
    assert kinds == ["STAGE"] * 5 + ["COMMIT", "PUBLICATION", "RESUME"]
    states = [pb.CheckpointState.Name(m.event.state).removeprefix("CHECKPOINT_STATE_") for m in messages[:-1]]
    assert [s for s in states if s != "UNSPECIFIED"] == ["PREPARED", "COMMITTED", "PUBLISHED"]
    assert served.nodes.all_open()
    again = await served.stream("RunCheckpoint", checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight))
    assert result_of(again).checkpoint == result.checkpoint
    assert published(served.nodes) == ["ck-1"]


async def test_run_that_fails_says_so_in_its_result(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    served.nodes["env"].owner.running.update(in_flight)
    messages = await served.stream(
        "RunCheckpoint", in_flight=wire.episode_list(in_flight), ready_within=wire.duration(0.2)
    )
    result = result_of(messages)
    assert result.checkpoint.state == ABORTED
    assert ErrorCode(result.error.code) is ErrorCode.DEADLINE_EXCEEDED
    assert "r0" in result.error.message
    assert served.nodes.all_open()
    assert isinstance(await refused_run(served, result.checkpoint.checkpoint_id), StaleCheckpoint)


async def refused_run(served: Served, checkpoint_id: str) -> BaseException:
    with pytest.raises(Exception) as raised:
        await served.stream("RunCheckpoint", checkpoint_id=checkpoint_id, in_flight=wire.episode_list([]))
    return raised.value


@pytest.mark.behaviour("C257")
@pytest.mark.parametrize("held", ["Prepare", "Commit"])
async def test_a_dropped_stream_aborts_before_publication(served: Served, held: str) -> None:
    in_flight = served.nodes.add(*episodes(1))
    gate = Gate()
    served.nodes["agent"].script[held] = [gate.hold()]
    call = served.stub.RunCheckpoint(
        pb.RunCheckpointRequest(checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight)), timeout=20
    )
    await call.read()
    await gate.entered.wait()
    assert isinstance(await refused_run(served, "ck-2"), CheckpointConflict)
    call.cancel()
    async with asyncio.timeout(5):  # at once: neither the session's time nor the call's is waited for
        await served.until("ended without being published")
    assert served.nodes.all_open()
    assert published(served.nodes) == []
    assert (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).state == ABORTED


async def test_a_stream_dropped_after_publication_changes_nothing(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    gate = Gate()
    served.nodes["agent"].script["Resume"] = [gate.hold()]
    call = served.stub.RunCheckpoint(
        pb.RunCheckpointRequest(checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight)), timeout=20
    )
    await call.read()
    await gate.entered.wait()
    call.cancel()
    gate.open.set()
    await served.until("4 participants are open")
    assert (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).state == PUBLISHED
    assert served.nodes.all_open()


async def test_resume_from_elsewhere_ends_a_run(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    gate = Gate()
    served.nodes["agent"].script["Prepare"] = [gate.hold()]
    run = asyncio.create_task(
        served.stream("RunCheckpoint", checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight))
    )
    await gate.entered.wait()
    assert (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).state == ABORTED
    result = result_of(await run)
    assert result.checkpoint.state == ABORTED
    assert ErrorCode(result.error.code) is ErrorCode.STALE_CHECKPOINT


# ---- deadlines and fields -------------------------------------------------------------------------------------

MUTATING: dict[str, dict[str, Any]] = {
    "PrepareCheckpoint": {},
    "CommitCheckpoint": {"checkpoint_id": "a", "scope": wire.episode_list([])},
    "PublishCheckpoint": {"checkpoint_id": "a"},
    "ResumeCheckpoint": {"checkpoint_id": "a"},
    "RestoreCheckpoint": {"checkpoint_id": "a"},
    "RenewCheckpoint": {"checkpoint_id": "a"},
    "RetireEpisodes": {"episodes": wire.episode_list(episodes(1))},
    "ForgetRollouts": {"rollouts": [{"rollout_id": "a"}]},
    "DeleteCheckpoint": {"checkpoint_id": "a"},
}


@pytest.mark.parametrize("method", MUTATING)
async def test_a_mutating_call_needs_a_deadline(served: Served, method: str) -> None:
    error = await served.refusal(method, timeout=None, **MUTATING[method])
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == ["deadline"]
    assert served.nodes.all_open()


async def test_a_run_needs_a_deadline_and_time_to_be_ready(served: Served) -> None:
    bad: list[dict[str, Any]] = [{"timeout": None}, {"timeout": 5.0, "ready_within": wire.duration(5)}]
    for fields in bad:
        with pytest.raises(InvalidArgument):
            await served.stream("RunCheckpoint", in_flight=wire.episode_list([]), **fields)
    error = await served.refusal("PrepareCheckpoint", timeout=5.0, ready_within=wire.duration(5))
    assert [violation.field for violation in error.violations] == ["ready_within"]
    assert served.nodes.all_open()


async def test_all_bad_fields_are_told_at_once(served: Served) -> None:
    error = await served.refusal(
        "CommitCheckpoint",
        checkpoint_id="a b",
        scope={"rollout_ids": ["x", "x"], "attempts": [0, 0]},
        trainer_state=b"x" * (1 << 20) + b"x",
    )
    assert [v.field for v in error.violations] == ["checkpoint_id", "scope.rollout_ids[1]", "trainer_state"]


async def test_failures_of_participants_are_no_grpc_errors(served: Served) -> None:
    """A participant's STALE_CHECKPOINT is in the reply; the call itself succeeded."""
    served.nodes["agent"].script["Prepare"] = [refuse(StaleCheckpoint("resumed here"))]
    call = served.stub.PrepareCheckpoint(pb.PrepareCheckpointRequest(checkpoint_id="ck-1"), timeout=10)
    reply = await call
    assert await call.code() is grpc.StatusCode.OK
    assert ErrorCode(reply.error.code) is ErrorCode.STALE_CHECKPOINT
