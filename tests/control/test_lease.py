"""The lease: what a controller that has gone leaves behind, in each phase."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import HookFailed, OpeningCause
from gym_ckpt_grpc.protocol.errors import ControlError, InvalidPhase, StaleCheckpoint
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import FAST, Clock, Participant, eventually, running

A = EpisodeId("a")
Road = Callable[[Participant], Awaitable[object]]


async def to_preparing(p: Participant) -> None:
    p.owner.running.add(A)
    await p.prepare(within=0, ttl=10)


async def to_prepared(p: Participant) -> None:
    await p.prepare(ttl=10)


async def to_captured(p: Participant) -> None:
    await p.prepare(ttl=10)
    await p.capture()


async def to_committing(p: Participant) -> None:
    await p.prepare(ttl=10)
    p.files.hold("create")
    async with running(p.commit()):
        await p.files.wait_entered()


async def to_committed(p: Participant) -> None:
    await p.prepare(ttl=10)
    await p.commit()


async def to_restoring(p: Participant) -> None:
    await p.prepare("c0", ttl=10)
    await p.commit(id="c0")
    await p.resume("c0")
    p.owner.live.clear()
    p.owner.stages.hold()
    with pytest.raises(ControlError):
        await p.restore([A], "c1", source="c0", ttl=10, timeout=0.3)


async def to_restored(p: Participant) -> None:
    await p.prepare("c0", ttl=10)
    await p.commit(id="c0")
    await p.resume("c0")
    p.owner.live.clear()
    await p.restore([A], "c1", source="c0", ttl=10)
    assert p.owner.pending


ROADS: dict[str, Road] = {
    "PREPARING": to_preparing,
    "PREPARED": to_prepared,
    "CAPTURED": to_captured,
    "COMMITTING": to_committing,
    "COMMITTED": to_committed,
    "RESTORING": to_restoring,
    "RESTORED": to_restored,
}


@pytest.mark.behaviour("C120", "C121", "C126", "C326", "C35")
@pytest.mark.parametrize("phase", ROADS)
async def test_it_ends_in_every_phase(tmp_path: Path, phase: str) -> None:
    """Not before its end; then IDLE and open, counted once, the id stale, nothing pending and no refusal."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        p.add("a")
        await ROADS[phase](p)
        assert await p.phase() == phase
        clock.now += 9.9
        await asyncio.sleep(3 * FAST.watch_interval)
        assert await p.phase() == phase
        clock.now += 0.2
        status = await p.until("IDLE")
        assert status.leases_expired == 1
        assert p.is_open()
        assert p.owner.openings[-1].cause is OpeningCause.LEASE_EXPIRED
        assert p.owner.pending == set()
        assert status.marks_held == 0
        assert not status.HasField("lease_remaining")
        for call in (p.commit(), p.renew(), p.prepare()):
            with pytest.raises(StaleCheckpoint):
                await call
        p.files.release()
        p.owner.running.clear()
        assert (await p.prepare("next")).phase == pb.PHASE_PREPARED


@pytest.mark.behaviour("C326")
async def test_a_restore_whose_lease_ended_works_under_a_new_id(tmp_path: Path) -> None:
    """Nothing has started from what was installed, so the same attempts are installed again."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        p.add("a")
        await to_restored(p)
        clock.now += 11
        await p.until("IDLE")
        assert p.owner.live == {}
        reply = await p.restore([A], "r2", source="c0")
        assert list(reply.installed.attempts) == [1]
        assert p.owner.pending == {EpisodeId("a", 1)}


@pytest.mark.behaviour("C122", "C34")
async def test_renewals_keep_it(tmp_path: Path) -> None:
    """Past the first lease, for as long as they come; each tells what is left."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        await p.prepare(ttl=10)
        for _ in range(5):
            clock.now += 8
            reply = await p.renew()
            assert (reply.lease_remaining.seconds, reply.phase) == (10, pb.PHASE_PREPARED)
        assert not p.is_open()
        assert (await p.status()).leases_expired == 0


@pytest.mark.behaviour("C120")
async def test_a_call_under_way_holds_it(tmp_path: Path) -> None:
    """Until its end, or until its connection breaks; the lease counts from there."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        p.add("a", running=True)
        async with running(p.prepare(within=20, ttl=10, timeout=25)):
            await p.until("PREPARING")
            clock.now += 1000
            await asyncio.sleep(3 * FAST.watch_interval)
            status = await p.status()
            assert (status.phase, status.lease_remaining.seconds) == (pb.PHASE_PREPARING, 10)
        lease = p.plane._core.machine.open.lease  # type: ignore[union-attr]
        await eventually(lambda: lease.wake_at() < math.inf)
        clock.now += 9
        await asyncio.sleep(3 * FAST.watch_interval)
        assert await p.phase() == "PREPARING"
        clock.now += 2
        await p.until("IDLE")


async def test_it_is_clamped_and_never_shortened(tmp_path: Path) -> None:
    """Ten minutes at most; a refused call extends nothing."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        await p.prepare(ttl=100_000)
        assert (await p.status()).lease_remaining.seconds == 600
        clock.now += 100
        for call in (p.prepare(ttl=5), p.capture(incarnation="other"), p.restore([A], "c1"), p.renew("other")):
            with pytest.raises(ControlError):
                await call
        assert (await p.status()).lease_remaining.seconds == 500
        await p.capture()
        assert (await p.status()).lease_remaining.seconds == 600


async def test_the_default_is_30_seconds(tmp_path: Path) -> None:
    """Where Prepare names none."""
    async with Participant(tmp_path, clock=Clock()) as p:
        await p.prepare()
        assert (await p.status()).lease_remaining.seconds == 30


@pytest.mark.behaviour("C127")
async def test_an_opening_that_fails_at_expiry(tmp_path: Path) -> None:
    """Tried again with back-off, counted as one expiry; a Resume joins; open once the hook works."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        await p.prepare(ttl=10)
        p.owner.opens.error = HookFailed("no")
        clock.now += 11
        await p.owner.opens.reached(3)
        assert await p.phase() == "RESUMING"
        with pytest.raises(InvalidPhase):
            await p.renew()
        p.owner.opens.error = None
        assert (await p.resume()).phase == pb.PHASE_IDLE
        assert (await p.status()).leases_expired == 1
        assert p.is_open()


@pytest.mark.behaviour("C129")
async def test_expiry_and_renewal_exclude_each_other(tmp_path: Path) -> None:
    """Two hundred renewals at the very end of a lease: each one extends, or is refused and the lease has ended."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        extended = refused = 0
        for number in range(200):
            id = f"c{number}"
            await p.prepare(id, within=0, ttl=10)
            clock.now += 10
            if number % 2:
                p.plane._core.touch()
            try:
                await p.renew(id)
            except (StaleCheckpoint, InvalidPhase):
                refused += 1
                await p.until("IDLE")
            else:
                extended += 1
                assert (await p.status()).active_checkpoint_id == id
                await p.resume(id)
            assert (await p.status()).leases_expired == refused
        assert extended + refused == 200


@pytest.mark.behaviour("C124")
async def test_steps_of_the_wall_clock_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a lease nor a call under way looks at it."""
    async with Participant(tmp_path) as p:
        p.add("a", running=True)
        real = time.time
        for number, step in enumerate((3600.0, -3600.0)):
            async with running(p.prepare(f"c{number}", within=0.3, ttl=20, timeout=10)) as call:
                await p.until("PREPARING")
                monkeypatch.setattr("time.time", lambda step=step: real() + step)
                await asyncio.sleep(5 * FAST.watch_interval)
                status = p.plane.status()
                assert (status.phase.name, status.leases_expired) == ("PREPARING", 0)
                assert status.lease_remaining == 20
                assert not call.done()
                assert (await call).phase == pb.PHASE_PREPARING
                monkeypatch.undo()
            await p.resume(f"c{number}")


@pytest.mark.behaviour("C125")
async def test_a_renewal_never_waits(tmp_path: Path) -> None:
    """Not for a running Restore, Retire or Commit."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await to_restoring(p)
        p.owner.retires.hold()
        async with running(p.retire([EpisodeId("z")], "c1")), asyncio.timeout(1):
            for _ in range(3):
                assert (await p.renew()).phase == pb.PHASE_RESTORING
