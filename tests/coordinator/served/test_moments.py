"""Prepared, released, durable, as a client of the service sees them; and incremental checkpoints by request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.protocol.errors import CheckpointConflict, InternalError, InvalidArgument
from gym_ckpt_grpc.storage import CheckpointRoot
from gymckpt.v1 import coordinator_pb2 as pb
from tests.coordinator.fleet_of_nodes import Gate, Nodes, episodes, refuse
from tests.coordinator.served.conftest import Served, serving

PUBLISHED, ABORTED = pb.CHECKPOINT_STATE_PUBLISHED, pb.CHECKPOINT_STATE_ABORTED
RELEASED, COMMITTED = pb.CHECKPOINT_STATE_RELEASED, pb.CHECKPOINT_STATE_COMMITTED
MOMENTS = ("prepared_after", "released_after", "durable_after", "published_after")


def moments(timing: Any) -> list[str]:
    """Those that have come."""
    return [moment for moment in MOMENTS if timing.HasField(moment)]


async def summary(served: Served, checkpoint_id: str = "ck-1") -> pb.CheckpointSummary:
    reply = await served.send("GetCheckpoint", checkpoint_id=checkpoint_id)
    found: pb.CheckpointSummary = reply.checkpoint
    return found


def base_of(served: Served, checkpoint_id: str) -> str:
    calls = [c for c in served.nodes["env"].calls["Commit"] if c.context.checkpoint_id == checkpoint_id]
    return str(calls[-1].base_checkpoint_uri)


async def test_a_checkpoint_is_released_while_it_is_written(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    gate = Gate()
    served.nodes["env"].script["Commit"] = [gate.hold()]
    await served.prepared("ck-1")
    assert moments((await summary(served)).timing) == ["prepared_after"]
    commit = asyncio.create_task(served.committed(in_flight, reopen_when_captured=True))
    await gate.entered.wait()
    told = await summary(served)
    assert (told.state, moments(told.timing)) == (RELEASED, ["prepared_after", "released_after"])
    assert isinstance(await served.refusal("PrepareCheckpoint", checkpoint_id="ck-2"), CheckpointConflict)
    gate.open.set()
    reply = await commit
    assert moments(reply.timing) == list(MOMENTS[:3])
    assert (await summary(served)).state == COMMITTED
    await served.send("PublishCheckpoint", checkpoint_id="ck-1")
    ended = await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
    assert (ended.state, moments(ended.timing), ended.failure) == (PUBLISHED, list(MOMENTS), "")
    seconds = [wire.seconds(getattr(ended.timing, moment)) for moment in MOMENTS]
    assert seconds == sorted(seconds)


@pytest.mark.behaviour("C217")
async def test_a_write_that_fails_after_the_release_is_told_with_what_stands(served: Served) -> None:
    """The reply of the Commit has the outcomes; the end of it is an abort, and no failure of the end."""
    in_flight = served.nodes.add(*episodes(1))
    await served.taken(in_flight, "ck-0")
    served.nodes["agent"].always["Commit"] = refuse(InternalError("incident 9"))
    await served.prepared("ck-1")
    fields: dict[str, Any] = {
        "checkpoint_id": "ck-1",
        "scope": wire.episode_list(in_flight),
        "reopen_when_captured": True,
    }
    reply = await served.send("CommitCheckpoint", **fields)
    assert (reply.state, moments(reply.timing)) == (RELEASED, ["prepared_after", "released_after"])
    assert "incident 9" in reply.error.message
    assert "ck-0 (number" in reply.error.message
    assert [o.HasField("error") for o in reply.outcomes if o.operation == "Commit"].count(True) == 1
    served.nodes["agent"].always.clear()
    assert (await served.send("CommitCheckpoint", **fields)).state == COMMITTED
    ended = await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
    assert (ended.state, ended.HasField("error")) == (ABORTED, False)
    assert "ck-0 (number" in ended.failure
    assert (await summary(served)).state == ABORTED
    assert (await summary(served, "latest")).checkpoint_id == "ck-0"
    assert served.nodes.all_open()


async def test_a_run_tells_its_moments_as_they_come(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(2))
    messages = await served.stream(
        "RunCheckpoint", checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight), reopen_when_captured=True
    )
    states = [message.event.state for message in messages[:-1] if message.event.state]
    assert states == [pb.CHECKPOINT_STATE_PREPARED, RELEASED, COMMITTED, PUBLISHED]
    told = messages[-1].result.checkpoint
    assert moments(told.timing) == list(MOMENTS)
    assert wire.seconds(told.timing.released_after) <= wire.seconds(told.timing.durable_after)
    (again,) = await served.stream(
        "RunCheckpoint", checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight), reopen_when_captured=True
    )
    assert again.result.checkpoint.state == PUBLISHED


async def test_a_client_that_goes_away_after_the_release_gets_its_checkpoint_aborted(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    gate = Gate()
    served.nodes["env"].script["Commit"] = [gate.hold()]
    request = pb.RunCheckpointRequest(
        checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight), reopen_when_captured=True
    )
    call = served.stub.RunCheckpoint(request, timeout=20)
    async for message in call:
        if message.event.state == RELEASED:
            break
    await gate.entered.wait()
    call.cancel()
    event = await served.until("ended without being published")
    gate.open.set()
    assert "nothing is published in this root" in event.message
    assert CheckpointRoot(str(served.nodes.root)).sequence.publications() == ()
    assert served.nodes.all_open()


@pytest.mark.parametrize("method", ["CommitCheckpoint", "RunCheckpoint"])
async def test_a_stop_that_is_to_be_reopened_is_refused(served: Served, method: str) -> None:
    in_flight = served.nodes.add(*episodes(1))
    if method == "CommitCheckpoint":
        await served.prepared("ck-1")
        fields = {"checkpoint_id": "ck-1", "scope": wire.episode_list(in_flight)}
        error = await served.refusal(method, stop=True, reopen_when_captured=True, **fields)
    else:
        with pytest.raises(InvalidArgument) as raised:
            await served.stream(method, stop=True, reopen_when_captured=True, in_flight=wire.episode_list(in_flight))
        error = raised.value
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == ["reopen_when_captured"]
    assert served.nodes.journal.begun("Capture") == []


@pytest.mark.behaviour("C183")
async def test_a_request_may_ask_for_an_incremental_checkpoint(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(2))
    await served.taken(in_flight, "ck-0")
    await served.committed(in_flight, "ck-1", incremental=True)
    assert base_of(served, "ck-1").endswith("/checkpoints/ck-0")
    assert (await summary(served, "ck-1")).base_checkpoint_id == "ck-0"
    fields = {"checkpoint_id": "ck-1", "scope": wire.episode_list(in_flight), "incremental": False}
    assert isinstance(await served.refusal("CommitCheckpoint", **fields), CheckpointConflict)
    await served.send("PublishCheckpoint", checkpoint_id="ck-1")
    await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
    told = await summary(served, "ck-1")
    assert told.chain == 1
    assert told.state_bytes > 0
    messages = await served.stream("RunCheckpoint", checkpoint_id="ck-2", in_flight=wire.episode_list(in_flight))
    assert messages[-1].result.checkpoint.chain == 0
    assert base_of(served, "ck-2") == ""


async def test_a_service_may_take_incremental_checkpoints_unless_a_request_says_otherwise(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    async with serving(nodes, coordinator={"incremental": True, "max_chain": 4}) as served:
        await served.taken(in_flight, "ck-0")
        messages = await served.stream("RunCheckpoint", checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight))
        told = messages[-1].result.checkpoint
        assert (told.chain, told.base_checkpoint_id) == (1, "ck-0")
        await served.taken(in_flight, "ck-2", incremental=False)
        assert base_of(served, "ck-2") == ""
