"""Acknowledgements that are complete and stand for nothing all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import CutAck, CutDisposition, Sweep
from tests.participants.cuts_rig import CutsRig, FakeBackend, Part, ack, answers, evidence, virtual
from tests.participants.fakes import R, S

UNSPECIFIED, FAILED = CutDisposition.UNSPECIFIED, CutDisposition.FAILED


@pytest.mark.behaviour("P129")
@virtual
async def test_a_backend_says_nothing_about_the_calls_of_another() -> None:
    """Not even under their right names: its tokens of them, if it has any, are not those of the running call.

    The backend of the call does not know it yet, so that nothing else takes such a cut away again.
    """
    first, second = FakeBackend("b0"), FakeBackend("b1", answers(CutDisposition.NOT_FOUND))
    rig = CutsRig(first, second)
    own = await rig.running(R, backend="b0")
    others = await rig.running(S, backend="b1")
    assert others.ticket is not None
    of_another = others.ticket.identity()

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        yield [CutAck(of_another, CutDisposition.CUT, evidence=evidence("stray")), ack(sweep)]

    first.script = script
    rig.close()
    await rig.until_ready()
    assert (rig.cuts(), rig.cut_ids()) == ((2, 1, 1, 0), [f"{own.id}-1.1"])
    assert (others.ticket.cut, others.ticket.disposition) == (None, FAILED)
    assert rig.hooks.released == [("b0", "stray")]
    assert await rig.finish([own, others]) == [200, 200]


@pytest.mark.behaviour("P127", "P129")
@virtual
async def test_an_answer_without_a_disposition_is_a_failed_try() -> None:
    """As often as it comes: it is no reason to ask on until the time is spent."""

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        yield [replace(ack(sweep, disposition=FAILED), disposition=UNSPECIFIED)]

    backend = FakeBackend("b", script)
    rig = CutsRig(backend)
    running = await rig.running(R)
    rig.close()
    await rig.until_ready()
    await asyncio.sleep(2)
    assert (len(backend.sweeps), rig.cuts()) == (2, (1, 0, 1, 0))
    assert running.ticket is not None
    assert running.ticket.disposition is FAILED
    assert await rig.finish([running]) == [200]
