"""What each operation of a participant tells telemetry: one span with its steps, one outcome, each thing once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.trace import get_current_span

from gym_ckpt_grpc.control import Budget, HookFailed, Pace, Precopied
from gym_ckpt_grpc.control.error_details import status_of
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    ExportFailed,
    InternalError,
    InvalidPhase,
    OutOfTime,
    StaleController,
    StateUnwritable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.machine import Call
from gym_ckpt_grpc.protocol.phases import Operation
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import Instrument
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Clock, Participant, ScriptedOwner, eventually, running
from tests.telemetry.kept import Kept, short

A, B = EpisodeId("a"), EpisodeId("b")
OPERATIONS = catalogue.OPERATION_DURATION


async def checkpoint(p: Participant, id: str = "c1") -> None:
    await p.prepare(id)
    await p.capture(id=id)
    await p.commit(id=id)
    await p.resume(id)


async def restored(p: Participant, id: str = "r1") -> None:
    p.owner.live.clear()
    await p.restore([A, B], id)
    await p.resume(id)


@pytest.mark.behaviour("C297", "C298")
async def test_the_tree_of_a_checkpoint_and_of_its_restore(tmp_path: Path) -> None:
    """Each step is a child of its operation; spans say who, what and how much; all end once."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a", "b")
        await checkpoint(p)
        await restored(p)
    kept.all_ended()
    kept.check_declared()
    parents = {span.name: kept.parent(kept.only(span)) for span in STEPS}
    assert parents == {
        "gym.checkpoint.wait_ready": "gym.checkpoint.prepare",
        "gym.checkpoint.export": "gym.checkpoint.capture",
        "gym.checkpoint.write": "gym.checkpoint.commit",
        "gym.checkpoint.cleanup": "gym.checkpoint.commit",
        "gym.checkpoint.read": "gym.checkpoint.restore",
        "gym.checkpoint.install": "gym.checkpoint.restore",
    }
    commit = short(kept.only(catalogue.COMMIT).attributes)
    size = commit.pop("bytes")
    assert isinstance(size, int)
    assert size > 0
    assert commit == {
        "id": "c1",
        "participant_kind": "resources",
        "service": "scripted",
        "instance": "0",
        "outcome": "ok",
        "phase": "COMMITTED",
        "records": 2,
    }
    assert short(kept.only(catalogue.WRITE).attributes) == {"outcome": "ok", "records": 2, "bytes": size}
    restore = short(kept.only(catalogue.RESTORE).attributes)
    assert (restore["id"], restore["source"], restore["phase"], restore["records"]) == ("r1", "c1", "RESTORED", 2)
    assert restore["bytes"] == short(kept.only(catalogue.READ).attributes)["bytes"]


STEPS = (
    catalogue.WAIT_READY,
    catalogue.EXPORT,
    catalogue.WRITE,
    catalogue.CLEANUP,
    catalogue.READ,
    catalogue.INSTALL,
)


@pytest.mark.behaviour("C297")
async def test_a_commit_that_captures_has_the_export(tmp_path: Path) -> None:
    """Where no Capture came before it; and no operation `capture` was done."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        await p.commit()
    assert kept.parent(kept.only(catalogue.EXPORT)) == catalogue.COMMIT.name
    assert kept.of(catalogue.CAPTURE) == []


@pytest.mark.behaviour("C299", "C305", "C309", "C310")
@pytest.mark.parametrize("groups", ["default,checkpoint", "none"])
async def test_metrics_of_a_cycle(tmp_path: Path, groups: str) -> None:
    """Each operation, step and volume once, with every group of spans off too; no label has an id."""
    kept = Kept(groups)
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a", "b")
        await checkpoint(p)
        await restored(p)
        assert bool(kept.spans) is (groups != "none")
        for operation, times in {"prepare": 1, "capture": 1, "commit": 1, "restore": 1, "resume": 2}.items():
            assert kept.value(OPERATIONS, operation=operation) == times
            assert kept.value(OPERATIONS, operation=operation, participant_kind="resources", outcome="ok") == times
        for step in STEPS:
            word = step.name.rpartition(".")[2]
            assert kept.value(catalogue.STEP_DURATION, step=word) == 1
            assert kept.value(catalogue.STEP_DURATION, step=word, outcome="ok", participant_kind="resources") == 1
        for step_name in ("export", "write", "install"):
            assert kept.value(catalogue.ATTEMPTS_TOTAL, step=step_name) == 1
        for operation in ("commit", "restore"):
            assert kept.value(catalogue.RECORDS_TOTAL, operation=operation) == 2
            assert kept.value(catalogue.BYTES_TOTAL, operation=operation) > 0
        assert kept.value(catalogue.PAUSE, cause="resumed") == 1
        assert kept.value(catalogue.PAUSE, cause="restored") == 1
        assert kept.points(catalogue.EVENTS_TOTAL) == []
        kept.check_declared()


@pytest.mark.behaviour("C301", "C305")
async def test_a_refused_call_is_an_operation_with_its_code(tmp_path: Path) -> None:
    """And one control error; its span is an error and tells the phase that refused."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await p.prepare(epoch=2)
        with pytest.raises(InvalidPhase):
            await p.restore([A], "c1", source="c0", epoch=2)
        with pytest.raises(StaleController):
            await p.commit(epoch=1)
        await eventually(lambda: kept.value(catalogue.CONTROL_ERRORS) == 2)
        assert kept.value(OPERATIONS, operation="restore", outcome="INVALID_PHASE") == 1
        assert kept.value(OPERATIONS, operation="commit", outcome="STALE_CONTROLLER") == 1
        assert kept.value(catalogue.CONTROL_ERRORS, error_code="INVALID_PHASE") == 1
    span = kept.only(catalogue.RESTORE)
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "INVALID_PHASE")
    assert short(span.attributes)["phase"] == "PREPARED"


async def test_building_an_error_records_nothing(tmp_path: Path) -> None:
    """However often a refusal is made, cut down and looked at: only the failed call counts, in its interceptor."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a", running=True)
        await p.prepare(within=0)
        counted = {name: kept.value(name) for name in kept.names() if "rpc" not in name and "seconds" not in name}
        for _ in range(3):
            status_of(p.plane._core.refusal(InvalidPhase, "not now"), p.identity)
            p.plane.status()
        again = {name: kept.value(name) for name in kept.names() if "rpc" not in name and "seconds" not in name}
        assert counted == again
        assert catalogue.CONTROL_ERRORS.name not in again


@pytest.mark.behaviour("C304")
async def test_retire_and_forget_say_how_many(tmp_path: Path) -> None:
    """Episodes and rollouts, also where the call is refused; each call does its own, so none is a replay."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a", "b")
        await p.retire([A, B])
        await p.retire([A, B])
        await p.forget({"a": 0, "b": 0, "c": 0})
        await p.prepare("x", epoch=3)
        with pytest.raises(StaleController):
            await p.retire([A], epoch=1)
    spans = [short(span.attributes) for span in kept.of(catalogue.RETIRE)]
    assert [(span["episodes"], span["outcome"]) for span in spans] == [(2, "ok"), (2, "ok"), (1, "STALE_CONTROLLER")]
    assert short(kept.only(catalogue.FORGET).attributes)["rollouts"] == 3
    assert kept.value(OPERATIONS, operation="retire", outcome="ok") == 2
    assert kept.points(catalogue.EVENTS_TOTAL) == []


async def test_a_retire_that_freed_not_everything_is_not_ok(tmp_path: Path) -> None:
    """The call succeeds, with an outcome per episode; the operation has the code of what is left."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        p.owner.retires.error = HookFailed("stuck")
        await p.retire([A])
        assert kept.value(OPERATIONS, operation="retire", outcome="RETIRE_INCOMPLETE") == 1
        assert kept.value(OPERATIONS, operation="retire") == 1


@pytest.mark.behaviour("C306", "C305")
async def test_a_prepare_that_was_not_ready(tmp_path: Path) -> None:
    """Neither ok nor an error; it has all blockers and restarts, however many are listed; then ok once."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add(*(f"run-{number}" for number in range(150)), running=True)
        p.owner.restarts = {EpisodeId(f"r-{number}") for number in range(1200)}
        reply = await p.prepare(within=0)
        assert (len(reply.report.blockers), reply.report.blocker_count) == (100, 150)
        span = kept.only(catalogue.PREPARE)
        attributes = short(span.attributes)
        assert (attributes["outcome"], attributes["phase"]) == ("not_ready", "PREPARING")
        assert (attributes["blockers"], attributes["restarts"]) == (150, 1200)
        assert span.status.status_code.name == "UNSET"
        assert kept.value(OPERATIONS, operation="prepare", outcome="not_ready") == 1
        assert kept.value(catalogue.STEP_DURATION, step="wait_ready", outcome="not_ready") == 1
        assert kept.value(catalogue.EVENTS_TOTAL, event="prepare_not_ready") == 1
        for episode in list(p.owner.running):
            p.owner.park(episode)
        await p.until("PREPARED")
        for _ in range(2):
            await p.prepare(within=0)
        assert kept.value(OPERATIONS, operation="prepare", outcome="ok") == 1
        assert kept.value(catalogue.EVENTS_TOTAL, event="replayed", operation="prepare") == 1
        assert kept.value(catalogue.EVENTS_TOTAL, event="prepare_not_ready") == 1


@pytest.mark.behaviour("C307")
async def test_repeats_are_events(tmp_path: Path) -> None:
    """Three times each with one id: every success and every volume once, two replays each."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a", "b")
        for call in (p.prepare, p.capture, p.commit, p.resume):
            for _ in range(3):
                await call()
        p.owner.live.clear()
        for _ in range(3):
            await p.restore([A, B])
        for operation in ("prepare", "capture", "commit", "resume", "restore"):
            assert kept.value(OPERATIONS, operation=operation) == 1, operation
            assert kept.value(OPERATIONS, operation=operation, outcome="ok") == 1, operation
            assert kept.value(catalogue.EVENTS_TOTAL, event="replayed", operation=operation) == 2, operation
        for operation in ("commit", "restore"):
            assert kept.value(catalogue.RECORDS_TOTAL, operation=operation) == 2
        assert [short(s.attributes).get("replayed") for s in kept.of(catalogue.COMMIT)] == [None, True, True]


async def test_calls_that_join_are_told_of_one_success(tmp_path: Path) -> None:
    """Two Commits at once: one write, one success, one replay."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit()) as first, running(p.commit()) as second:
            await p.files.wait_entered()
            await eventually(lambda: p.plane._core.machine.open.lease._holders == 2)  # type: ignore[union-attr]
            p.files.release()
            await asyncio.gather(first, second)
        assert kept.value(OPERATIONS, operation="commit", outcome="ok") == 1
        assert kept.value(catalogue.EVENTS_TOTAL, event="replayed", operation="commit") == 1
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
        assert kept.value(catalogue.ATTEMPTS_TOTAL, step="write") == 1


@pytest.mark.behaviour("C307")
async def test_a_commit_whose_cleanup_failed_writes_again_and_counts_once(tmp_path: Path) -> None:
    """Volume when the write succeeded, whatever fails after it; each attempt shows apart from that."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a", "b")
        p.owner.pending = {B}
        p.owner.deletes.error = HookFailed("stuck")
        await p.prepare()
        for _ in range(2):
            with pytest.raises(InternalError):
                await p.commit([A])
            assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
        p.owner.deletes.error = None
        size = (await p.commit([A])).bytes
        await p.commit([A])
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 1
        assert kept.value(catalogue.BYTES_TOTAL, operation="commit") == size
        assert kept.value(catalogue.ATTEMPTS_TOTAL, step="write") == 3
        assert kept.value(catalogue.STEP_DURATION, step="write", outcome="ok") == 3
        assert kept.value(catalogue.STEP_DURATION, step="cleanup", outcome="INTERNAL") == 2
        assert kept.value(OPERATIONS, operation="commit", outcome="INTERNAL") == 2
        assert kept.value(OPERATIONS, operation="commit", outcome="ok") == 1
    kept.all_ended()
    assert short(kept.of(catalogue.CLEANUP)[-1].attributes) == {"outcome": "ok", "episodes": 1}


@pytest.mark.behaviour("C307")
async def test_failed_work_counts_nothing(tmp_path: Path) -> None:
    """Neither a write nor an install that failed; a later try counts once."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.files.fail("create", StateUnwritable("full"))
        with pytest.raises(StateUnwritable):
            await p.commit()
        assert kept.value(catalogue.RECORDS_TOTAL) == kept.value(catalogue.BYTES_TOTAL) == 0
        assert kept.value(catalogue.STEP_DURATION, step="write", outcome="STATE_UNWRITABLE") == 1
        p.files.fail("create", None)
        await p.commit()
        await p.resume()
        p.owner.live.clear()
        p.owner.activates.error = HookFailed("no room", A)
        for _ in range(2):
            with pytest.raises(ControlError):
                await p.restore([A])
        assert kept.value(catalogue.RECORDS_TOTAL, operation="restore") == 0
        assert kept.value(catalogue.STEP_DURATION, step="install", outcome="INSTALL_FAILED") == 2
        assert kept.value(OPERATIONS, operation="restore", outcome="INSTALL_FAILED") == 2
        assert kept.value(catalogue.PAUSE, cause="close_failed") == 2
        p.owner.activates.error = None
        await p.restore([A])
        assert kept.value(catalogue.RECORDS_TOTAL, operation="restore") == 1
        assert kept.value(catalogue.ATTEMPTS_TOTAL, step="install") == 3


async def test_a_failed_export_has_the_code_of_its_capture(tmp_path: Path) -> None:
    """And the next try is another attempt."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare()
        p.owner.exports.error = HookFailed("no", A)
        with pytest.raises(ExportFailed):
            await p.capture()
        p.owner.exports.error = None
        await p.capture()
        assert kept.value(catalogue.STEP_DURATION, step="export", outcome="EXPORT_FAILED") == 1
        assert kept.value(OPERATIONS, operation="capture", outcome="EXPORT_FAILED") == 1
        assert kept.value(OPERATIONS, operation="capture", outcome="ok") == 1
        assert kept.value(catalogue.ATTEMPTS_TOTAL, step="export") == 2
    assert short(kept.of(catalogue.EXPORT)[-1].attributes) == {"outcome": "ok", "records": 1}


async def test_a_resume_that_could_not_open_is_an_error(tmp_path: Path) -> None:
    """DEADLINE_EXCEEDED while admission stays closed, never ok; then ok once, also if nobody waited; then replays."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await p.prepare()
        p.owner.opens.error = HookFailed("jammed")
        for _ in range(2):
            with pytest.raises(OutOfTime):
                await p.plane.resume(Call(Operation.RESUME, "c1", "t", 1), keep_write=False, budget=Budget(0.2))
        assert kept.value(OPERATIONS, operation="resume") == 2
        assert kept.value(OPERATIONS, operation="resume", outcome="DEADLINE_EXCEEDED") == 2
        assert kept.value(catalogue.PAUSE) == 0
        p.owner.opens.error = None
        await p.until("IDLE")
        assert kept.value(catalogue.PAUSE, cause="aborted") == 1
        for _ in range(3):
            await p.resume()
        assert kept.value(OPERATIONS, operation="resume", outcome="ok") == 1
        assert kept.value(catalogue.EVENTS_TOTAL, event="replayed", operation="resume") == 2
        assert kept.value(catalogue.PAUSE) == 1
    assert [span.status.description for span in kept.of(catalogue.RESUME)][:2] == ["DEADLINE_EXCEEDED"] * 2


async def test_a_failed_close(tmp_path: Path) -> None:
    """The prepare has its code, and so has its wait; the doors were shut until they opened again, once."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        p.owner.closes.error = HookFailed("no")
        with pytest.raises(InternalError):
            await p.prepare()
        assert kept.value(OPERATIONS, operation="prepare", outcome="INTERNAL") == 1
        assert kept.value(catalogue.STEP_DURATION, step="wait_ready", outcome="INTERNAL") == 1
        assert kept.points(catalogue.PAUSE) == [({"participant_kind": "resources", "cause": "close_failed"}, 1)]
        p.owner.closes.error = None
        await p.prepare()
        assert kept.value(OPERATIONS, operation="prepare", outcome="ok") == 1


async def test_the_pause_is_that_of_the_doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the close to the open door, on the participant's clock, also where opening took several tries."""
    kept, clock = Kept(), Clock()
    amounts: list[float] = []
    add = kept.telemetry.add

    def told(instrument: Instrument, amount: float, attributes: Mapping[str, str | bool | int | float]) -> None:
        add(instrument, amount, attributes)
        if instrument is catalogue.PAUSE:
            amounts.append(amount)

    monkeypatch.setattr(kept.telemetry, "add", told)
    async with Participant(tmp_path, telemetry=kept.telemetry, clock=clock) as p:
        await p.prepare()
        clock.now += 3
        p.owner.opens.error = HookFailed("jammed")
        async with running(p.resume()) as call:
            await p.owner.opens.reached(1)
            clock.now += 4
            assert amounts == []
            p.owner.opens.error = None
            await call
        assert amounts == [7000.0]


async def test_encoding_ahead_belongs_to_no_checkpoint(tmp_path: Path) -> None:
    """It begins again with the end of one, and lasts: an owner's spans in it must not grow that one's trace."""
    kept = Kept()
    seen: list[tuple[bool, str]] = []

    class Copying(ScriptedOwner):
        async def precopy(self, pace: Pace) -> Precopied:
            seen.append((get_current_span().get_span_context().is_valid, WHO.get()))
            return Precopied.QUIET

    WHO.set("me")
    async with Participant(tmp_path, owner=Copying(), telemetry=kept.telemetry) as p:
        await eventually(lambda: len(seen) == 1)
        call = Call(Operation.PREPARE, "c1", "t", 1)
        await p.plane.prepare(call, ready_within=1, lease_ttl=30, budget=Budget(5))
        await p.plane.resume(replace(call, operation=Operation.RESUME), keep_write=False, budget=Budget(5))
        await eventually(lambda: len(seen) == 2)
    assert seen == [(False, "me")] * 2


WHO = ContextVar("WHO", default="")


async def test_phases_are_those_reached(tmp_path: Path) -> None:
    """A Prepare that is repeated after the capture says what it replies."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await p.prepare()
        await p.capture()
        assert (await p.prepare()).phase == pb.PHASE_PREPARED
        await p.resume()
    assert [short(span.attributes)["phase"] for span in kept.of(catalogue.PREPARE)] == ["PREPARED", "PREPARED"]
    assert short(kept.only(catalogue.CAPTURE).attributes)["phase"] == "CAPTURED"
    assert short(kept.only(catalogue.RESUME).attributes)["phase"] == "IDLE"
