"""Races of a participant, as telemetry tells them: each span ends once and rightly, each thing counts once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import Budget, ControlSettings, HookFailed
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    ExportFailed,
    InternalError,
    OutOfTime,
    StaleCheckpoint,
    StateUnwritable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.protocol.machine import Call, CommitArguments
from gym_ckpt_grpc.protocol.phases import Operation
from gym_ckpt_grpc.storage import LocalFiles, resolve_checkpoint
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import SpanType
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import FAST, Clock, Participant, eventually, running
from tests.control.test_operations_told import STEPS
from tests.control.test_resume import SHORT
from tests.telemetry.kept import Kept, short

A, B = EpisodeId("a"), EpisodeId("b")
LONG_CLEANUP = ControlSettings(deletion_wait=60, watch_interval=0.01, status_interval=0.01)
DONE, STEP, EVENTS = catalogue.OPERATION_DURATION, catalogue.STEP_DURATION, catalogue.EVENTS_TOTAL


def told(kept: Kept, *spans: SpanType) -> dict[str, list[tuple[str, str]]]:
    """Short name of a span -> (outcome, status) of each, in the order of their ends; all of ours by default."""
    listed = spans or (*catalogue.OPERATIONS.values(), *STEPS)
    found = {
        span.name.rpartition(".")[2]: [
            (str(short(ended.attributes)["outcome"]), ended.status.status_code.name) for ended in kept.of(span)
        ]
        for span in listed
    }
    return {name: outcomes for name, outcomes in found.items() if outcomes}


OK, NOT_READY, STALE = [("ok", "UNSET")], [("not_ready", "UNSET")], [("STALE_CHECKPOINT", "ERROR")]
CANCELLED = [("CANCELLED", "ERROR")]


async def commit(p: Participant, id: str, budget: Budget) -> None:
    """Not over the wire: there the storage URI is looked at in a thread first, and a late answer is lost."""
    location = await asyncio.to_thread(resolve_checkpoint, p.uri(id), [str(p.root)], files=LocalFiles())
    arguments = CommitArguments(EpisodeScope.all(), p.uri(id))
    call = Call(Operation.COMMIT, id, "t", 1, arguments)
    await p.plane.commit(call, arguments, location, budget=budget)


async def commit_briefly(p: Participant) -> None:
    """A Commit that runs out of time; its write is held then, and goes on."""
    with pytest.raises(OutOfTime):
        await commit(p, "c1", Budget(0.2))
    await p.files.wait_entered()


async def test_a_resume_while_prepare_waits(tmp_path: Path) -> None:
    """The waiting call is answered with IDLE: it was not ready; the resume is ok; the doors opened once."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a", running=True)
        async with running(p.prepare(within=9, timeout=10)) as prepare:
            await p.until("PREPARING")
            await p.resume()
            assert (await prepare).phase == pb.PHASE_IDLE
        assert p.is_open()
        assert kept.value(EVENTS, event="prepare_not_ready") == 1
        assert kept.value(EVENTS) == 1
        assert kept.points(catalogue.PAUSE) == [({"participant_kind": "resources", "cause": "aborted"}, 1)]
    kept.all_ended()
    assert told(kept) == {"prepare": NOT_READY, "wait_ready": NOT_READY, "resume": OK}


@pytest.mark.behaviour("C302")
async def test_an_expiry_after_the_caller_of_prepare_has_gone(tmp_path: Path) -> None:
    """The call holds the lease while it waits. Once it is gone its span has ended, and one expiry is told of."""
    kept, clock = Kept(), Clock()
    async with Participant(tmp_path, clock=clock, telemetry=kept.telemetry) as p:
        p.add("a", running=True)
        async with running(p.prepare(within=20, ttl=10, timeout=25)):
            await p.until("PREPARING")
            clock.now += 1000
            await asyncio.sleep(3 * FAST.watch_interval)
            assert await p.phase() == "PREPARING"
            assert kept.value(EVENTS) == 0
        await eventually(lambda: kept.value(DONE, operation="prepare", outcome="CANCELLED") == 1)
        clock.now += 11
        await p.until("IDLE")
        await eventually(lambda: kept.value(EVENTS, event="lease_expired") == 1)
        assert p.is_open()
        assert kept.value(EVENTS) == 1
        assert kept.points(catalogue.PAUSE) == [({"participant_kind": "resources", "cause": "lease_expired"}, 1)]
        assert kept.value(DONE, operation="lease_reopen", outcome="ok") == 1
    kept.all_ended()
    assert told(kept) == {"prepare": CANCELLED, "wait_ready": CANCELLED, "lease_reopen": OK}
    assert short(kept.only(catalogue.LEASE_REOPEN).attributes)["phase"] == "IDLE"


@pytest.mark.behaviour("C302", "C128", "C119")
async def test_an_expiry_whose_opening_fails(tmp_path: Path) -> None:
    """One expiry, counted when the doors are open; each try is an operation of its own, and each failure an alarm."""
    kept, clock = Kept(), Clock()
    async with Participant(tmp_path, clock=clock, telemetry=kept.telemetry) as p:
        await p.prepare(ttl=10)
        p.owner.opens.error = HookFailed("jammed")
        clock.now += 11
        await p.owner.opens.reached(3)
        assert await p.phase() == "RESUMING"
        await eventually(lambda: kept.value(EVENTS, event="open_failed") >= 3)
        assert kept.value(EVENTS, event="lease_expired") == kept.value(catalogue.PAUSE) == 0
        assert kept.value(DONE, operation="lease_reopen", outcome="ok") == 0
        p.owner.opens.error = None
        await p.resume()
        await eventually(lambda: kept.value(EVENTS, event="lease_expired") == 1)
        await p.resume()
        assert kept.value(EVENTS, event="lease_expired") == 1
        assert kept.value(DONE, operation="lease_reopen", outcome="ok") == 1
        failed = kept.value(EVENTS, event="open_failed")
        assert kept.value(DONE, operation="lease_reopen", outcome="INTERNAL") == failed >= 3
        assert kept.value(DONE, operation="resume", outcome="ok") == 1
        assert kept.value(catalogue.PAUSE) == 1
    kept.all_ended()
    tries = kept.of(catalogue.LEASE_REOPEN)
    assert [short(span.attributes)["outcome"] for span in tries] == ["INTERNAL"] * int(failed) + ["ok"]
    assert [short(span.attributes)["phase"] for span in tries] == ["RESUMING"] * int(failed) + ["IDLE"]
    assert {kept.parent(span) for span in tries} == {"gym.checkpoint.prepare"}


@pytest.mark.behaviour("C302", "C307")
async def test_an_expiry_during_the_cleanup_of_a_commit(tmp_path: Path) -> None:
    """The write had succeeded and counts; cleanup and commit were cut off; the expiry counts once."""
    kept, clock = Kept(), Clock()
    async with Participant(tmp_path, clock=clock, settings=LONG_CLEANUP, telemetry=kept.telemetry) as p:
        p.add("a", "b")
        p.owner.pending = {B}
        p.owner.deletes.hold()
        await p.prepare(ttl=10)
        async with running(p.commit([A], timeout=60)):
            await p.owner.deletes.reached(1)
        await eventually(lambda: kept.value(DONE, operation="commit", outcome="CANCELLED") == 1)
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
        assert kept.of(catalogue.CLEANUP) == []
        clock.now += 11
        await eventually(lambda: kept.value(STEP, step="cleanup", outcome="STALE_CHECKPOINT") == 1)
        p.owner.deletes.open.set()
        await p.until("IDLE")
        await eventually(lambda: kept.value(EVENTS, event="lease_expired") == 1)
        assert p.is_open()
        assert p.owner.pending == set()
        assert kept.value(EVENTS, event="preempted", operation="commit") == 1
        assert kept.value(EVENTS) == 2
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
        assert kept.value(catalogue.BYTES_TOTAL, operation="commit") > 0
        assert kept.value(catalogue.ATTEMPTS_TOTAL, step="write") == 1
    kept.all_ended()
    assert told(kept) == {
        "prepare": OK,
        "wait_ready": OK,
        "export": OK,
        "write": OK,
        "commit": CANCELLED,
        "cleanup": STALE,
        "lease_reopen": OK,
    }
    assert kept.parent(kept.only(catalogue.CLEANUP)) == catalogue.COMMIT.name


@pytest.mark.behaviour("C307")
async def test_a_commit_repeated_while_its_first_write_runs(tmp_path: Path) -> None:
    """Out of time, then ok once, then a replay: one write, a child of the call that began it, and one volume."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        await p.capture()
        p.files.hold("create")
        await commit_briefly(p)
        assert kept.of(catalogue.WRITE) == []
        assert kept.value(catalogue.RECORDS_TOTAL) == 0
        async with running(p.commit()) as again:
            await eventually(lambda: len([s for s in kept._spans.began if s.name == catalogue.COMMIT.name]) == 2)
            p.files.release()
            assert not (await again).replayed
        assert (await p.commit()).replayed
        assert await p.phase() == "COMMITTED"
        assert kept.value(DONE, operation="commit", outcome="DEADLINE_EXCEEDED") == 1
        assert kept.value(DONE, operation="commit", outcome="ok") == 1
        assert kept.value(EVENTS, event="replayed", operation="commit") == 1
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
        assert kept.value(catalogue.ATTEMPTS_TOTAL, step="write") == 1
    kept.all_ended()
    assert told(kept, catalogue.COMMIT, *STEPS) == {
        "commit": [("DEADLINE_EXCEEDED", "ERROR"), *OK, *OK],
        "wait_ready": OK,
        "export": OK,
        "write": OK,
        "cleanup": OK,
    }
    write, first = kept.only(catalogue.WRITE), kept.of(catalogue.COMMIT)[0]
    assert write.parent is not None
    assert first.context is not None
    assert write.parent.span_id == first.context.span_id


@pytest.mark.behaviour("C307")
async def test_a_commit_whose_write_ended_between_two_calls(tmp_path: Path) -> None:
    """Nobody had been told of its success: the next call is, once, though its answer is the recorded one."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        await commit_briefly(p)
        p.files.release()
        await p.until("COMMITTED")
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
        for _ in range(2):
            await p.commit()
        assert kept.value(DONE, operation="commit", outcome="ok") == 1
        assert kept.value(EVENTS, event="replayed", operation="commit") == 1
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1


async def test_a_resume_stops_a_write_on_its_thread(tmp_path: Path) -> None:
    """The write ends when its thread does, not when the Commit that waited was told: stopped, so no volume."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit()) as commit:
            await p.files.wait_entered()
            await p.resume()
            with pytest.raises(StaleCheckpoint):
                await commit
        assert kept.of(catalogue.WRITE) == []
        assert kept.value(EVENTS, event="preempted", operation="commit") == 1
        p.files.release()
        await eventually(lambda: kept.value(STEP, step="write", outcome="STALE_CHECKPOINT") == 1)
        assert kept.value(catalogue.RECORDS_TOTAL) == 0
    kept.all_ended()
    assert told(kept, catalogue.WRITE, catalogue.COMMIT, catalogue.RESUME) == {
        "write": STALE,
        "commit": STALE,
        "resume": OK,
    }


@pytest.mark.parametrize("fails", [False, True])
async def test_a_publication_that_outlives_its_resume(tmp_path: Path, fails: bool) -> None:
    """What the thread really did is told: the write that ended well after all counts, the one that failed does not."""
    kept = Kept()
    async with Participant(tmp_path, settings=SHORT, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("publish", "manifest.json")
        async with running(p.commit()) as commit:
            await p.files.wait_entered()
            await p.resume()
            with pytest.raises(ControlError):
                await commit
        assert p.is_open()
        assert kept.of(catalogue.WRITE) == []
        if fails:
            p.files.fail("publish", StateUnwritable("full"))
        p.files.release()
        outcome = "STATE_UNWRITABLE" if fails else "ok"
        await eventually(lambda: kept.value(STEP, step="write", outcome=outcome) == 1)
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == (0 if fails else 1)
        assert kept.value(STEP, step="write") == 1
        assert kept.value(EVENTS, event="preempted", operation="commit") == 1
    kept.all_ended()


async def test_a_write_that_no_thread_took_up(tmp_path: Path) -> None:
    """All threads hang: the write that waits for one ends with its Commit, and never runs."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        for number in range(4):
            await p.prepare(f"c{number}")
            p.files.hold("create")
            async with running(p.commit(id=f"c{number}")):
                await p.files.wait_entered()
                await p.resume(f"c{number}")
        await p.prepare("last")
        async with running(commit(p, "last", Budget(20))):
            await eventually(lambda: kept.value(catalogue.ATTEMPTS_TOTAL, step="write") == 5)
            await p.resume("last")
        await eventually(lambda: kept.value(STEP, step="write", outcome="STALE_CHECKPOINT") == 1)
        p.files.release()
    kept.all_ended()
    assert kept.value(catalogue.RECORDS_TOTAL) == 0


@pytest.mark.parametrize("operation", ["capture", "commit"])
async def test_a_resume_cuts_an_export_off(tmp_path: Path, operation: str) -> None:
    """Export and call are stale, counted as one pre-emption of what was asked for."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.owner.exports.hold()
        async with running(getattr(p, operation)()) as call:
            await p.owner.exports.reached(1)
            await p.resume()
            with pytest.raises(StaleCheckpoint):
                await call
        assert kept.points(EVENTS) == [
            ({"participant_kind": "resources", "event": "preempted", "operation": operation}, 1)
        ]
        assert kept.value(catalogue.ATTEMPTS_TOTAL, step="export") == 1
    kept.all_ended()
    assert told(kept) == {"prepare": OK, "wait_ready": OK, "export": STALE, operation: STALE, "resume": OK}


async def test_a_resume_cuts_an_export_off_that_followed_a_failed_one(tmp_path: Path) -> None:
    """A Commit failed with its export; what is cut off is the Capture that tried again."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.owner.exports.error = HookFailed("no")
        with pytest.raises(ExportFailed):
            await p.commit()
        p.owner.exports.error = None
        p.owner.exports.hold()
        async with running(p.capture()) as call:
            await p.owner.exports.reached(2)
            await p.resume()
            with pytest.raises(StaleCheckpoint):
                await call
        assert kept.points(EVENTS) == [
            ({"participant_kind": "resources", "event": "preempted", "operation": "capture"}, 1)
        ]
    kept.all_ended()


async def test_a_resume_cuts_a_close_off(tmp_path: Path) -> None:
    """The waiting prepare was not ready; one pre-emption, one pause."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.owner.closes.hold()
        async with running(p.prepare(within=2)) as prepare:
            await p.owner.closes.reached(1)
            await p.resume()
            assert (await prepare).phase == pb.PHASE_IDLE
        assert kept.value(EVENTS, event="preempted", operation="prepare") == 1
        assert kept.value(catalogue.PAUSE, cause="aborted") == kept.value(catalogue.PAUSE) == 1
    kept.all_ended()
    assert told(kept) == {"prepare": NOT_READY, "wait_ready": NOT_READY, "resume": OK}


async def test_a_resume_just_before_the_doors_open_by_themselves(tmp_path: Path) -> None:
    """A failed close opens them, a Resume has begun to: they are opened twice, and were shut once."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.owner.closes.error = HookFailed("no")
        p.owner.opens.hold()
        async with running(p.prepare()):
            await p.owner.opens.reached(1)
            resume = asyncio.ensure_future(
                p.plane.resume(Call(Operation.RESUME, "c1", "t", 1), keep_write=False, budget=Budget(5))
            )
            p.owner.opens.open.set()  # after the task above is scheduled: RESUMING comes first
            await resume
        assert [opening.cause.value for opening in p.owner.openings] == ["close_failed", "aborted"]
        assert kept.points(catalogue.PAUSE) == [({"participant_kind": "resources", "cause": "close_failed"}, 1)]
    kept.all_ended()


async def test_a_resume_after_a_failed_write_cuts_nothing_off(tmp_path: Path) -> None:
    """What had ended by itself was not pre-empted."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.files.fail("create", StateUnwritable("full"))
        with pytest.raises(StateUnwritable):
            await p.commit()
        await p.resume()
        assert kept.points(EVENTS) == []


@pytest.mark.behaviour("C307")
async def test_a_kept_write_counts_once(tmp_path: Path) -> None:
    """A Commit after Resume(keep_write): its steps are its children, its volume counts once, repeats are events."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        await p.capture()
        await p.resume(keep_write=True)
        for _ in range(3):
            await p.commit()
        assert kept.value(DONE, operation="commit", outcome="ok") == 1
        assert kept.value(EVENTS, event="replayed", operation="commit") == 2
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
        assert kept.value(EVENTS, event="preempted") == 0
        await p.resume()
        assert kept.value(EVENTS, event="replayed", operation="resume") == 1
    kept.all_ended()
    assert kept.parent(kept.only(catalogue.WRITE)) == catalogue.COMMIT.name


async def test_a_kept_write_that_is_dropped(tmp_path: Path) -> None:
    """By a Resume without keep_write, while it writes: one pre-emption, no volume, and no second pause."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        await p.capture()
        await p.resume(keep_write=True)
        p.files.hold("create")
        async with running(p.commit()) as commit:
            await p.files.wait_entered()
            await p.resume()
            with pytest.raises(StaleCheckpoint):
                await commit
        p.files.release()
        await eventually(lambda: kept.value(STEP, step="write", outcome="STALE_CHECKPOINT") == 1)
        assert kept.value(EVENTS, event="preempted", operation="commit") == 1
        assert kept.value(catalogue.RECORDS_TOTAL) == 0
        assert kept.value(catalogue.PAUSE) == 1
    kept.all_ended()


async def test_a_write_whose_storage_cancels_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file layer with a loop of its own may raise that; nobody resumed: the Commit fails, and works when repeated."""
    kept = Kept()

    def write_part(*arguments: object, **more: object) -> None:
        raise asyncio.CancelledError

    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        with monkeypatch.context() as broken:
            broken.setattr("gym_ckpt_grpc.control.committing.write_part", write_part)
            with pytest.raises(InternalError):
                await p.commit([A])
        assert (await p.commit([A])).record_count == 1
        assert kept.value(DONE, operation="commit", outcome="INTERNAL") == 1
        assert kept.value(DONE, operation="commit", outcome="ok") == 1
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
    kept.all_ended()
