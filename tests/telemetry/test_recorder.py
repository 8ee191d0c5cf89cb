"""Counting: an operation once for what it did, with the outcome it had, whatever the spans do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from gym_ckpt_grpc.protocol.errors import ERRORS, InvalidPhase
from gym_ckpt_grpc.telemetry import Recorder, catalogue, outcome_of
from gym_ckpt_grpc.telemetry import attributes as at
from tests.telemetry.kept import Kept, short

GROUPS = ["none", "checkpoint"]


def recorder_of(kept: Kept) -> Recorder:
    return Recorder("resources", service="store", instance="0", telemetry=kept.telemetry)


@pytest.mark.behaviour("C309")
@pytest.mark.parametrize("groups", GROUPS)
def test_an_operation_and_its_steps(groups: str) -> None:
    """A duration each, once; spans where their group is on, the steps under the operation."""
    kept = Kept(groups)
    recorder = recorder_of(kept)
    with recorder.operation("commit", checkpoint_id="c1") as commit:
        commit.set(at.RECORDS, 3)
        with recorder.step(catalogue.EXPORT, attempt=True):
            pass
        with recorder.step(catalogue.CLEANUP, timed=False):
            pass
    done = {"participant_kind": "resources", "outcome": "ok"}
    assert kept.points(catalogue.OPERATION_DURATION) == [({"operation": "commit", **done}, 1)]
    assert kept.points(catalogue.STEP_DURATION) == [({"step": "export", **done}, 1)]
    assert kept.points(catalogue.ATTEMPTS_TOTAL) == [({"step": "export", "participant_kind": "resources"}, 1)]
    kept.check_declared()
    kept.all_ended()
    if groups == "none":
        assert kept.spans == []
        return
    span = kept.only(catalogue.COMMIT)
    assert short(span.attributes) == {
        "id": "c1",
        "participant_kind": "resources",
        "service": "store",
        "instance": "0",
        "records": 3,
        "outcome": "ok",
    }
    assert span.status.status_code is StatusCode.UNSET
    assert [kept.parent(kept.only(step)) for step in (catalogue.EXPORT, catalogue.CLEANUP)] == [span.name] * 2


@pytest.mark.behaviour("C305")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("error", "outcome"),
    [(row.exception("secret-text"), code.name) for code, row in ERRORS.items()]
    + [(OSError("secret-text"), "INTERNAL"), (asyncio.CancelledError(), "CANCELLED"), (GeneratorExit(), "CANCELLED")],
)
def test_outcomes_of_errors(groups: str, error: BaseException, outcome: str) -> None:
    """The name of the error code; INTERNAL for what is no error of ours. The text is not told."""
    kept = Kept(groups)
    assert outcome_of(error) == outcome
    with pytest.raises(type(error)), recorder_of(kept).operation("restore"):
        raise error
    assert kept.value(catalogue.OPERATION_DURATION, operation="restore", outcome=outcome) == 1
    assert kept.value(catalogue.OPERATION_DURATION) == 1
    for span in kept.of(catalogue.RESTORE):
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, outcome)
        assert span.events == ()
        assert "secret" not in repr((span.attributes, span.status.description))
    kept.all_ended()


@pytest.mark.behaviour("C306")
def test_what_the_end_of_the_block_does_not_say() -> None:
    """`not_ready` is neither ok nor an error; `failed` is an error that is not raised."""
    kept = Kept()
    recorder = recorder_of(kept)
    with recorder.operation("prepare") as prepare:
        prepare.not_ready()
    with recorder.operation("resume") as resume:
        resume.failed("RESUME_INCOMPLETE")
    assert kept.value(catalogue.OPERATION_DURATION, operation="prepare", outcome="not_ready") == 1
    assert kept.value(catalogue.OPERATION_DURATION, operation="resume", outcome="RESUME_INCOMPLETE") == 1
    assert kept.value(catalogue.OPERATION_DURATION, outcome="ok") == 0
    assert kept.only(catalogue.PREPARE).status.status_code is StatusCode.UNSET
    assert kept.only(catalogue.RESUME).status.status_code is StatusCode.ERROR


@pytest.mark.behaviour("C307")
@pytest.mark.parametrize("groups", GROUPS)
def test_a_replay_is_an_event(groups: str) -> None:
    """It has no duration; one that fails is the failure it is."""
    kept = Kept(groups)
    recorder = recorder_of(kept)
    with recorder.operation("commit") as again:
        again.replayed()
    with recorder.operation("prepare") as again:
        again.replayed()
        again.not_ready()
    assert kept.points(catalogue.OPERATION_DURATION) == []
    for operation in ("commit", "prepare"):
        assert kept.value(catalogue.EVENTS_TOTAL, event="replayed", operation=operation) == 1
    failing = recorder.operation("commit")
    failing.replayed()
    with pytest.raises(InvalidPhase), failing:
        raise InvalidPhase("no")
    assert kept.value(catalogue.EVENTS_TOTAL) == 2
    assert kept.value(catalogue.OPERATION_DURATION, outcome="INVALID_PHASE") == 1
    kept.check_declared()


def test_an_operation_that_is_no_block() -> None:
    """It ends by hand, and once, whoever tells it again."""
    kept = Kept()
    timed = recorder_of(kept).operation("lease_reopen")
    timed.end("ok")
    timed.end("INTERNAL")
    assert kept.points(catalogue.OPERATION_DURATION) == [
        ({"operation": "lease_reopen", "participant_kind": "resources", "outcome": "ok"}, 1)
    ]
    kept.only(catalogue.LEASE_REOPEN)
    kept.all_ended()


def test_volume_and_events() -> None:
    """With the participant's kind, and the labels given."""
    kept = Kept()
    recorder = recorder_of(kept)
    recorder.volume("commit", records=5, size=1000)
    recorder.event("generation_cut", disposition="cut")
    who = {"participant_kind": "resources"}
    assert kept.points(catalogue.RECORDS_TOTAL) == [({"operation": "commit", **who}, 5)]
    assert kept.points(catalogue.BYTES_TOTAL) == [({"operation": "commit", **who}, 1000)]
    assert kept.points(catalogue.EVENTS_TOTAL) == [({"event": "generation_cut", "disposition": "cut", **who}, 1)]
    kept.check_declared()


async def test_work_that_outlives_its_call_keeps_the_trace() -> None:
    """A task begun in a span is its child's, also when it ends after it."""
    kept = Kept()
    recorder = recorder_of(kept)
    go = asyncio.Event()

    async def write() -> None:
        await go.wait()
        with recorder.step(catalogue.WRITE):
            pass

    with recorder.operation("commit"):
        task = asyncio.create_task(write())
    await asyncio.sleep(0)
    assert [span.name for span in kept.spans] == [catalogue.COMMIT.name]
    go.set()
    await task
    commit, write_span = kept.only(catalogue.COMMIT), kept.only(catalogue.WRITE)
    assert kept.parent(write_span) == commit.name
    assert write_span.end_time > commit.end_time  # type: ignore[operator]
    kept.all_ended()


async def test_a_span_of_a_generator_that_another_task_closes(caplog: pytest.LogCaptureFixture) -> None:
    """It ends, and nothing is logged of a context that is another task's."""
    kept = Kept()

    async def stream() -> Any:
        with kept.telemetry.span(catalogue.COMMIT):
            yield 1
            yield 2

    going = stream()
    await asyncio.create_task(anext(going))
    await asyncio.create_task(going.aclose())
    kept.all_ended()
    assert kept.only(catalogue.COMMIT).attributes[at.OUTCOME] == "CANCELLED"  # type: ignore[index]
    assert caplog.text == ""


def test_a_block_is_current_inside_only() -> None:
    """Siblings do not become children."""
    kept = Kept()
    recorder = recorder_of(kept)
    for operation in ("prepare", "resume"):
        with recorder.operation(operation):
            pass
    assert [kept.parent(span) for span in kept.spans] == ["", ""]
