"""Calls whose caller goes away, and a control plane that closes: what had begun is told to its end, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry import catalogue
from tests.control.scripted import Participant, eventually, running
from tests.telemetry.kept import Kept

A = EpisodeId("a")
OPERATIONS = catalogue.OPERATION_DURATION
Waits = Callable[[Participant], Coroutine[Any, Any, None]]


async def _preparing(p: Participant) -> None:
    p.owner.running.add(A)
    await p.prepare(within=9, timeout=10)


async def _capturing(p: Participant) -> None:
    await p.prepare()
    p.owner.exports.hold()
    await p.capture()


async def _committing(p: Participant) -> None:
    await p.prepare()
    p.files.hold("create")
    await p.commit()


async def _resuming(p: Participant) -> None:
    await p.prepare()
    p.owner.opens.hold()
    await p.resume()


async def _retiring(p: Participant) -> None:
    p.owner.retires.hold()
    await p.retire([A])


@pytest.mark.parametrize(
    ("operation", "waits"),
    {
        "prepare": _preparing,
        "capture": _capturing,
        "commit": _committing,
        "resume": _resuming,
        "retire": _retiring,
    }.items(),
)
async def test_a_caller_that_goes_away(tmp_path: Path, operation: str, waits: Waits) -> None:
    """Its operation is CANCELLED and its span ends there; owned work goes on, with an outcome of its own."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        span = catalogue.OPERATIONS[operation]
        async with running(waits(p)):
            await eventually(lambda: any(s.name == span.name for s in kept._spans.began))
            gate = {"capture": p.owner.exports, "resume": p.owner.opens, "retire": p.owner.retires}.get(operation)
            if gate is not None:
                await gate.reached(1)
            if operation == "commit":
                await p.files.wait_entered()
        await eventually(lambda: len(kept.of(span)) == 1)
        assert kept.value(OPERATIONS, operation=operation, outcome="CANCELLED") == 1
        assert kept.only(span).status.description == "CANCELLED"
        for each in p.owner.gates():
            each.open.set()
        p.files.release()
        if operation in ("capture", "commit"):
            step = "export" if operation == "capture" else "write"
            await eventually(lambda: kept.value(catalogue.STEP_DURATION, step=step, outcome="ok") == 1)
    kept.all_ended()


async def test_the_close_of_a_control_plane_ends_every_span(tmp_path: Path) -> None:
    """Also that of a write whose thread hangs for ever: CANCELLED there; the thread's own end adds nothing."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit()):
            await p.files.wait_entered()
            await p.plane.close()
            write = kept.only(catalogue.WRITE)
            assert write.status.description == "CANCELLED"
            p.files.release()
            await asyncio.to_thread(p.plane._core._threads.shutdown)
        assert kept.value(catalogue.STEP_DURATION, step="write") == 1
        assert kept.value(catalogue.RECORDS_TOTAL) == 0
    kept.all_ended()
