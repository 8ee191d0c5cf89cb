"""What backends answer, judged one acknowledgement at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import CallIdentity, CutAck, CutDisposition, CutEvidence, Sweep
from gym_ckpt_grpc.participants.cut_ack import check_evidence
from gym_ckpt_grpc.protocol.errors import WorkerUnavailable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.participants.cuts_rig import (
    READY,
    CutsRig,
    FakeBackend,
    Generation,
    Part,
    Script,
    ack,
    evidence,
    finished,
    settle,
    virtual,
)
from tests.participants.fakes import R, S

CUT, FINISHED, FAILED = CutDisposition.CUT, CutDisposition.FINISHED, CutDisposition.FAILED


def then_nothing(script: Script) -> Script:
    """The first sweep as scripted; in later ones every call fails."""

    async def played(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        if sweep.number == 1:
            async for part in script(sweep, budget):
                yield part
        else:
            yield [ack(sweep, at, FAILED) for at in range(len(sweep.calls))]

    return played


async def swept(script: Script, calls: int = 3) -> tuple[CutsRig, FakeBackend, list[Generation]]:
    """A closed rig whose backend was swept until all calls were settled."""
    backend = FakeBackend("b", then_nothing(script))
    rig = CutsRig(backend)
    running = [await rig.running(EpisodeId(f"r{number}")) for number in range(calls)]
    rig.close()
    await rig.until_ready()
    return rig, backend, running


def stranger(good: CutAck) -> CutAck:
    return replace(good, call=CallIdentity("nobody", R, "call", good.call.request_digest), evidence=evidence("stray"))


BAD: dict[str, Callable[[CutAck], list[CutAck]]] = {
    "another episode": lambda good: [replace(good, call=replace(good.call, episode=S))],
    "another call": lambda good: [replace(good, call=replace(good.call, model_call_id="x"))],
    "another digest": lambda good: [replace(good, call=replace(good.call, request_digest="0" * 64))],
    "no evidence": lambda good: [replace(good, evidence=None)],
    "no disposition": lambda good: [replace(good, disposition=CutDisposition.UNSPECIFIED)],
    "evidence with FAILED": lambda good: [replace(good, disposition=FAILED)],
    "duplicate": lambda good: [good, replace(good, evidence=evidence("twice"))],
    "duplicate FAILED": lambda good: [good, replace(good, disposition=FAILED, evidence=None)],
    "bad, then good": lambda good: [replace(good, evidence=None), good],
    "three times": lambda good: [good, good, good],
}


@pytest.mark.behaviour("P129")
@pytest.mark.parametrize("bad", BAD)
@virtual
async def test_one_invalid_ack_fails_only_its_call(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    """The valid ones of the same reply stand. What the bad one made durable is given up; its call is asked again."""

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        yield [ack(sweep, 0), *BAD[bad](ack(sweep, 1)), ack(sweep, 2)]

    rig, backend, running = await swept(script)
    assert [len(asked) for asked in backend.asked()] == [3, 1]
    assert (rig.cuts(), rig.cut_ids()) == ((3, 2, 1, 0), [f"{running[0].id}-1.1", f"{running[2].id}-1.1"])
    assert running[1].ticket is not None
    assert (running[1].ticket.cut, running[1].ticket.disposition, running[1].ticket.tries) == (None, FAILED, 2)
    assert "bad acknowledgement" in caplog.text
    made = {bad_ack.evidence.cut_id for bad_ack in BAD[bad](ack(backend.sweeps[0], 1)) if bad_ack.evidence}
    assert {cut_id for _, cut_id in rig.hooks.released} == made
    assert await rig.finish(running) == [200] * 3


@pytest.mark.behaviour("P129")
@virtual
async def test_an_ack_of_an_unknown_ticket_fails_nobody() -> None:
    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        yield [stranger(ack(sweep, 0)), ack(sweep, 0), ack(sweep, 1)]

    rig, backend, running = await swept(script, 2)
    assert (rig.cuts(), len(backend.sweeps)) == ((2, 2, 0, 0), 1)
    assert rig.hooks.released == [("b", "stray")]
    assert await rig.finish(running) == [200, 200]


@pytest.mark.behaviour("P129")
@virtual
async def test_a_cut_that_belongs_to_another_call_already_is_not_taken_and_not_released() -> None:
    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        yield [ack(sweep, 0, cut_id="one"), ack(sweep, 1, cut_id="one")]

    rig, _, running = await swept(script, 2)
    assert (rig.cuts(), rig.cut_ids(), rig.hooks.released) == ((2, 1, 1, 0), ["one"], [])
    assert await rig.finish(running) == [200, 200]


@virtual
async def test_acks_without_a_header_before_them_do_not_stand() -> None:
    """A record of such a cut could not name who made it."""

    class Headless(FakeBackend):
        async def cut(self, sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
            self.sweeps.append(sweep)
            yield [ack(sweep)]

    backend = Headless("b")
    rig = CutsRig(backend)
    running = await rig.running(R)
    rig.close()
    await rig.until_ready()
    assert (len(backend.sweeps), rig.cuts(), len(rig.hooks.released)) == (2, (1, 0, 1, 0), 2)
    assert await rig.finish([running]) == [200]


@virtual
async def test_calls_that_an_answer_leaves_out_are_asked_again() -> None:
    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        yield [ack(sweep, 1)]

    rig, backend, running = await swept(script, 2)
    assert (backend.asked()[1], rig.cuts()) == ([running[0].id], (2, 1, 1, 0))
    assert await rig.finish(running) == [200, 200]


@pytest.mark.behaviour("P130")
@pytest.mark.parametrize("end", ["broken", "hung"])
@virtual
async def test_acks_received_before_the_stream_broke_or_timed_out_stand(end: str) -> None:
    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        yield [ack(sweep, 0)]
        await asyncio.sleep(0.5)
        yield [ack(sweep, 1, FINISHED)]
        if end == "broken":
            raise WorkerUnavailable("gone")
        await asyncio.Event().wait()

    rig, backend, running = await swept(script)
    assert [len(asked) for asked in backend.asked()] == [3, 1]
    assert (rig.cuts(), rig.cut_ids()) == ((3, 2, 1, 0), [f"{each.id}-1.1" for each in running[:2]])
    assert rig.hooks.released == []
    assert await rig.finish(running) == [200] * 3


@pytest.mark.behaviour("P141")
@pytest.mark.parametrize("ends", ["its time", "the time of all", "Resume", "Resume and a new close"])
@virtual
async def test_a_late_ack_is_released_and_changes_no_count(ends: str) -> None:
    """One that comes after the time of its sweep, after that of all sweeps, or after its closing."""
    send = asyncio.Event()

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        await send.wait()
        yield [ack(sweep)]

    backend = FakeBackend("b", then_nothing(script))
    rig = CutsRig(backend)
    running = await rig.running(R)
    if ends == "the time of all":
        rig.close(1.0)
        await asyncio.sleep(0.51)
    elif ends == "its time":
        rig.close()
        await asyncio.sleep(READY / 4 + 0.1)
        assert not rig.ready
    else:
        rig.close()
        await settle()
        rig.open()
        if ends == "Resume and a new close":
            rig.close(0)
    before = rig.cuts()
    send.set()
    await settle()
    assert (rig.hooks.released, rig.hooks.made) == ([("b", f"{running.id}-1.1")], [])
    assert (rig.cuts(), rig.cut_ids()) == (before, [])
    assert await rig.finish([running]) == [200]


@pytest.mark.behaviour("P141")
@virtual
async def test_an_ack_of_a_call_that_has_ended_meanwhile_is_released() -> None:
    """As is one of a call that has its own coordinates by now."""
    send = asyncio.Event()

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        await send.wait()
        yield [ack(sweep, 0), ack(sweep, 1)]

    backend = FakeBackend("b", script)
    rig = CutsRig(backend)
    gone, done = await rig.running(R), await rig.running(S)
    rig.close()
    await settle()
    assert gone.client is not None
    gone.client.task.cancel()
    done.finish(finished("own"))
    await settle()
    assert (rig.ready, rig.cuts()) == (True, (1, 1, 0, 0))
    send.set()
    await settle()
    assert rig.hooks.released == [("b", f"{gone.id}-1.1"), ("b", f"{done.id}-1.1")]
    assert (rig.cuts(), rig.cut_ids(), len(backend.sweeps)) == ((1, 1, 0, 0), ["own"], 1)
    assert await rig.finish([done]) == [200]


@virtual
async def test_a_bad_ack_that_names_the_cut_of_another_call_does_not_release_it() -> None:
    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        good = ack(sweep, 0, cut_id="one")
        yield [good, stranger(ack(sweep, 1)), replace(good, call=replace(sweep.calls[1][0], request_digest="0" * 64))]

    rig, _, running = await swept(script, 2)
    assert (rig.cuts(), rig.cut_ids(), rig.hooks.released) == ((2, 1, 1, 0), ["one"], [("b", "stray")])
    assert await rig.finish(running) == [200, 200]


@pytest.mark.parametrize("said", [CutDisposition.NOT_FOUND, CutDisposition.UNCUTTABLE, FAILED])
@virtual
async def test_an_ack_without_a_cut_changes_nothing_of_a_call_that_is_settled(said: CutDisposition) -> None:
    """Its reply became an error while the backend was asked: it neither blocks again nor is asked again."""
    send = asyncio.Event()

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        await send.wait()
        yield [ack(sweep, 0, said)]

    backend = FakeBackend("b", script)
    rig = CutsRig(backend)
    running = await rig.running(R)
    rig.close()
    running.status = 500
    running.finish()
    await settle()
    assert rig.ready
    send.set()
    await asyncio.sleep(1)
    assert (rig.ready, len(backend.sweeps), rig.cuts()) == (True, 1, (1, 0, 1, 0))
    assert running.ticket is not None
    assert (running.ticket.disposition, running.ticket.tries) == (FAILED, 0)
    assert await rig.finish([running]) == [500]


@virtual
async def test_an_ack_of_a_call_that_was_begun_anew_meanwhile_is_not_for_it() -> None:
    send = asyncio.Event()

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        await send.wait()
        yield [ack(sweep, 0)]

    rig = CutsRig(FakeBackend("b", script))
    running = await rig.running(R)
    rig.close()
    await settle()
    old = running.id
    assert running.ticket is not None
    again = rig.gate.begin_generation(running.ticket, {}, backend="b", model="m")
    send.set()
    await settle()
    assert (rig.hooks.released, rig.cut_ids(), rig.ready) == ([("b", f"{old}-1.1")], [], False)
    again.registered()
    await rig.until_ready()
    assert rig.cut_ids() == [f"{again.call_id}-1.2"]
    assert await rig.finish([running]) == [200]


GOOD = evidence("c")
ENDED = finished("c")


@pytest.mark.parametrize(
    ("disposition", "given", "problem"),
    [
        (CUT, GOOD, ""),
        (CUT, replace(GOOD, prefix_tokens=0, weight_version=0, output_limit=1), ""),
        (FINISHED, ENDED, ""),
        (FINISHED, replace(ENDED, finish_reason="length", stop_reason="x"), ""),
        (CutDisposition.NOT_FOUND, None, ""),
        (CutDisposition.UNCUTTABLE, None, ""),
        (CUT, None, "without evidence"),
        (FINISHED, None, "without evidence"),
        (CutDisposition.NOT_FOUND, GOOD, "with evidence"),
        (CutDisposition.UNCUTTABLE, GOOD, "with evidence"),
        (CUT, replace(GOOD, cut_id=""), "cut id"),
        (CUT, replace(GOOD, cut_id="é" * 129), "cut id"),
        (CUT, replace(GOOD, staging_keys=()), "missing"),
        (CUT, replace(GOOD, staging_keys=("a", "")), "missing"),
        (CUT, replace(GOOD, staging_keys=("a", "a")), "twice"),
        (CUT, replace(GOOD, prefix_tokens=-1), "negative"),
        (CUT, replace(GOOD, prefix_digest=""), "SHA-256"),
        (CUT, replace(GOOD, prefix_digest="5A" * 32), "SHA-256"),
        (CUT, replace(GOOD, output_limit=0), "output limit"),
        (CUT, replace(GOOD, weight_version=-1), "weight version"),
        (CUT, replace(GOOD, finish_reason="stop"), "finish reason"),
        (CUT, replace(GOOD, stop_reason="x"), "without a finish reason"),
        (FINISHED, replace(ENDED, finish_reason=""), "stop or length"),
        (FINISHED, replace(ENDED, finish_reason="tool_calls"), "stop or length"),
        (FINISHED, replace(ENDED, finish_reason="", stop_reason="x"), "without a finish reason"),
    ],
)
@pytest.mark.behaviour("P129")
def test_evidence_is_complete_or_the_problem_is_named(
    disposition: CutDisposition, given: CutEvidence | None, problem: Any
) -> None:
    found = check_evidence(disposition, given)
    assert problem in found
    assert bool(found) is bool(problem)
