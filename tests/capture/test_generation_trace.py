"""One trace from a sweep of the policy model server into the inference worker, and the metrics of its calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from gym_ckpt_grpc.capture import GrpcGenerationBackend
from gym_ckpt_grpc.control import Budget
from gym_ckpt_grpc.telemetry import Recorder
from gym_ckpt_grpc.telemetry.catalogue import GENERATION_CUT, RPC_DURATION
from tests.capture.scripted_engine import sweep_of, worker
from tests.telemetry.kept import Kept

CUT = "gymckpt.v1.GenerationService/CutGenerations"


def trace_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def of_kind(kept: Kept, kind: SpanKind) -> dict[str, ReadableSpan]:
    """Spans of calls by the last part of their method."""
    return {span.name.rpartition("/")[2]: span for span in kept.spans if span.kind is kind}


@pytest.mark.parametrize("groups", ["checkpoint", "none"])
async def test_the_spans_of_a_worker_belong_to_the_trace_of_the_sweep(tmp_path: Path, groups: str) -> None:
    """Both sides' calls are measured, and with spans off that is all."""
    ours, theirs = Kept(groups), Kept(groups)
    async with worker(tmp_path / "tokens", telemetry=theirs.telemetry) as served:
        await served.engine.running("a")
        backend = GrpcGenerationBackend("inference-0", served.server.address, telemetry=ours.telemetry)
        with Recorder("policy_model", telemetry=ours.telemetry).step(GENERATION_CUT, timed=False):
            await backend.describe(Budget(10))
            parts = [part async for part in backend.cut(sweep_of(["a"]), Budget(10))]
        await backend.close()
    assert len(parts) == 2
    for kept, side in ((ours, "client"), (theirs, "server")):
        assert kept.value(RPC_DURATION[side], **{"rpc.method": CUT, "rpc.response.status_code": "OK"}) == 1
        kept.all_ended()
        kept.check_declared()
    if groups == "none":
        assert (ours.spans, theirs.spans) == ([], [])
        return
    sweep, asked, answered = ours.only(GENERATION_CUT), of_kind(ours, SpanKind.CLIENT), of_kind(theirs, SpanKind.SERVER)
    assert set(asked) == set(answered) == {"GetBackend", "CutGenerations"}
    for method, call in asked.items():
        assert (ours.parent(call), trace_of(call)) == (GENERATION_CUT.name, trace_of(sweep))
        context, parent = call.get_span_context(), answered[method].parent
        assert context is not None
        assert parent is not None
        assert (parent.trace_id, parent.span_id) == (context.trace_id, context.span_id)
