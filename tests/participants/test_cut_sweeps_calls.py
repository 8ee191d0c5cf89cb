"""Which calls are owed a cut, and what becomes of them and of their cuts; in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.control.generation import CutDisposition
from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.participants import policy_gate, request_digest
from gym_ckpt_grpc.participants.policy_settings import PolicyModelSettings
from gym_ckpt_grpc.protocol.errors import OutOfTime
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.cuts_rig import (
    READY,
    STREAM,
    WAITING,
    CutsRig,
    FakeBackend,
    answers,
    evidence,
    finished,
    hang,
    settle,
    virtual,
)
from tests.participants.fakes import R1, R, S, budget

FINISHED, NOT_FOUND, FAILED = CutDisposition.FINISHED, CutDisposition.NOT_FOUND, CutDisposition.FAILED


@pytest.mark.behaviour("P134", "P140")
@virtual
async def test_a_reply_that_finishes_while_closed_is_its_own_cut() -> None:
    """Without an RPC; the prefix cut it replaces is released, and itself never is, not even after Resume."""
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    running = await rig.running(R)
    rig.close()
    await settle()
    (prefix,) = rig.cut_ids()
    running.finish(finished("own"))
    await settle()
    assert (rig.cut_ids(), rig.hooks.released, rig.cuts()) == (["own"], [("b", prefix)], (1, 1, 0, 0))
    assert running.ticket is not None
    assert running.ticket.cut is not None
    assert (running.ticket.cut.own, running.ticket.disposition) == (True, FINISHED)
    assert (len(backend.sweeps), len(rig.hooks.made)) == (1, 1)
    assert await rig.finish([running]) == [200]
    assert rig.hooks.released == [("b", prefix)]


@pytest.mark.behaviour("P134", "P140")
@pytest.mark.parametrize("before", [True, False], ids=["before the close", "while it is owed a cut"])
@virtual
async def test_a_finished_reply_is_not_asked_about(before: bool) -> None:
    """Neither one whose coordinates came before the close, nor one that was still on its way to the backend."""
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    running = rig.arrive(R)
    running.begin.set()
    await settle()
    assert running.call is not None
    if before:
        running.call.finished(finished("own"))
    rig.close()
    assert rig.ready is before
    running.call.finished(finished("own"))
    assert (rig.ready, rig.cut_ids()) == (True, ["own"])
    running.send.set()
    await asyncio.sleep(1)
    assert backend.sweeps == []
    assert await rig.finish([running]) == [200]
    assert rig.hooks.released == []


@virtual
async def test_coordinates_that_are_not_complete_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """The call itself is not disturbed."""
    rig = CutsRig(FakeBackend("b", answers(FAILED)))
    running = await rig.running(R)
    rig.close()
    await rig.until_ready()
    running.finish(evidence("own"))
    await settle()
    assert (rig.cuts(), rig.cut_ids()) == ((1, 0, 1, 0), [])
    assert "the finish reason must be stop or length" in caplog.text
    assert await rig.finish([running]) == [200]


@virtual
async def test_a_call_whose_reply_will_be_an_error_is_owed_no_cut() -> None:
    backend = FakeBackend("b", answers(NOT_FOUND))
    rig = CutsRig(backend)
    running = await rig.running(R)
    rig.close()
    await settle()
    assert not rig.ready
    running.status = 502
    running.finish()
    await settle()
    assert (rig.ready, rig.cuts()) == (True, (1, 0, 1, 0))
    assert await rig.finish([running]) == [502]
    assert rig.hooks.ended == [(running.id, False)]


@pytest.mark.behaviour("P136")
@virtual
async def test_a_constrained_call_is_in_no_inventory_and_counts_as_skipped() -> None:
    """Nor does it block, or lease a restored cut; one that turns out to be constrained while closed neither."""
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    constrained = await rig.running(R, {"tool_choice": "required"})
    late, free = rig.arrive(R1, {"n": 2}), await rig.running(S)
    await settle()
    rig.close()
    await settle()
    assert [each.episode for each in rig.blocking.oldest(9)] == [R1]
    late.begin.set()
    late.send.set()
    await asyncio.sleep(1)
    assert (backend.asked(), rig.ready) == ([[free.id]], True)
    assert rig.cuts() == (3, 1, 0, 2)
    assert (constrained.call is not None and constrained.call.restart_reason) == "tool_choice:required"
    assert rig.hooks.leased == [free.id]
    constrained.finish(finished("own"))
    await settle()
    assert rig.cuts() == (3, 1, 0, 2)
    assert await rig.finish([constrained, late, free]) == [200, 200, 200]
    assert rig.cuts() == (0, 0, 0, 0)


@pytest.mark.behaviour("P137")
@virtual
async def test_readiness_over_50_held_cut_calls_computes_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each call when it began, none for a report, a sweep or readiness."""
    digests = 0

    def counted(body: object, path: str = "") -> str:
        nonlocal digests
        digests += 1
        return request_digest.request_digest(body, path)

    monkeypatch.setattr(policy_gate, "request_digest", counted)
    rig = CutsRig(FakeBackend("b"))
    calls = [await rig.running(EpisodeId(f"r{number}")) for number in range(50)]
    assert digests == 50
    monkeypatch.setattr("hashlib.sha256", None)
    rig.close()
    await settle()
    assert (rig.ready, rig.cuts(), rig.blocking.oldest(100)) == (True, (50, 50, 0, 0), ())
    monkeypatch.undo()
    assert digests == 50
    assert await rig.finish(calls) == [200] * 50


@pytest.mark.behaviour("P138")
@virtual
async def test_two_calls_of_one_episode_keep_a_cut_each() -> None:
    """Equal requests have equal digests, from which an export takes the later admitted one's."""
    rig = CutsRig(FakeBackend("b"))
    calls = [await rig.running(R, {"messages": text}) for text in ("a", "b", "b")]
    rig.close()
    await settle()
    assert (rig.cuts(), len(rig.cut_ids())) == ((3, 3, 0, 0), 3)
    first, second, third = rig.gate.undelivered()
    assert first.request_digest != second.request_digest == third.request_digest
    assert first.number < second.number < third.number
    assert await rig.finish(calls) == [200, 200, 200]


@pytest.mark.behaviour("P142")
@virtual
async def test_resume_drops_the_cuts_of_calls_still_running_and_they_finish_normally() -> None:
    """Cut, or in the middle of being cut: each is delivered once, and the next checkpoint cuts them anew."""
    backend, hung = FakeBackend("b"), FakeBackend("c", hang)
    rig = CutsRig(backend, hung)
    calls = [await rig.running(R), await rig.running(S, backend="c")]
    for closing in (1, 2):
        rig.close()
        await settle()
        assert rig.cuts() == (2, 1, 1, 0)
        rig.open()
        assert (rig.cuts(), rig.cut_ids(), rig.ready) == ((0, 0, 0, 0), [], True)
        assert [ticket.disposition for ticket in rig.gate.undelivered()] == [CutDisposition.UNSPECIFIED] * 2
        await asyncio.sleep(20)
        assert (len(backend.sweeps), len(hung.sweeps)) == (closing, closing)
    assert await rig.finish(calls) == [200, 200]
    assert [each.client.answer.body for each in calls if each.client] == [b'"ok"', b'"ok"']
    assert rig.hooks.ended == [(each.id, True) for each in calls]
    assert rig.counts("inflight", "held", "cut", "cut_failed", "cut_skipped") == (0, 0, 0, 0, 0)


@virtual
async def test_a_paused_stream_is_cut_and_one_that_must_end_is_not() -> None:
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    paused = await rig.running(R, path=STREAM, headers=WAITING)
    begun = await rig.running(S, path=STREAM)
    for stream in (paused, begun):
        stream.pieces.put_nowait(b"data: 1\n\n")
    await settle()
    rig.close()
    await settle()
    assert (backend.asked(), rig.cuts()) == ([[paused.id]], (1, 1, 0, 0))
    assert [each.reason for each in rig.blocking.oldest(9)] == [BlockerReason.STREAMING_RESPONSE]
    for stream in (paused, begun):
        stream.pieces.put_nowait(None)
    assert await begun.answered() == 200
    assert await rig.finish([paused]) == [200]


@virtual
async def test_a_stream_whose_last_event_was_sent_is_delivered_although_its_end_was_not() -> None:
    """The caller has all of it: it is neither paused nor undelivered."""
    rig = CutsRig(FakeBackend("b"))
    running = await rig.running(R, path=STREAM, headers=WAITING)
    running.pieces.put_nowait(b"data: [DONE]\n\n")
    await settle()
    rig.close()
    running.pieces.put_nowait(None)
    assert await running.answered() == 200
    assert (rig.cuts(), rig.ready) == ((0, 0, 0, 0), True)
    assert rig.hooks.ended == [(running.id, True)]
    rig.open()


@virtual
async def test_a_retire_takes_a_call_out_of_the_sweeps() -> None:
    backend = FakeBackend("b", hang)
    rig = CutsRig(backend)
    running, other = await rig.running(R), await rig.running(S)
    rig.close()
    await settle()
    rig.port.marks.raise_to(R)
    await rig.gate.retire(R, budget())
    assert [each.episode for each in rig.blocking.oldest(9)] == [S]
    assert await running.answered() == 409
    await asyncio.sleep(2.5)
    assert [len(calls) for calls in backend.asked()] == [2, 1]
    assert rig.cuts() == (1, 0, 1, 0)
    assert await rig.finish([other]) == [200]


@virtual
async def test_a_call_that_is_slow_to_end_when_it_is_retired_is_not_asked_about() -> None:
    """It blocks, as being retired, and not for a cut."""
    backend = FakeBackend("b", answers(NOT_FOUND))
    rig = CutsRig(backend)
    running = await rig.running(R)
    running.cleaned.clear()
    rig.close()
    await settle()
    for closed in (True, False):
        if not closed:
            rig.open()
            rig.close()
        with pytest.raises(OutOfTime):
            await rig.gate.retire(R, budget(0))
        asked = len(backend.sweeps)
        await asyncio.sleep(READY)
        assert len(backend.sweeps) == asked
        assert [each.reason for each in rig.blocking.oldest(9)] == [BlockerReason.RETIRING]
    running.cleaned.set()
    assert await running.answered() == 409
    assert rig.ready


@virtual
async def test_a_constrained_call_whose_reply_has_begun_is_not_counted_as_skipped() -> None:
    rig = CutsRig(FakeBackend("b"))
    running = await rig.running(R, {"n": 2}, path=STREAM)
    running.pieces.put_nowait(b"data: 1\n\n")
    await settle()
    rig.close()
    assert rig.counts("inflight", "held", "cut_skipped") == (1, 0, 0)
    running.pieces.put_nowait(None)
    assert await running.answered() == 200


@virtual
async def test_a_delivered_stream_whose_handler_goes_on_is_not_undelivered() -> None:
    """What a framework does after the last piece, such as background tasks, is no part of the reply."""
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    background = asyncio.Event()

    async def and_then(scope: Any, receive: Any, send: Any) -> None:
        await rig.app(scope, receive, send)
        await background.wait()

    rig.served = CheckpointMiddleware(and_then, rig.gate)
    running = await rig.running(R, path=STREAM, headers=WAITING)
    running.pieces.put_nowait(b"data: 1\n\n")
    running.pieces.put_nowait(None)
    await settle()
    rig.close()
    await settle()
    assert rig.counts("inflight", "held", "cut") == (1, 0, 0)
    assert (rig.ready, backend.sweeps, list(rig.gate.undelivered())) == (True, [], [])
    background.set()
    assert await running.answered() == 200
    assert rig.counts("inflight", "held") == (0, 0)


@virtual
async def test_nothing_is_swept_for_a_restore_without_backends_or_with_no_share_of_the_time() -> None:
    backend = FakeBackend("b")
    restoring, bare = CutsRig(backend), CutsRig()
    no_share = CutsRig(backend, settings=PolicyModelSettings(cut_share=0))
    for rig, within in ((restoring, None), (bare, READY), (no_share, READY)):
        running = await rig.running(R)
        rig.close(within)
        await asyncio.sleep(1)
        assert (rig.ready, rig.cuts()) == (True, (1, 0, 0, 0))
        running.finish(finished("own"))
        await settle()
        assert rig.cut_ids() == []
        assert await rig.finish([running]) == [200]
    assert (backend.sweeps, backend.described) == ([], 0)


@virtual
async def test_without_any_time_calls_fail_at_once() -> None:
    """Their own coordinates are still used: they need none."""
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    calls = [await rig.running(R), await rig.running(S)]
    rig.close(0)
    assert (rig.ready, rig.cuts()) == (True, (2, 0, 2, 0))
    calls[0].finish(finished("own"))
    await settle()
    assert (rig.cuts(), backend.sweeps) == ((2, 1, 1, 0), [])
    assert await rig.finish(calls) == [200, 200]


@pytest.mark.behaviour("P99")
@virtual
async def test_an_untagged_call_is_never_in_an_inventory() -> None:
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    judge, running = await rig.running(None), await rig.running(R)
    rig.close()
    await settle()
    assert (backend.asked(), rig.counts("untagged", "cut", "held")) == ([[running.id]], (1, 1, 1))
    assert judge.id != running.id
    judge.finish(finished("own"))
    assert await judge.answered() == 200
    assert (rig.cuts(), rig.hooks.leased) == ((1, 1, 0, 0), [running.id])
    assert await rig.finish([running]) == [200]


@pytest.mark.behaviour("P149")
@virtual
async def test_a_handler_that_begins_after_its_request_has_ended_takes_no_cut_and_blocks_nothing() -> None:
    """As one that shields its work from a caller that leaves."""
    rig = CutsRig(FakeBackend("b"))
    running = rig.arrive(R)
    await settle()
    rig.close()
    assert running.client is not None
    running.client.task.cancel()
    await settle()
    assert running.ticket is not None
    late = rig.gate.begin_generation(running.ticket, {"n": 2}, backend="b", model="m")
    later = rig.gate.begin_generation(running.ticket, {}, backend="b", model="m")
    later.registered()
    later.finished(finished("own"))
    assert (late.continuation, later.continuation, rig.hooks.leased) == (None, None, [])
    assert (rig.ready, rig.cuts()) == (True, (0, 0, 0, 0))
