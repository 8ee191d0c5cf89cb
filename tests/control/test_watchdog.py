"""The watchdog: what hangs announces itself once, with its stack; and it costs nothing while nothing is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import ControlSettings, HookFailed
from gym_ckpt_grpc.control.stacks import task_stack, thread_stack
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry import catalogue
from tests.control.scripted import Clock, Participant, eventually, running
from tests.telemetry.kept import Kept

A, B = EpisodeId("a"), EpisodeId("b")
Road = Callable[[Participant], Coroutine[Any, Any, None]]
SLOW = catalogue.WATCHDOG_TOTAL
SETTINGS = ControlSettings(watch_interval=0.01, status_interval=0.01, cleanup_limit=5)


def warned(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and text in r.getMessage()]


def ticking(p: Participant) -> bool:
    return p.plane._core.watchdog._timer is not None


async def looked(p: Participant) -> None:
    """Wait until the watchdog has looked twice more."""
    for _ in range(2):
        before = p.plane._core.watchdog._timer
        await eventually(lambda before=before: p.plane._core.watchdog._timer is not before)  # type: ignore[misc]


def watched(tmp_path: Path, kept: Kept, clock: Clock) -> Participant:
    return Participant(tmp_path, clock=clock, settings=SETTINGS, telemetry=kept.telemetry)


async def test_a_slow_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not before the limit; then once, with its checkpoint, the stack of its thread, and one count."""
    kept, clock = Kept(), Clock()
    async with watched(tmp_path, kept, clock) as p:
        p.add("a")
        await p.prepare(ttl=600)
        p.files.hold("create")
        async with running(p.commit()):
            await p.files.wait_entered()
            clock.now += 59
            await looked(p)
            assert (warned(caplog, "has run for"), kept.value(SLOW)) == ([], 0)
            clock.now += 2
            await looked(p)
            clock.now += 100
            await looked(p)
            p.files.release()
    [message] = warned(caplog, "has run for")
    assert message.startswith("write of c1 has run for 61 s and goes on:\n")
    assert "in HeldFiles._step" in message
    assert kept.points(SLOW) == [({"participant_kind": "resources", "task": "write"}, 1)]


async def test_a_write_left_behind_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its checkpoint was resumed long ago, and the participant is IDLE: its thread still hangs."""
    kept, clock = Kept(), Clock()
    async with watched(tmp_path, kept, clock) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit()):
            await p.files.wait_entered()
            await p.resume()
        clock.now += 61
        await looked(p)
        assert kept.value(SLOW, task="write") == 1
        p.files.release()
        await eventually(lambda: not ticking(p))
    assert len(warned(caplog, "write of c1")) == 1


async def _export(p: Participant) -> None:
    await p.prepare()
    p.owner.exports.hold()
    await p.capture(timeout=30)


async def _cleanup(p: Participant) -> None:
    p.owner.pending = {B}
    p.owner.deletes.hold()
    await p.prepare()
    await p.commit([A], timeout=30)
    await asyncio.sleep(60)


async def _install(p: Participant) -> None:
    await p.prepare("c0")
    await p.commit(id="c0")
    await p.resume("c0")
    p.owner.live.clear()
    p.owner.stages.hold()
    await p.restore([A], "c1", source="c0", timeout=30)


async def _reopen(p: Participant) -> None:
    await p.prepare()
    p.owner.opens.error = HookFailed("jammed")
    await p.resume(timeout=30)


async def _give_up(p: Participant) -> None:
    p.owner.closes.error = p.owner.opens.error = HookFailed("jammed")
    await p.prepare(timeout=30)


@pytest.mark.parametrize(
    ("kind", "road", "where"),
    [
        ("export", _export, "ScriptedOwner.export"),
        ("cleanup", _cleanup, "ScriptedOwner.delete_restored"),
        ("install", _install, "ScriptedOwner.stage"),
        ("reopen", _reopen, "open_admission"),
        ("reopen", _give_up, "give_up"),
    ],
)
async def test_other_slow_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, road: Road, where: str
) -> None:
    """Each kind once, with the stack down to the hook that does not come back."""
    kept, clock = Kept(), Clock()
    async with watched(tmp_path, kept, clock) as p:
        p.add("a", "b")
        async with running(road(p)):
            await eventually(lambda: kind in p.plane._core.watchdog.begun_at())
            if kind == "cleanup":
                await p.owner.deletes.reached(1)
            clock.now += 61
            await looked(p)
            clock.now += 61
            await looked(p)
    messages = warned(caplog, "has run for")
    assert [message.split()[:3] for message in messages] == [[kind, "of", "c1"]]
    assert where in messages[0]
    assert kept.points(SLOW) == [({"participant_kind": "resources", "task": kind}, 1)]


async def test_a_lagging_loop_is_told_once_per_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the longest of its lags, at its end; the next checkpoint begins anew."""
    kept, clock = Kept(), Clock()
    settings = ControlSettings(watch_interval=0.01)
    async with Participant(tmp_path, clock=clock, settings=settings, telemetry=kept.telemetry) as p:
        await p.prepare(ttl=600)
        for stall in (0.4, 1.1, 0.3):
            await looked(p)
            clock.now += stall
        await looked(p)
        assert warned(caplog, "stood still") == []
        assert kept.value(catalogue.LOOP_LAG) == pytest.approx(1050)
        await p.resume()
        assert warned(caplog, "stood still") == [
            "the event loop stood still for up to 1050 ms during c1: something blocks it"
        ]
        assert kept.value(catalogue.LOOP_LAG) == pytest.approx(1050)
        clock.now += 5  # nothing is open: no business of ours
        await p.prepare("c2")
        clock.now += 0.2
        await looked(p)
        await p.resume("c2")
        assert len(warned(caplog, "stood still")) == 1
        assert kept.value(catalogue.LOOP_LAG) == pytest.approx(150)


async def test_a_stall_at_the_very_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also one after the last look counts."""
    kept, clock = Kept(), Clock()
    async with Participant(tmp_path, clock=clock, telemetry=kept.telemetry) as p:
        await p.prepare(ttl=600)
        p.owner.opens.hold()
        async with running(p.resume()) as call:
            await p.owner.opens.reached(1)
            await looked(p)
            p.plane._core.watchdog._timer.cancel()  # type: ignore[union-attr]
            clock.now += 3
            p.owner.opens.open.set()
            await call
    assert "up to 2950 ms" in warned(caplog, "stood still")[0]


async def test_it_costs_nothing_while_nothing_is_open(tmp_path: Path) -> None:
    """No timer in IDLE, before, between and after checkpoints, and none after the close."""
    async with Participant(tmp_path) as p:
        assert not ticking(p)
        p.add("a")
        for number in range(2):
            await p.prepare(f"c{number}")
            assert ticking(p)
            await p.commit(id=f"c{number}")
            await p.resume(f"c{number}")
            await eventually(lambda: not ticking(p))
        await p.prepare("last")
        await p.plane.close()
        assert not ticking(p)


async def test_what_ends_after_the_close_has_no_lag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody looked at the clock any more: a hook that outlived the close opened the doors late, and nothing stood."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        await p.prepare(ttl=600)
        await p.plane.close()
        clock.now += 100
        p.plane._core.watchdog.ended()
    assert warned(caplog, "stood still") == []


class Odd:
    """An awaitable of somebody else's making, which looks like a coroutine and is none."""

    def __await__(self) -> Generator[None, None, None]:
        return self._wait()

    def _wait(self) -> Generator[None, None, None]:
        yield from Strange()


class Strange:
    """What `Odd` waits for."""

    def __iter__(self) -> Strange:
        return self

    def __next__(self) -> None:
        return None

    @property
    def cr_frame(self) -> Any:
        raise RuntimeError("not now")


async def test_a_stack_ends_at_what_cannot_be_asked() -> None:
    """And says what comes before: a hang announces itself, whatever it waits for."""

    async def waiting() -> None:
        await Odd()

    task = asyncio.get_running_loop().create_task(waiting())
    await asyncio.sleep(0)
    lines = task_stack(task).splitlines()
    task.cancel()
    assert [line.rpartition(".")[2] for line in lines] == ["waiting", "_wait"]


@pytest.mark.parametrize("name", ["slow_task_warn_seconds", "loop_lag_warn_seconds"])
def test_its_settings(name: str) -> None:
    """60 s and 250 ms by default; above 0."""
    assert (ControlSettings().slow_task_warn_seconds, ControlSettings().loop_lag_warn_seconds) == (60, 0.25)
    with pytest.raises(UsageError, match=name):
        ControlSettings.from_mapping({name: 0})


async def test_a_thread_that_has_ended_has_no_stack() -> None:
    assert thread_stack(1) == ""
