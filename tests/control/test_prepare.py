"""Prepare: closing admission and waiting for a safe cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import ControlSettings, HookFailed, wire
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InternalError,
    InvalidPhase,
    OutOfTime,
    StaleAttempt,
    StaleCheckpoint,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import Blocker, BlockerReason, PrepareReport
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Clock, Participant, running, unreplayed


@pytest.mark.behaviour("C44", "C45")
async def test_it_waits_for_the_last_execution(tmp_path: Path) -> None:
    """Admission is closed at once; the reply comes when the last execution parks, not at some interval."""
    async with Participant(tmp_path) as p:
        first, second = p.add("a", "b", running=True)
        async with running(p.prepare(within=4)) as call:
            await p.owner.closes.entered.wait()
            assert not p.is_open()
            p.owner.park(first)
            await p.until("PREPARING")
            assert not call.done()
            loop = asyncio.get_running_loop()
            parked = loop.time()
            p.owner.park(second)
            assert (await call).phase == pb.PHASE_PREPARED
            assert loop.time() - parked < 0.3
        assert p.plane.status().extra == {}


@pytest.mark.behaviour("C46", "C31", "C34")
async def test_a_repeated_prepare_is_replayed(tmp_path: Path) -> None:
    """The recorded reply, marked; the hook ran once; the lease is as long as after any call; a ttl is an argument."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        p.add("a")
        first = await p.prepare(ttl=20)
        assert not first.replayed
        clock.now += 15
        second = await p.prepare(ttl=20)
        assert second.replayed
        assert unreplayed(second) == first
        assert p.owner.closes.count == 1
        assert (await p.status()).lease_remaining.seconds == 20
        with pytest.raises(CheckpointConflict):
            await p.prepare(ttl=21)


@pytest.mark.behaviour("C47", "C48", "C32", "C55")
async def test_not_ready_in_time_is_no_error(tmp_path: Path) -> None:
    """It replies PREPARING with the blockers and stays closed; the next one waits again."""
    async with Participant(tmp_path) as p:
        (a,) = p.add("a", running=True)
        reply = await p.prepare(within=0.05)
        assert reply.phase == pb.PHASE_PREPARING
        assert reply.report.blocker_count == 1
        (blocker,) = reply.report.blockers
        assert (blocker.episode.rollout_id, blocker.reason, blocker.place) == ("a", pb.BLOCKER_REASON_RUNNING, "step")
        assert blocker.age.seconds == 1
        assert not p.is_open()
        async with running(p.prepare(within=4)) as call:
            await p.until("PREPARING")
            p.owner.park(a)
            reply = await call
        assert (reply.phase, reply.replayed) == (pb.PHASE_PREPARED, False)
        assert (await p.prepare()).replayed


@pytest.mark.behaviour("C49")
async def test_no_time_to_wait_closes_and_replies_at_once(tmp_path: Path) -> None:
    """`ready_within` zero: ready or not, the answer is there."""
    async with Participant(tmp_path) as p:
        p.add("a", running=True)
        assert (await p.prepare(within=0)).phase == pb.PHASE_PREPARING
        assert not p.is_open()
    async with Participant(tmp_path) as p:
        assert (await p.prepare(within=0)).phase == pb.PHASE_PREPARED


@pytest.mark.behaviour("C50", "C51")
async def test_resume_ends_a_waiting_prepare(tmp_path: Path) -> None:
    """Both reply IDLE, long before the Prepare's own deadline."""
    async with Participant(tmp_path) as p:
        p.add("a", running=True)
        async with running(p.prepare(within=20, timeout=25)) as call:
            await p.until("PREPARING")
            async with asyncio.timeout(1):
                assert (await p.resume()).phase == pb.PHASE_IDLE
                assert (await call).phase == pb.PHASE_IDLE
        assert p.is_open()


@pytest.mark.behaviour("C50", "C109")
async def test_resume_ends_a_prepare_whose_closing_hangs(tmp_path: Path) -> None:
    """A hook that has not closed yet is cancelled; the Prepare replies IDLE, no error."""
    async with Participant(tmp_path) as p:
        p.owner.closes.hold()
        async with running(p.prepare(within=20, timeout=25)) as call:
            await p.owner.closes.entered.wait()
            async with asyncio.timeout(2):
                assert (await p.resume()).phase == pb.PHASE_IDLE
                assert (await call).phase == pb.PHASE_IDLE
        assert p.is_open()


@pytest.mark.behaviour("C52")
async def test_a_failed_close_reopens(tmp_path: Path) -> None:
    """The hook's own code; phase IDLE, open, nothing active; the same id may be prepared again."""
    async with Participant(tmp_path) as p:
        p.owner.closes.error = StaleAttempt("a code of the hook", episodes=[EpisodeId("a")])
        with pytest.raises(StaleAttempt) as caught:
            await p.prepare()
        assert caught.value.episodes == (EpisodeId("a"),)
        status = await p.status()
        assert (status.phase, status.active_checkpoint_id) == (pb.PHASE_IDLE, "")
        assert p.is_open()
        p.owner.closes.error = None
        assert (await p.prepare()).phase == pb.PHASE_PREPARED


async def test_a_failed_close_whose_opening_fails_is_opened_in_the_end(tmp_path: Path) -> None:
    """A closed server in phase IDLE does not exist: the opening is tried again until it works."""
    async with Participant(tmp_path) as p:
        p.owner.closes.error = HookFailed("no")
        p.owner.opens.error = HookFailed("not yet")
        async with running(p.prepare()) as call:
            await p.owner.opens.reached(2)
            assert await p.phase() == "PREPARING"
            p.owner.opens.error = None
            with pytest.raises(InternalError):
                await call
        assert await p.phase() == "IDLE"
        assert p.is_open()


async def test_a_late_failure_of_a_close_opens_nothing_newer(tmp_path: Path) -> None:
    """A hook that outlives its cancelling and fails then must not open what the next checkpoint has closed."""
    async with Participant(tmp_path) as p:
        entered, late = asyncio.Event(), asyncio.Event()

        async def deaf(closing: object) -> None:
            p.owner.open = False
            entered.set()
            while not late.is_set():
                try:
                    await late.wait()
                except asyncio.CancelledError:
                    continue
            raise HookFailed("late")

        original = p.owner.close_admission
        p.owner.close_admission = deaf  # type: ignore[method-assign]
        async with running(p.prepare("c1")) as call:
            await entered.wait()
            await p.resume("c1")
            assert (await call).phase == pb.PHASE_IDLE
            p.owner.close_admission = original  # type: ignore[method-assign]
            assert (await p.prepare("c2")).phase == pb.PHASE_PREPARED
            opens = p.owner.opens.count
            late.set()
            assert (await p.prepare("c2")).replayed
            await asyncio.sleep(0)
            assert not p.is_open()
            assert p.owner.opens.count == opens


@pytest.mark.behaviour("C53")
async def test_a_cancelled_prepare_is_joined(tmp_path: Path) -> None:
    """The wait goes on without its call, and the next Prepare of the id joins it."""
    async with Participant(tmp_path) as p:
        (a,) = p.add("a", running=True)
        async with running(p.prepare(within=20, timeout=25)) as call:
            await p.until("PREPARING")
            call.cancel()
            await asyncio.wait({call})
        assert await p.phase() == "PREPARING"
        p.owner.park(a)
        await p.until("PREPARED")
        assert (await p.prepare()).phase == pb.PHASE_PREPARED
        assert p.owner.closes.count == 1


@pytest.mark.behaviour("C53", "C150")
async def test_a_close_that_outlives_its_call_is_joined(tmp_path: Path) -> None:
    """The typed answer names the step before the client's own deadline; the hook goes on."""
    async with Participant(tmp_path) as p:
        p.owner.closes.hold()
        with pytest.raises(OutOfTime, match="closing admission"):
            await p.prepare(within=0.1, timeout=0.5)
        async with running(p.prepare()) as call:
            p.owner.closes.open.set()
            assert (await call).phase == pb.PHASE_PREPARED
        assert p.owner.closes.count == 1


@pytest.mark.behaviour("C54")
async def test_the_full_report_is_built_at_most_twice(tmp_path: Path) -> None:
    """While 20 executions park one by one."""
    async with Participant(tmp_path) as p:
        episodes = p.add(*(f"r{i}" for i in range(20)), running=True)
        async with running(p.prepare(within=4)) as call:
            await p.owner.closes.entered.wait()
            for episode in episodes:
                p.owner.park(episode)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            await call
        assert p.owner.reports <= 2


@pytest.mark.behaviour("C55", "C42", "C41")
async def test_blockers_are_cut_and_counted(tmp_path: Path) -> None:
    """5,000 blockers: 100 listed and 5,000 counted; ListEpisodes gives every one, once."""
    async with Participant(tmp_path) as p:
        episodes = p.add(*(f"r{i:04}" for i in range(5000)), running=True)
        report = (await p.prepare(within=0)).report
        assert (len(report.blockers), report.blocker_count) == (100, 5000)
        assert await p.listed(pb.EPISODE_LIST_KIND_BLOCKING) == sorted(episodes)


@pytest.mark.behaviour("C57", "C41")
async def test_restarts_hold_nothing_up(tmp_path: Path) -> None:
    """They are listed as restarts, 1,000 of them, with the exact count."""
    async with Participant(tmp_path) as p:
        p.owner.restarts.update(EpisodeId(f"{i:04}" + "x" * 250) for i in range(3000))
        reply = await p.prepare(within=0)
        assert reply.phase == pb.PHASE_PREPARED
        assert (len(reply.report.restarts.rollout_ids), reply.report.restart_count) == (1000, 3000)
        assert reply.ByteSize() < 1 << 20
        assert await p.listed(pb.EPISODE_LIST_KIND_RESTART) == sorted(p.owner.restarts)


@pytest.mark.behaviour("C58", "C17")
async def test_a_late_prepare_of_a_fenced_id_is_refused(tmp_path: Path) -> None:
    """Resume of an id never seen fences it, also while another is open, which stays as it is."""
    async with Participant(tmp_path) as p:
        assert (await p.resume("late")).phase == pb.PHASE_IDLE
        with pytest.raises(StaleCheckpoint):
            await p.prepare("late")
        await p.prepare("c1")
        reply = await p.resume("later")
        assert (reply.phase, reply.active_checkpoint_id, reply.replayed) == (pb.PHASE_PREPARED, "c1", False)
        with pytest.raises(StaleCheckpoint):
            await p.prepare("later")
        assert not p.is_open()
        assert await p.phase() == "PREPARED"


async def test_another_id_is_a_conflict_that_names_the_open_one(tmp_path: Path) -> None:
    """So that a caller who lost a reply knows what to resume."""
    async with Participant(tmp_path) as p:
        await p.prepare("c1")
        with pytest.raises(CheckpointConflict) as caught:
            await p.prepare("c2")
        assert caught.value.active_checkpoint_id == "c1"
        assert caught.value.phase == "PREPARED"
        assert caught.value.participant == "resources/scripted/0"


async def test_readiness_that_is_lost_takes_prepared_back(tmp_path: Path) -> None:
    """PREPARED falls back to PREPARING; a Prepare sent meanwhile waits until it is back."""
    async with Participant(tmp_path) as p:
        (a,) = p.add("a")
        await p.prepare()
        p.owner.running.add(a)
        p.owner.changed()
        await p.until("PREPARING")
        async with running(p.prepare(within=4)) as call:
            await p.until("PREPARING")
            assert not call.done()
            p.owner.park(a)
            reply = await call
        assert (reply.phase, reply.replayed) == (pb.PHASE_PREPARED, False)


async def test_a_change_nobody_told_is_found_and_counted(tmp_path: Path) -> None:
    """A defect of the owner: delivered all the same, and shown."""
    async with Participant(tmp_path) as p:
        (a,) = p.add("a", running=True)
        async with running(p.prepare(within=4)) as call:
            await p.until("PREPARING")
            p.owner.running.discard(a)
            assert (await call).phase == pb.PHASE_PREPARED
        assert (await p.status()).extra["unnotified_changes"] == "1"


async def test_a_missed_prepare_is_answered_after_the_capture_too(tmp_path: Path) -> None:
    """No Prepare ended prepared, and yet the records were captured: a late one is told PREPARED."""
    async with Participant(tmp_path) as p:
        (a,) = p.add("a", running=True)
        await p.prepare(within=0)
        p.owner.park(a)
        await p.until("PREPARED")
        await p.capture()
        assert (await p.prepare()).phase == pb.PHASE_PREPARED


@pytest.mark.behaviour("C12")
async def test_nothing_is_open_in_idle(tmp_path: Path) -> None:
    """Capture, Commit and RenewLease need an open checkpoint."""
    async with Participant(tmp_path) as p:
        for call in (p.capture(), p.commit(), p.renew()):
            with pytest.raises(InvalidPhase):
                await call


@pytest.mark.behaviour("C56")
async def test_a_watch_tells_each_change(tmp_path: Path) -> None:
    """The state on opening, then each change, with the blockers left and why the oldest one blocks."""
    async with Participant(tmp_path) as p:
        a, b = p.add("a", "b", running=True)
        watch = p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=10)
        told = aiter(watch)
        assert (await anext(told)).status.phase == pb.PHASE_IDLE

        async def until(phase: pb.Phase.ValueType, blockers: int) -> pb.ParticipantStatus:
            async with asyncio.timeout(0.9):  # before the second that a silent watch would take
                while True:
                    status = (await anext(told)).status
                    if (status.phase, status.report.blocker_count) == (phase, blockers):
                        return status

        async with running(p.prepare(within=4)):
            status = await until(pb.PHASE_PREPARING, 2)
            assert status.report.blockers[0].reason == pb.BLOCKER_REASON_RUNNING
            assert status.progress.operation == "prepare"
            p.owner.park(a)
            await until(pb.PHASE_PREPARING, 1)
            p.owner.park(b)
            await until(pb.PHASE_PREPARED, 0)
        watch.cancel()


@pytest.mark.behaviour("C56")
async def test_a_watch_is_not_flooded(tmp_path: Path) -> None:
    """However often something changes, at most ten statuses a second."""
    async with Participant(tmp_path, settings=ControlSettings()) as p:
        (a,) = p.add("a", running=True)
        await p.prepare(within=0)
        watch = p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=10)
        count = 0
        loop = asyncio.get_running_loop()
        ends = loop.time() + 0.55
        async for _ in watch:
            count += 1
            if loop.time() > ends:
                break
            p.owner.running ^= {EpisodeId("b")}
            p.owner.changed()
        watch.cancel()
        assert 2 <= count <= 7
        assert a in p.owner.running


@pytest.mark.behaviour("C43")
def test_reports_survive_the_wire() -> None:
    """The count is not taken from the cut list."""
    report = PrepareReport(
        (
            Blocker(BlockerReason.WAIT_STEP, 1.5, EpisodeId("a", 2), place="close_agent"),
            Blocker(BlockerReason.WORKER_LOST, 0.0, worker="w1"),
        ),
        5000,
        (EpisodeId("r"),),
        7,
        {"episodes": 3},
    )
    assert wire.report_from(wire.report_to(report)) == report


@pytest.mark.parametrize("hook", ["closes", "opens"])
async def test_a_hook_that_cancels_itself_has_failed(tmp_path: Path, hook: str) -> None:
    """A task that it awaited was cancelled, and nobody else was: nothing stays closed by that."""
    async with Participant(tmp_path) as p:
        gate = getattr(p.owner, hook)
        gate.error = asyncio.CancelledError()
        if hook == "closes":
            with pytest.raises(InternalError):
                await p.prepare()
        else:
            await p.prepare()
            resuming = asyncio.create_task(p.resume())
            await gate.reached(2)
            gate.error = None
            await resuming
        assert await p.phase() == "IDLE"
        assert p.owner.open
