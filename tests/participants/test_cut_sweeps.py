"""When backends are swept, about which calls, and how that ends; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import Capability, CutDisposition, Sweep
from gym_ckpt_grpc.protocol.errors import OutOfTime, WorkerUnavailable
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.cuts_rig import (
    READY,
    CutsRig,
    FakeBackend,
    Part,
    Script,
    answers,
    hang,
    settle,
    virtual,
)
from tests.participants.fakes import R, S

CUT, FINISHED, NOT_FOUND = CutDisposition.CUT, CutDisposition.FINISHED, CutDisposition.NOT_FOUND
UNCUTTABLE, FAILED = CutDisposition.UNCUTTABLE, CutDisposition.FAILED


@pytest.mark.behaviour("P123")
@virtual
async def test_an_undelivered_call_is_cut() -> None:
    """The backend is asked once, by the whole identity of the call; what it said stands on the ticket."""
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    running = await rig.running(R)
    await asyncio.sleep(3)
    closing = rig.close()
    assert (rig.ready, rig.blocking.oldest(9)[0].reason) == (False, BlockerReason.RUNNING)
    assert (rig.blocking.oldest(9)[0].place, rig.blocking.oldest(9)[0].episode) == ("generation_cut", R)
    await settle()
    assert rig.ready
    assert rig.counts("inflight", "held", "cut", "cut_failed", "cut_skipped") == (1, 1, 1, 0, 0)
    (sweep,) = backend.sweeps
    assert (sweep.checkpoint_id, sweep.service, sweep.closing, sweep.number) == (closing.checkpoint_id, "policy", 1, 1)
    ((named, age),) = sweep.calls
    assert running.ticket is not None
    assert running.ticket.cut is not None
    assert (named, age) == (running.ticket.identity(), 3.0)
    assert (named.episode, named.model_call_id) == (R, running.id)
    cut = running.ticket.cut
    assert (cut.backend, cut.incarnation_id, cut.snapshot_id, cut.own) == ("b", "b-a", "b-1.1", False)
    assert rig.hooks.made == [("b", cut.evidence.cut_id, running.id)]
    assert await rig.finish([running]) == [200]


@pytest.mark.behaviour("P124", "P125")
@virtual
async def test_two_backends_are_swept_side_by_side_and_a_hung_one_delays_no_ack_of_the_other() -> None:
    first, second = FakeBackend("b"), FakeBackend("c", hang)
    rig = CutsRig(first, second)
    calls = [await rig.running(R), await rig.running(S), await rig.running(R, backend="c")]
    rig.close()
    await settle()
    assert first.asked() == [[calls[0].id, calls[1].id]]
    assert second.asked() == [[calls[2].id]]
    assert first.times == second.times
    assert rig.cuts() == (3, 2, 1, 0)
    assert [each.episode for each in rig.blocking.oldest(9)] == [R]
    await rig.until_ready()
    assert (len(first.sweeps), rig.cuts()) == (1, (3, 2, 1, 0))
    assert await rig.finish(calls) == [200, 200, 200]


@pytest.mark.behaviour("P126")
@virtual
async def test_a_call_that_reaches_its_backend_after_the_first_sweep_is_cut_by_a_later_one() -> None:
    """It blocks from the close on: when it was only admitted, when begun, and until its disposition came."""
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    early, late = await rig.running(R), rig.arrive(S)
    await settle()
    rig.close()
    await settle()
    assert (backend.asked(), rig.ready) == ([[early.id]], False)
    late.begin.set()
    await asyncio.sleep(1)
    assert (len(backend.sweeps), rig.ready) == (1, False)
    late.send.set()
    await settle()
    assert (backend.asked()[1:], rig.ready, rig.cuts()) == ([[late.id]], True, (2, 2, 0, 0))
    assert await rig.finish([early, late]) == [200, 200]


@virtual
async def test_a_call_that_never_reaches_a_backend_blocks_no_longer_than_cuts_may_take() -> None:
    """A handler that never sends its call to a backend holds up the checkpoint until the time for cuts is spent."""
    rig = CutsRig(FakeBackend("b"))
    stuck = rig.arrive(R)
    await settle()
    rig.close()
    assert await rig.until_ready() == pytest.approx(READY / 2)
    assert rig.cuts() == (1, 0, 1, 0)
    assert await rig.finish([stuck]) == [200]


@pytest.mark.behaviour("P127")
@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ([NOT_FOUND, NOT_FOUND, NOT_FOUND, CUT], 4),
        ([FAILED, FAILED, CUT], 2),
        ([FAILED, CUT], 2),
        ([CUT], 1),
        ([FINISHED], 1),
        ([UNCUTTABLE], 1),
    ],
)
@virtual
async def test_a_call_is_asked_again_as_its_disposition_says(said: list[CutDisposition], asked: int) -> None:
    """Sweeps of a backend are `sweep_interval` apart."""
    backend = FakeBackend("b", answers(*said))
    rig = CutsRig(backend)
    running = await rig.running(R)
    rig.close()
    await rig.until_ready()
    await asyncio.sleep(2)
    assert len(backend.sweeps) == asked
    assert [sweep.number for sweep in backend.sweeps] == [*range(1, asked + 1)]
    gaps = [later - earlier for earlier, later in zip(backend.times, backend.times[1:], strict=False)]
    assert gaps == [pytest.approx(0.25)] * (asked - 1)
    assert running.ticket is not None
    assert running.ticket.disposition is said[asked - 1]
    has_cut = said[asked - 1] in (CUT, FINISHED)
    assert rig.cuts() == (1, int(has_cut), int(not has_cut), 0)
    assert await rig.finish([running]) == [200]


@pytest.mark.behaviour("P127")
@virtual
async def test_a_call_that_stays_unknown_fails_when_the_time_is_spent() -> None:
    backend = FakeBackend("b", answers(NOT_FOUND))
    rig = CutsRig(backend)
    running = await rig.running(R)
    rig.close()
    assert await rig.until_ready() == pytest.approx(READY / 2)
    assert len(backend.sweeps) == 16
    assert running.ticket is not None
    assert running.ticket.disposition is FAILED
    await asyncio.sleep(10)
    assert (len(backend.sweeps), rig.ready) == (16, True)
    assert await rig.finish([running]) == [200]


@pytest.mark.behaviour("P132")
@pytest.mark.parametrize("error", [WorkerUnavailable("down"), OutOfTime("late"), RuntimeError()])
@pytest.mark.parametrize("describes", [True, False])
@virtual
async def test_an_unreachable_or_failing_backend_leaves_the_checkpoint_ready(
    error: Exception, describes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its calls are tried as often as any, then count as failed and have no cut."""
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    calls = [await rig.running(R), await rig.running(S)]
    if describes:
        assert backend.described == 0
        backend.script = _failing(error)
    else:
        backend.unreachable = error
    rig.close()
    assert await rig.until_ready() < 0.3
    assert (rig.cuts(), rig.cut_ids()) == ((2, 0, 2, 0), [])
    assert len(backend.sweeps) == (2 if describes else 0)
    assert backend.described == 2
    assert "asking b failed" in caplog.text
    assert await rig.finish(calls) == [200, 200]


def _failing(error: Exception) -> Script:
    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        if sweep.number:
            raise error
        yield ()

    return script


@pytest.mark.behaviour("P132")
@pytest.mark.parametrize("deadline", [1000.0, 4.0])
@virtual
async def test_a_hung_backend_uses_at_most_half_of_the_time_that_was_left(deadline: float) -> None:
    """Of ready_within, or of the call's own time if that is shorter."""
    backend = FakeBackend("b", hang)
    rig = CutsRig(backend)
    running = await rig.running(R)
    closing = rig.close(deadline=deadline)
    left = min(READY, closing.budget.left())
    took = await rig.until_ready()
    assert took <= left / 2
    assert took == pytest.approx(0.375 * left + 0.125)
    assert (len(backend.sweeps), rig.cuts(), rig.cut_ids()) == (2, (1, 0, 1, 0), [])
    assert await rig.finish([running]) == [200]


@virtual
async def test_a_backend_that_swallows_its_cancellation_does_not_block_either() -> None:
    release = asyncio.Event()

    async def stubborn(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        yield ()

    rig = CutsRig(FakeBackend("b", stubborn))
    running = await rig.running(R)
    rig.close()
    assert await rig.until_ready() <= READY / 2
    assert await rig.finish([running]) == [200]
    release.set()
    await settle()


@pytest.mark.behaviour("P133")
@virtual
async def test_a_backend_without_the_cut_capability_is_not_asked() -> None:
    """It is asked what it can do once in each closing, as a new process may be able to."""
    backend = FakeBackend("b")
    backend.capabilities = frozenset({Capability.CONTINUE})
    rig = CutsRig(backend)
    calls = [await rig.running(R), rig.arrive(S)]
    await settle()
    rig.close()
    await settle()
    assert [each.episode for each in rig.blocking.oldest(9)] == [S]
    calls[1].begin.set()
    calls[1].send.set()
    await asyncio.sleep(1)
    assert (rig.ready, backend.sweeps, backend.described, rig.cuts()) == (True, [], 1, (2, 0, 2, 0))
    rig.open()
    backend.capabilities = frozenset({Capability.CUT})
    rig.close()
    await settle()
    assert (rig.ready, len(backend.sweeps), backend.described, rig.cuts()) == (True, 1, 2, (2, 2, 0, 0))
    assert await rig.finish(calls) == [200, 200]


@virtual
async def test_a_backend_is_described_once_for_each_of_its_processes() -> None:
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    running = await rig.running(R)
    described = []
    for incarnation in ("b-a", "b-a", "b-b", "b-b"):
        backend.incarnation = incarnation
        rig.close()
        await settle()
        described.append(backend.described)
        rig.open()
    assert described == [1, 1, 1, 2]
    assert await rig.finish([running]) == [200]


@virtual
async def test_a_call_that_was_not_sent_yet_is_in_no_inventory_of_its_backend() -> None:
    """Although that backend is swept for another call all the time."""
    backend = FakeBackend("b", answers(NOT_FOUND))
    rig = CutsRig(backend)
    sent, begun = await rig.running(R), rig.arrive(S)
    begun.begin.set()
    await settle()
    rig.close()
    await asyncio.sleep(1)
    assert backend.asked() == [[sent.id]] * 4
    begun.send.set()
    await asyncio.sleep(0.3)
    assert backend.asked()[-1] == [sent.id, begun.id]
    assert await rig.finish([sent, begun]) == [200, 200]


@virtual
async def test_each_closing_has_its_own_tries_and_its_own_time() -> None:
    """What failed in one closing, or how long it took, does not count in the next."""
    backend = FakeBackend("b", answers(FAILED))
    rig = CutsRig(backend)
    running = await rig.running(R)
    for closing in (1, 2):
        rig.close()
        await rig.until_ready()
        assert len(backend.sweeps) == 2 * closing
        rig.open()
    backend.script = answers(NOT_FOUND)
    rig.close()
    await asyncio.sleep(1)
    rig.open()
    await asyncio.sleep(1)
    rig.close()
    assert await rig.until_ready() == pytest.approx(READY / 2)
    assert await rig.finish([running]) == [200]


@virtual
async def test_a_backend_that_says_too_late_who_it_is_is_not_asked_for_cuts() -> None:
    backend = FakeBackend("b")
    backend.describes.clear()
    rig = CutsRig(backend)
    running = await rig.running(R)
    rig.close()
    await settle()
    rig.open()
    backend.describes.set()
    await settle()
    assert (backend.described, backend.sweeps) == (1, [])
    assert await rig.finish([running]) == [200]
