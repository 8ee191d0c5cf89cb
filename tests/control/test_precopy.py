"""Encoding ahead as the control plane runs it: in IDLE only, one pass at a time, within its share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import ControlPlane, ControlSettings, Pace, Precopied
from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.ports import Closing
from gym_ckpt_grpc.control.precopying import LONGEST_REST, QUIET_INTERVAL, Precopying, SharedPace
from gym_ckpt_grpc.protocol.errors import ExportFailed, InternalError, UsageError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import LocalFiles, encode
from tests.control.scripted import FAST, Clock, Gate, Participant, ScriptedOwner, eventually

A = EpisodeId("a")


class PassingOwner(ScriptedOwner):
    """Each pass goes through a gate. log: passes and closes, in the order in which they began and ended."""

    def __init__(self, found: Precopied = Precopied.QUIET) -> None:
        super().__init__()
        self.passes = Gate()
        self.found = found
        self.log: list[str] = []
        self.stubborn = False
        self.under_way = self.most_under_way = 0

    async def precopy(self, pace: Pace) -> Precopied:
        self.log.append("pass")
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.passes.step()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            if not self.stubborn:
                raise
            await self.passes.open.wait()
            with pace.working():
                self.log.append("worked on")
        finally:
            self.under_way -= 1
        return self.found

    async def close_admission(self, closing: Closing) -> None:
        self.log.append("close")
        await super().close_admission(closing)

    async def open_admission(self, opening: Any) -> None:
        await super().open_admission(opening)
        self.log.append("open")


EAGER = ControlSettings(watch_interval=0.01, status_interval=0.01, precopy_interval=0.001, precopy_share=1.0)


@contextlib.asynccontextmanager
async def passing(
    root: Path, settings: ControlSettings = EAGER, found: Precopied = Precopied.QUIET, **options: Any
) -> AsyncIterator[Any]:
    owner = PassingOwner(found)
    owner.live[A] = {"name": "a"}
    async with Participant(root, owner=owner, settings=settings, **options) as p:
        yield p, owner


async def test_passes_follow_each_other_in_idle_and_end_at_a_close(tmp_path: Path) -> None:
    """The one under way is cancelled, and none begins before admission has opened again."""
    async with passing(tmp_path) as (p, owner):
        await owner.passes.reached(3)
        owner.passes.hold()
        await owner.passes.entered.wait()
        del owner.log[:]
        await p.prepare()
        await p.commit([A])
        await asyncio.sleep(0.05)
        assert owner.log == ["cancelled", "close"]
        owner.passes.open.set()
        count = owner.passes.count
        await p.resume()
        await owner.passes.reached(count + 2)
        assert owner.log[2:4] == ["open", "pass"]
        assert owner.most_under_way == 1


@pytest.mark.parametrize("end", ["resume", "failed close", "lease", "restore", "failed restore"])
async def test_passes_begin_again_after_every_kind_of_end(tmp_path: Path, end: str) -> None:
    clock = Clock()
    async with passing(tmp_path, clock=clock) as (p, owner):
        await p.prepare("c0")
        await p.commit([A], "c0")
        await p.resume("c0")
        if end == "failed close":
            owner.closes.error = RuntimeError("no")
            with pytest.raises(InternalError):
                await p.prepare()
            await eventually(lambda: owner.open)
        elif end in ("resume", "lease"):
            await p.prepare(ttl=10)
            if end == "lease":
                clock.now += 11
                await eventually(lambda: owner.open)
            else:
                await p.resume()
        else:
            owner.live.clear()
            owner.stages.error = RuntimeError("no") if end == "failed restore" else None
            with contextlib.suppress(Exception):
                await p.restore([A], source="c0")
            if end == "restore":
                assert owner.log[-1] != "pass"
                await p.resume("r1")
            await eventually(lambda: owner.open)
        await owner.passes.reached(owner.passes.count + 2)


async def test_a_pass_that_does_not_hear_the_cancellation_holds_up_nothing(tmp_path: Path) -> None:
    """A whole checkpoint goes by; the pass does not work on, and the next one begins when it has ended."""
    async with passing(tmp_path) as (p, owner):
        owner.stubborn = True
        owner.passes.hold()
        await owner.passes.entered.wait()
        await p.prepare()
        await p.commit([A])
        await p.resume()
        count = owner.passes.count
        await asyncio.sleep(0.02)
        assert owner.passes.count == count
        owner.passes.open.set()
        await owner.passes.reached(count + 2)
        assert "worked on" not in owner.log
        assert owner.most_under_way == 1


@pytest.mark.parametrize("share", [0.0, 0.2])
async def test_it_is_off_where_it_is_of_no_use(tmp_path: Path, share: float) -> None:
    """A share of 0; and an owner that says never is asked once in its life."""
    settings = ControlSettings(watch_interval=0.01, status_interval=0.01, precopy_interval=0.001, precopy_share=share)
    async with passing(tmp_path, settings, Precopied.NEVER) as (p, owner):
        for id in ("c1", "c2"):
            await p.prepare(id)
            await p.resume(id)
        await asyncio.sleep(0.02)
        assert owner.passes.count == (1 if share else 0)


async def test_a_failing_pass_is_told_once_and_hinders_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with passing(tmp_path) as (p, owner):
        with caplog.at_level(logging.WARNING):
            owner.passes.error = RuntimeError("no")
            await owner.passes.reached(owner.passes.count + 4)
            await p.prepare()
            assert (await p.commit([A])).record_count == 1
            await p.resume()
            await owner.passes.reached(owner.passes.count + 2)
        assert len([each for each in caplog.records if "encoding ahead" in each.message]) == 1


class CancelledOwner(ScriptedOwner):
    """Its hook ends by a cancellation that nobody has asked for: a task that it awaited was cancelled."""

    async def precopy(self, pace: Pace) -> Precopied:
        raise asyncio.CancelledError


async def test_a_pass_that_cancels_itself_is_a_failing_one(caplog: pytest.LogCaptureFixture) -> None:
    """It is looked at as seldom, not again at once."""
    time = Time()
    time.enough = 3
    async with bare(CancelledOwner()) as core:
        with caplog.at_level(logging.WARNING):
            Precopying(core, time.pace).start()
            await eventually(lambda: len(time.slept) == 3)
        assert time.slept == [0.5, 1.0, 2.0]
        assert len([each for each in caplog.records if "encoding ahead" in each.message]) == 1


async def test_passes_that_somebody_else_ends_are_not_begun_again() -> None:
    """A loop that closes cancels every task: what begins another one then keeps it from ending."""
    owner = PassingOwner()
    owner.passes.hold()
    async with bare(owner) as core:
        Precopying(core).start()
        await owner.passes.entered.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.02)
        assert owner.passes.count == 1


@pytest.mark.parametrize("bad", [{"precopy_share": -0.1}, {"precopy_share": 1.1}, {"precopy_bytes": -1}])
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        ControlSettings(**bad)
    with pytest.raises(UsageError, match="precopy_interval"):
        ControlSettings(precopy_interval=0)


# ---- the pace


class Time:
    """Time that passes while somebody sleeps, and processor time that passes while somebody works."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0
        self.slept: list[float] = []
        self.enough = 10

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds
        if len(self.slept) == self.enough:
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    def pace(self, core: Core) -> SharedPace:
        return SharedPace(core, clock=lambda: self.now, busy=lambda: self.worked, sleep=self.sleep)


@contextlib.asynccontextmanager
async def bare(owner: ScriptedOwner, **settings: Any) -> AsyncIterator[Core]:
    identity = ParticipantIdentity(ParticipantKind.RESOURCES, "scripted")
    core = Core(owner, identity, roots=[], files=LocalFiles(), clock=Clock(), settings=ControlSettings(**settings))
    try:
        yield core
    finally:
        await core.close()


@pytest.mark.parametrize(("share", "rest"), [(0.2, 0.04), (0.5, 0.01), (1.0, 0.0), (0.01, 0.99), (0.001, LONGEST_REST)])
async def test_a_pass_rests_as_its_share_asks(share: float, rest: float) -> None:
    """After 10 ms of work, each rest for the work since the one before."""
    time = Time()
    async with bare(ScriptedOwner(), precopy_share=share) as core:
        pace = time.pace(core)
        for _ in range(2):
            with pace.working():
                time.worked += 0.006
                await asyncio.sleep(0)
            with pace.working():
                time.worked += 0.004
            await pace.rest()
        await pace.rest()
    assert time.slept == [pytest.approx(rest), pytest.approx(rest), 0.0]


async def test_digests_are_made_in_a_thread_and_counted() -> None:
    time = Time()
    async with bare(ScriptedOwner(), precopy_share=0.5) as core:
        pace = time.pace(core)
        payload = encode({"x": 1})
        time.worked = 5.0
        await pace.digest([payload])
        assert payload.known_digest is not None
        assert pace.spent == 0.0


async def test_a_pass_is_over_after_an_interval() -> None:
    time = Time()
    async with bare(ScriptedOwner(), precopy_interval=0.5) as core:
        pace = time.pace(core)
        seen = []
        for _ in range(2):
            pace.begin()
            seen.append(pace.over)
            time.now += 0.5
            seen.append(pace.over)
        assert seen == [False, True, False, True]


async def test_a_stopped_pace_cancels_at_each_of_its_steps() -> None:
    time = Time()
    async with bare(ScriptedOwner()) as core:
        pace = time.pace(core)
        with pytest.raises(asyncio.CancelledError), pace.working():
            pace.stop()
        with pytest.raises(asyncio.CancelledError):
            await pace.digest([])
        with pytest.raises(asyncio.CancelledError):
            await pace.rest()
        with pytest.raises(asyncio.CancelledError), pace.working():
            raise AssertionError("it must not come here")
    assert time.slept == []


@pytest.mark.parametrize(
    ("found", "slept"),
    [
        (Precopied.MORE, [0.0, 0.0, 0.0, 0.0, 0.0]),
        (Precopied.CHANGING, [0.25, 0.25, 0.25, 0.25, 0.25]),
        (Precopied.QUIET, [0.5, 1.0, 2.0, QUIET_INTERVAL, QUIET_INTERVAL]),
    ],
)
async def test_an_idle_server_is_looked_at_ever_more_seldom(found: Precopied, slept: list[float]) -> None:
    time, owner = Time(), PassingOwner()
    time.enough, owner.found = 5, found
    async with bare(owner) as core:
        precopying = Precopying(core, time.pace)
        precopying.start()
        precopying.start()
        await eventually(lambda: len(time.slept) == 5)
        assert (time.slept, owner.most_under_way) == (slept, 1)


# ---- the collector


async def test_the_collector_is_paused_from_the_capture_to_the_reopening(tmp_path: Path) -> None:
    """And goes on after a capture that failed, a lease that ended, and a control plane that was closed."""
    clock = Clock()
    async with passing(tmp_path, clock=clock) as (p, owner):
        await p.prepare()
        assert gc.isenabled()
        await p.capture([A])
        assert not gc.isenabled()
        await p.resume(keep_write=True)
        assert gc.isenabled()
        await p.commit([A])
        await p.resume()
        await p.prepare("c2", ttl=10)
        owner.exports.error = RuntimeError("no")
        with pytest.raises(ExportFailed):
            await p.capture([A], "c2")
        assert gc.isenabled()
        owner.exports.error = None
        await p.capture([A], "c2")
        assert not gc.isenabled()
        clock.now += 11
        await eventually(lambda: owner.open)
        await eventually(gc.isenabled)
        await p.prepare("c3")
        await p.capture([A], "c3")
        assert not gc.isenabled()
    assert gc.isenabled()


async def test_the_collector_is_not_paused_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller may leave a checkpoint committed and closed for minutes."""
    monkeypatch.setattr("gym_ckpt_grpc.control.committing.PAUSE_LIMIT", 0.01)
    async with passing(tmp_path) as (p, _):
        await p.prepare()
        await p.capture([A])
        await eventually(gc.isenabled)
        await p.resume()
        assert gc.isenabled()


async def test_a_plane_that_is_closed_at_once_leaves_nothing(tmp_path: Path) -> None:
    owner = PassingOwner()
    owner.passes.hold()
    plane = ControlPlane(owner, ParticipantIdentity(ParticipantKind.RESOURCES, "x"), settings=FAST)
    await owner.passes.entered.wait()
    await plane.close()
    await asyncio.sleep(0)
    assert (owner.under_way, owner.passes.count) == (0, 1)
