"""What tests of the coordinator's spans share."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from gym_ckpt_grpc.coordinator import Checkpoint, Coordinator
from tests.telemetry.kept import short


async def take(coordinator: Coordinator, in_flight: list[Any], **options: Any) -> Checkpoint:
    async with coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight, **options)
        await checkpoint.publish()
    return checkpoint


def ended(span: ReadableSpan) -> str:
    """Its outcome; checks that exactly the errors have error status."""
    outcome = str(short(span.attributes)["outcome"])
    good = outcome in ("ok", "not_ready", "not_reached")
    assert span.status.status_code is (StatusCode.UNSET if good else StatusCode.ERROR), span.name
    return outcome


def trace_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def name(operation: str) -> str:
    return f"gym.checkpoint.coordinate.{operation}"
