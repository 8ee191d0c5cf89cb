"""What is told of generation cuts: a span per sweep and backend, and one event for what each call came to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode, get_current_span

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import Capability, CutDisposition, Sweep
from gym_ckpt_grpc.participants import backend_looks, cut_release
from gym_ckpt_grpc.protocol.errors import StateUnwritable, WorkerUnavailable
from gym_ckpt_grpc.telemetry.catalogue import EVENTS_TOTAL, GENERATION_CUT, INSTALL, STEP_DURATION
from tests.participants.cuts_rig import (
    CutsRig,
    FakeBackend,
    Part,
    PreparedRig,
    ack,
    answers,
    finished,
    hang,
    settle,
    virtual,
)
from tests.participants.fakes import R, S
from tests.participants.policy_rig import FakeBackend as Worker
from tests.participants.test_policy_records_install import Lives
from tests.participants.test_restored_cuts import taken
from tests.telemetry.kept import Kept, short

CUT, FINISHED, NOT_FOUND = CutDisposition.CUT, CutDisposition.FINISHED, CutDisposition.NOT_FOUND
UNCUTTABLE, FAILED = CutDisposition.UNCUTTABLE, CutDisposition.FAILED


def events(kept: Kept) -> dict[str, float]:
    """Calls by what they came to."""
    return {
        str(labels["disposition"]): value
        for labels, value in kept.points(EVENTS_TOTAL)
        if labels["event"] == "generation_cut"
    }


def described(span: ReadableSpan) -> dict[str, object]:
    """What a span of a cut says, without the zeros."""
    return {name: value for name, value in short(span.attributes).items() if value != 0}


@virtual
async def test_each_sweep_and_backend_has_a_span_with_one_count_per_disposition() -> None:
    kept = Kept()

    async def mixed(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        yield [ack(sweep, at, how) for at, how in enumerate((CUT, FINISHED, UNCUTTABLE, NOT_FOUND, FAILED))]

    rig = CutsRig(FakeBackend("b", mixed), FakeBackend("c"), telemetry=kept.telemetry)
    calls = [await rig.running(R) for _ in range(5)] + [await rig.running(S, backend="c")]
    rig.close()
    await settle()
    of_b, of_c = sorted(kept.of(GENERATION_CUT), key=lambda span: str(short(span.attributes)["backend"]))
    assert described(of_c) == {"outcome": "ok", "backend": "c", "sweep": 1, "calls": 1, "calls_cut": 1}
    assert described(of_b) == {
        "outcome": "ok",
        "backend": "b",
        "sweep": 1,
        "calls": 5,
        "calls_cut": 1,
        "calls_finished": 1,
        "calls_uncuttable": 1,
        "calls_not_found": 1,
        "calls_failed": 1,
    }
    await rig.finish(calls)
    kept.all_ended()
    kept.check_declared()
    assert kept.points(STEP_DURATION) == []


@virtual
async def test_a_call_counts_once_for_what_it_finally_came_to() -> None:
    """Asked about three times; nothing is counted before it is known."""
    kept = Kept()
    rig = CutsRig(FakeBackend("b", answers(NOT_FOUND, FAILED, CUT)), telemetry=kept.telemetry)
    running = await rig.running(R)
    rig.close()
    await rig.until_ready()
    await settle()
    assert [short(span.attributes)["sweep"] for span in kept.of(GENERATION_CUT)] == [1, 2, 3]
    assert events(kept) == {}
    await rig.finish([running])
    assert events(kept) == {"cut": 1}
    rig.close()
    rig.open()
    assert events(kept) == {"cut": 1}


@virtual
async def test_a_cut_that_the_finished_call_replaces_is_no_cut() -> None:
    kept = Kept()
    rig = CutsRig(FakeBackend("b"), telemetry=kept.telemetry)
    running = await rig.running(R)
    rig.close()
    await settle()
    running.finish(finished("own"))
    await settle()
    await rig.finish([running])
    assert events(kept) == {"finished": 1}


@virtual
async def test_each_checkpoint_counts_its_calls_anew_and_one_that_left_counts_nowhere() -> None:
    kept = Kept()
    rig = CutsRig(FakeBackend("b"), telemetry=kept.telemetry)
    stays, leaves = await rig.running(R), await rig.running(S)
    for times in (1, 2):
        rig.close()
        await settle()
        assert leaves.client is not None
        leaves.client.task.cancel()
        await settle()
        rig.open()
        assert events(kept) == {"cut": times}
    await rig.ends([stays])


@virtual
async def test_an_acknowledgement_that_comes_late_is_no_cut() -> None:
    """It is given up. Its span has ended, with the call as failed."""
    kept = Kept()

    async def slow(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        await asyncio.sleep(budget.left() + 0.5)
        yield [ack(sweep)]

    backend = FakeBackend("b", slow)
    rig = CutsRig(backend, telemetry=kept.telemetry)
    running = await rig.running(R)
    rig.close()
    await rig.until_ready()
    await asyncio.sleep(2)
    rig.open()
    assert rig.hooks.released, "the late cut was never given up"
    spans = [described(span) for span in kept.of(GENERATION_CUT)]
    assert {span["outcome"] for span in spans} == {"DEADLINE_EXCEEDED"}
    assert [(span.get("calls_failed"), span.get("calls_cut")) for span in spans] == [(1, None)] * len(spans)
    assert events(kept) == {"failed": 1}
    await rig.ends([running])
    kept.all_ended()


@pytest.mark.parametrize(
    ("trouble", "outcome"),
    [("unreachable", "WORKER_UNAVAILABLE"), ("hung", "DEADLINE_EXCEEDED"), ("opened", "CANCELLED"), ("weak", "ok")],
)
@virtual
async def test_how_a_sweep_failed_is_the_outcome_of_its_span(trouble: str, outcome: str) -> None:
    kept = Kept()
    backend = FakeBackend("b", hang)
    if trouble == "unreachable":
        backend.unreachable = WorkerUnavailable("nobody listens")
    elif trouble == "weak":
        backend.capabilities = frozenset({Capability.CONTINUE})
    rig = CutsRig(backend, telemetry=kept.telemetry)
    running = await rig.running(R)
    rig.close()
    if trouble == "opened":
        await settle()
        rig.open()
        await settle()
    else:
        await rig.until_ready()
        await settle()
    spans = kept.of(GENERATION_CUT)
    assert spans
    for span in spans:
        assert short(span.attributes)["outcome"] == outcome
        assert (span.status.status_code is StatusCode.ERROR) is (outcome != "ok")
        assert described(span).get("calls_failed") == (None if trouble == "opened" else 1)
    await rig.finish([running])
    kept.all_ended()
    assert events(kept) == ({} if trouble == "opened" else {"failed": 1})


@virtual
async def test_its_span_is_a_child_of_the_prepare_that_closed_admission(tmp_path: Path) -> None:
    """Also those of later sweeps, which begin after a Prepare that was not ready has answered."""
    kept = Kept()
    rig = PreparedRig(tmp_path, FakeBackend("b", answers(NOT_FOUND, NOT_FOUND, CUT)), telemetry=kept.telemetry)
    running = await rig.running(R)
    await rig.prepare(ready_within=8.0)
    spans = kept.of(GENERATION_CUT)
    assert [short(span.attributes)["sweep"] for span in spans] == [1, 2, 3]
    assert {kept.parent(span) for span in spans} == {"gym.checkpoint.prepare"}
    await rig.resume()
    await rig.ends([running])
    await rig.end()
    kept.all_ended()


@virtual
async def test_what_it_asks_of_the_worker_belongs_to_its_span() -> None:
    """That is the span whose trace the calls carry, in each sweep."""
    kept, current = Kept(), []

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        current.append(get_current_span().get_span_context())
        yield [ack(sweep, 0, NOT_FOUND if sweep.number == 1 else CUT)]

    rig = CutsRig(FakeBackend("b", script), telemetry=kept.telemetry)
    running = await rig.running(R)
    rig.close()
    await rig.until_ready()
    await settle()
    assert current == [span.get_span_context() for span in kept.of(GENERATION_CUT)]
    assert len(current) == 2
    await rig.finish([running])


@pytest.mark.parametrize("durable", [True, False])
@virtual
async def test_cuts_of_a_checkpoint_that_stops_the_run_count_once_its_records_are_durable(
    tmp_path: Path, durable: bool
) -> None:
    """There admission never opens. Where it does, nothing counts twice; nor does the end of another's write."""
    kept = Kept()
    rig = PreparedRig(tmp_path, FakeBackend("b"), telemetry=kept.telemetry)
    running = await rig.running(R)
    await rig.prepare()
    rig.owner.write_ended("ckpt-0", True)
    assert events(kept) == {}
    rig.owner.write_ended("ckpt-1", durable)
    assert events(kept) == ({"cut": 1} if durable else {})
    await rig.resume()
    assert events(kept) == {"cut": 1}
    await rig.ends([running])
    await rig.end()


@virtual
async def test_with_spans_off_the_events_are_the_same() -> None:
    kept = Kept("none")
    rig = CutsRig(FakeBackend("b"), telemetry=kept.telemetry)
    calls = [await rig.running(R), await rig.running(S, {"tool_choice": "required"})]
    rig.close()
    await settle()
    await rig.finish(calls)
    assert (kept.spans, events(kept)) == ([], {"cut": 1})


# ---- what goes on for long in the background -----------------------------------------------------------------------


class Traced(Worker):
    """A worker that is down for whatever is asked about cuts. within: the span that is current at each request."""

    def __init__(self) -> None:
        super().__init__()
        self.within: list[int] = []
        self.error = {"check": StateUnwritable("down"), "release": StateUnwritable("down")}

    async def _step(self, method: str) -> None:
        self.within.append(get_current_span().get_span_context().span_id)
        await super()._step(method)


@pytest.mark.parametrize("what", ["looks", "releases"])
async def test_what_is_tried_again_for_long_belongs_to_no_call(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is down for a day makes no trace of a day: only the first try is a part of what led to it."""
    monkeypatch.setattr(backend_looks if what == "looks" else cut_release, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(backend_looks, "OPENING_LIMIT", 0.0)
    kept, lives = Kept(), Lives(tmp_path)
    records = await taken(lives) if what == "looks" else []
    lives.worker = worker = Traced()
    server = lives.start()
    if what == "releases":
        await server.begin(R)
        await server.close()
    with kept.telemetry.span(INSTALL) as opening:
        assert opening.context is not None
        own = get_current_span(opening.context).get_span_context().span_id
        if what == "looks":
            await server.restore(records)
        else:
            await server.open()
    await worker.asked_again(len(worker.asked) + 6)
    tries = worker.within[2:] if what == "looks" else worker.within[1:]  # the sweep, or the restore itself, was before
    assert own in tries
    assert set(tries[-4:]) == {0}
    worker.error.clear()
    for each in lives.lives:
        await each.end()
