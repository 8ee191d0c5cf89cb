"""A served checkpoint is one trace, whichever call does which of its steps."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from gym_ckpt_grpc.control import wire
from gymckpt.v1 import coordinator_pb2 as pb
from tests.coordinator.fleet_of_nodes import Gate, Nodes, episodes
from tests.coordinator.served.conftest import serving
from tests.coordinator.spans import trace_of
from tests.telemetry.kept import Kept, short

COORDINATE = "gym.checkpoint.coordinate."
tracer = TracerProvider().get_tracer("a client")


async def test_the_steps_of_one_checkpoint_by_calls_of_four_traces(nodes: Nodes) -> None:
    """All below the block's span, which is below the call that began it; each is linked to the call that asked."""
    kept, in_flight = Kept(), nodes.add(*episodes(1))
    traces: dict[str, int] = {}
    fields: dict[str, Any] = {"CommitCheckpoint": {"scope": wire.episode_list(in_flight)}}
    async with serving(nodes, coordinator={"telemetry": kept.telemetry}) as served:
        for method in ("PrepareCheckpoint", "CommitCheckpoint", "PublishCheckpoint", "ResumeCheckpoint"):
            with tracer.start_as_current_span(method) as asking:
                traces[method] = asking.get_span_context().trace_id
                await served.send(method, checkpoint_id="ck-1", **fields.get(method, {}))
    root = kept.only(COORDINATE + "checkpoint")
    assert trace_of(root) == traces["PrepareCheckpoint"]
    assert kept.parent(root).endswith("/PrepareCheckpoint")
    asked = {"prepare": "Prepare", "capture": "Commit", "commit": "Commit", "publish": "Publish", "resume": "Resume"}
    for operation, method in asked.items():
        span = kept.only(COORDINATE + operation)
        assert kept.parent(span) == root.name
        links = [link.context.trace_id for link in span.links]
        assert links == ([] if method == "Prepare" else [traces[f"{method}Checkpoint"]]), operation
    assert len(set(traces.values())) == 4
    calls = [span for span in kept.spans if "ParticipantService/" in span.name]
    assert {trace_of(s) for s in calls if not s.name.endswith("/GetStatus")} == {trace_of(root)}
    kept.all_ended()
    kept.check_declared()


@pytest.mark.parametrize("method", ["PrepareCheckpoint", "RunCheckpoint"])
async def test_a_client_that_goes_away_leaves_no_span_open(nodes: Nodes, method: str) -> None:
    """The session's end is the block's: what was under way is cancelled, and nothing is published."""
    kept, gate = Kept(), Gate()
    nodes["agent"].script["Prepare"] = [gate.hold()]
    async with serving(nodes, coordinator={"telemetry": kept.telemetry}) as served:
        more = {"in_flight": wire.episode_list([])} if method == "RunCheckpoint" else {}
        request = getattr(pb, f"{method}Request")(checkpoint_id="ck-1", **more)
        call = getattr(served.stub, method)(request, timeout=20)
        reading = asyncio.ensure_future(call.read() if method == "RunCheckpoint" else asyncio.wait_for(call, 20))
        await gate.entered.wait()
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        gate.open.set()
    root = kept.only(COORDINATE + "checkpoint")
    assert short(root.attributes)["result"] in ("error", "aborted")
    kept.all_ended()


async def test_a_refused_call_begins_no_block(nodes: Nodes) -> None:
    kept = Kept()
    async with serving(nodes, coordinator={"telemetry": kept.telemetry}) as served:
        with pytest.raises(grpc.aio.AioRpcError):
            await served.stub.CommitCheckpoint(pb.CommitCheckpointRequest(checkpoint_id="nobody"), timeout=10)
    assert kept.of(COORDINATE + "checkpoint") == []
    kept.all_ended()
