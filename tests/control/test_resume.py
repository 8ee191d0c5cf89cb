"""Resume: it pre-empts, it waits for what cannot be stopped, and it may keep a write."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import ControlSettings, HookFailed, OpeningCause
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InvalidPhase,
    OutOfTime,
    StaleCheckpoint,
    StaleController,
    StateUnwritable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import FAST, Clock, Participant, running
from tests.control.test_capture_commit import pending, stored

A, B = EpisodeId("a"), EpisodeId("b")
SHORT = ControlSettings(cleanup_limit=0.3, deletion_wait=0.05, watch_interval=0.01, status_interval=0.01)


@pytest.mark.behaviour("C106", "C109")
async def test_it_stops_a_write_before_it_publishes(tmp_path: Path) -> None:
    """The Commit is refused with STALE_CHECKPOINT within a second, and no file of it is left."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit()) as call:
            await p.files.wait_entered()
            async with asyncio.timeout(1):
                assert (await p.resume()).phase == pb.PHASE_IDLE
                with pytest.raises(StaleCheckpoint):
                    await call
        assert p.is_open()
        p.files.release()
        await p.server.stop(0)
        await asyncio.to_thread(p.plane._core._threads.shutdown)
        assert p.written() == []


@pytest.mark.behaviour("C107", "C108", "C13")
async def test_it_waits_for_a_publication_under_way(tmp_path: Path) -> None:
    """While it is held Resume has not replied and no manifest exists; when it replies the manifest is there."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("publish", "manifest.json")
        async with running(p.commit()):
            await p.files.wait_entered()
            async with running(p.resume()) as resume:
                await p.until("RESUMING")
                done, _ = await asyncio.wait({resume}, timeout=0.1)
                assert not done
                assert not p.is_open()
                assert "manifest.json" not in p.written()
                p.files.release()
                assert (await resume).phase == pb.PHASE_IDLE
        assert stored(p) == {A: {"name": "a"}}


async def test_a_publication_that_hangs_is_waited_for_only_so_long(tmp_path: Path) -> None:
    """After cleanup_limit admission opens without it; all four I/O threads may be gone by then."""
    async with Participant(tmp_path, settings=SHORT) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("publish", "manifest.json")
        async with running(p.commit()):
            await p.files.wait_entered()
            async with asyncio.timeout(3):
                await p.resume()
        assert p.is_open()
        assert (await p.prepare("c2")).phase == pb.PHASE_PREPARED
        p.files.release()


@pytest.mark.behaviour("C105")
async def test_hung_writes_do_not_stop_resume(tmp_path: Path) -> None:
    """Storage that never answers takes thread after thread; Resume needs none, and a Commit is refused in time."""
    async with Participant(tmp_path) as p:
        p.add("a")
        for number in range(4):
            await p.prepare(f"c{number}")
            p.files.hold("create")
            async with running(p.commit(id=f"c{number}")):
                await p.files.wait_entered()
                async with asyncio.timeout(2):
                    await p.resume(f"c{number}")
        await p.prepare("last")
        with pytest.raises(OutOfTime):
            await p.commit(id="last", timeout=0.8)
        async with asyncio.timeout(1):
            await p.renew("last")
            await p.resume("last")
        p.files.release()


@pytest.mark.behaviour("C109", "C110")
@pytest.mark.parametrize("operation", ["capture", "commit"])
async def test_it_pre_empts_a_capture(tmp_path: Path, operation: str) -> None:
    """The export is cancelled; the call is refused within a second."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.owner.exports.hold()
        async with running(getattr(p, operation)()) as call:
            await p.owner.exports.entered.wait()
            async with asyncio.timeout(1):
                await p.resume()
                with pytest.raises(StaleCheckpoint):
                    await call
        assert p.written() == []


@pytest.mark.behaviour("C110")
async def test_a_late_export_is_dropped(tmp_path: Path) -> None:
    """A hook that cannot be cancelled holds Resume for a moment only, and its result changes nothing later."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        entered, late = asyncio.Event(), asyncio.Event()
        original = p.owner.exports.step

        async def deaf() -> None:
            entered.set()
            while not late.is_set():
                try:
                    await late.wait()
                except asyncio.CancelledError:
                    continue

        p.owner.exports.step = deaf  # type: ignore[method-assign]
        async with running(p.commit()):
            await entered.wait()
            async with asyncio.timeout(2):
                await p.resume()
            p.owner.exports.step = original  # type: ignore[method-assign]
            await p.prepare("c2")
            late.set()
            assert (await p.commit([A], "c2")).record_count == 1
        assert await p.phase() == "COMMITTED"
        assert p.written("c1") == []


@pytest.mark.behaviour("C111")
async def test_it_waits_for_a_cleanup(tmp_path: Path) -> None:
    """Deletions that outlived their Commit end before admission opens."""
    async with Participant(tmp_path, settings=ControlSettings(deletion_wait=0.05)) as p:
        a, *_ = await pending(p)
        await p.prepare()
        p.owner.deletes.hold()
        await p.commit([a])
        async with running(p.resume()) as resume:
            await p.until("RESUMING")
            assert not resume.done()
            assert not p.is_open()
            p.owner.deletes.open.set()
            await resume
        assert p.is_open()
        assert p.owner.pending == {a}


@pytest.mark.behaviour("C112", "C113", "C13", "C14")
async def test_a_cleanup_that_hangs(tmp_path: Path) -> None:
    """DEADLINE_EXCEEDED in RESUMING, closed; a later Resume joins; after cleanup_limit it opens all the same."""
    async with Participant(tmp_path, settings=SHORT) as p:
        a, _, _ = await pending(p)
        await p.prepare()
        p.owner.deletes.hold()
        await p.commit([a])
        with pytest.raises(OutOfTime, match="opening admission"):
            await p.resume(timeout=0.12)
        assert await p.phase() == "RESUMING"
        assert not p.is_open()
        for call in (p.commit([a]), p.capture([a]), p.renew(), p.prepare()):
            with pytest.raises(InvalidPhase, match="RESUMING"):
                await call
        assert (await p.resume()).phase == pb.PHASE_IDLE
        for call in (p.commit([a]), p.capture([a]), p.renew()):
            with pytest.raises(StaleCheckpoint):
                await call
        assert len(p.owner.pending) == 3
        p.owner.deletes.open.set()


@pytest.mark.behaviour("C113")
async def test_a_later_resume_joins_the_cleanup(tmp_path: Path) -> None:
    """Once it has ended the Resume succeeds, and what was to be deleted is gone."""
    async with Participant(tmp_path, settings=ControlSettings(deletion_wait=0.05)) as p:
        a, *others = await pending(p)
        await p.prepare()
        p.owner.deletes.hold()
        await p.commit([a])
        with pytest.raises(OutOfTime):
            await p.resume(timeout=0.8)
        async with running(p.resume()) as later:
            await p.status()
            assert not later.done()
            p.owner.deletes.open.set()
            assert (await later).phase == pb.PHASE_IDLE
        assert p.owner.pending == {a}
        assert p.owner.deletes.count == len(others)


@pytest.mark.behaviour("C127")
async def test_a_hook_that_fails_while_opening(tmp_path: Path) -> None:
    """Phase RESUMING, tried again with back-off until it succeeds; a Resume gets in between two tries."""
    async with Participant(tmp_path) as p:
        await p.prepare()
        p.owner.opens.error = HookFailed("no")
        async with running(p.resume(timeout=10)) as first:
            await p.owner.opens.reached(4)
            assert await p.phase() == "RESUMING"
            p.owner.opens.error = None
            async with asyncio.timeout(0.5):  # well before the fourth back-off has ended
                assert (await p.resume()).phase == pb.PHASE_IDLE
                await first
        assert p.is_open()
        assert [o.cause for o in p.owner.openings] == [OpeningCause.ABORTED]


@pytest.mark.behaviour("C18", "C36")
async def test_a_second_resume_is_replayed(tmp_path: Path) -> None:
    """It tells the true phase and the active id, also while another checkpoint is open."""
    async with Participant(tmp_path) as p:
        await p.prepare()
        assert not (await p.resume()).replayed
        reply = await p.resume()
        assert (reply.replayed, reply.phase, reply.active_checkpoint_id) == (True, pb.PHASE_IDLE, "")
        await p.prepare("c2")
        reply = await p.resume()
        assert (reply.replayed, reply.phase, reply.active_checkpoint_id) == (True, pb.PHASE_PREPARED, "c2")
        assert not p.is_open()


@pytest.mark.behaviour("C16", "C35")
async def test_a_resumed_id_is_stale(tmp_path: Path) -> None:
    """For every call of it; its recorded replies are gone."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        await p.commit()
        await p.resume()
        calls = (p.prepare(), p.capture(), p.commit(), p.renew(), p.restore([A], "c1"))
        for call in calls:
            with pytest.raises(StaleCheckpoint):
                await call
        assert p.is_open()


@pytest.mark.behaviour("C114")
async def test_a_resume_without_time_still_opens(tmp_path: Path) -> None:
    """Opening is always right; the deadline of the call passed on the way."""
    async with Participant(tmp_path) as p:
        await p.prepare()
        call = p.stub.Resume(
            pb.ResumeRequest(context=pb.ControlContext(checkpoint_id="c1", controller_id="t", epoch=1)), timeout=0.002
        )
        await asyncio.wait({asyncio.ensure_future(call.code())})
        if await p.phase() != "IDLE":  # it may never have arrived
            await p.resume()
        assert p.is_open()


@pytest.mark.behaviour("C115", "C36")
async def test_a_kept_write_goes_on(tmp_path: Path) -> None:
    """Open while it runs; its Commit call goes on, a later one joins it and gets the manifest, a third the replay."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit()) as first:
            await p.files.wait_entered()
            assert (await p.resume(keep_write=True)).phase == pb.PHASE_IDLE
            assert p.is_open()
            status = await p.status()
            assert list(status.writes_under_way) == ["c1"]
            with pytest.raises(CheckpointConflict):
                await p.commit([A])
            async with running(p.commit()) as second:
                p.files.release()
                replies = [await first, await second, await p.commit()]
        assert [reply.replayed for reply in replies] == [False, False, True]
        assert len({reply.manifest_digest for reply in replies}) == 1
        assert await p.listed(pb.EPISODE_LIST_KIND_COMMITTED, "c1") == [A]


@pytest.mark.behaviour("C115", "C80")
async def test_from_captured_the_commit_starts_the_write(tmp_path: Path) -> None:
    """With the scope of the capture and no other; what is stored is what was frozen."""
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        await p.prepare()
        await p.capture([A])
        await p.resume(keep_write=True)
        p.owner.live[A] = {"name": "went on"}
        for other in (p.commit([A, B]), p.commit([B]), p.commit()):
            with pytest.raises(CheckpointConflict):
                await other
        reply = await p.commit([A])
        assert not reply.replayed
        assert stored(p) == {A: {"name": "a"}}


async def test_a_kept_write_that_failed_is_written_again(tmp_path: Path) -> None:
    """The retry is no replay, and stores the same records."""

    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        await p.capture()
        await p.resume(keep_write=True)
        p.files.fail("create", StateUnwritable("full"))
        with pytest.raises(StateUnwritable):
            await p.commit()
        p.files.fail("create", None)
        assert not (await p.commit()).replayed
        assert (await p.commit()).replayed


@pytest.mark.behaviour("C116")
@pytest.mark.parametrize("end", ["resume", "epoch"])
async def test_a_kept_write_is_ended(tmp_path: Path, end: str) -> None:
    """By a plain Resume of its id, or by an obeyed call of a higher epoch: nothing of it appears afterwards."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit()) as call:
            await p.files.wait_entered()
            await p.resume(keep_write=True)
            if end == "resume":
                assert (await p.resume()).replayed
            else:
                await p.retire([EpisodeId("z")], epoch=2)
            with pytest.raises(StaleCheckpoint):
                await call
            with pytest.raises(StaleCheckpoint if end == "resume" else StaleController):
                await p.commit()
            assert list((await p.status()).writes_under_way) == []
        p.files.release()
        await asyncio.to_thread(p.plane._core._threads.shutdown)
        assert p.written() == []


@pytest.mark.behaviour("C116")
async def test_a_kept_publication_under_way_is_waited_for(tmp_path: Path) -> None:
    """The call that ends it does not reply before; a renewal never waits."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("publish", "manifest.json")
        async with running(p.commit()):
            await p.files.wait_entered()
            await p.resume(keep_write=True)
            async with running(p.retire([EpisodeId("z")], epoch=2)) as takeover:
                done, _ = await asyncio.wait({takeover}, timeout=0.1)
                assert not done
                with pytest.raises(OutOfTime, match="earlier"):
                    await p.retire([EpisodeId("y")], epoch=3, timeout=0.8)
                with pytest.raises(OutOfTime, match="kept"):
                    await p.resume(epoch=3, timeout=0.8)
                p.files.release()
                with pytest.raises(StaleController):
                    await takeover
        assert "manifest.json" in p.written()


async def test_a_kept_write_of_a_taken_over_checkpoint_stays(tmp_path: Path) -> None:
    """The epoch that counts is that of the controller who kept it, not of the one who prepared."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        await p.capture()
        await p.renew(epoch=5, controller="next")
        await p.resume(keep_write=True, epoch=5, controller="next")
        assert (await p.commit(epoch=5, controller="next")).record_count == 1


@pytest.mark.behaviour("C115")
async def test_a_plain_resume_that_joins_a_keeping_one_ends_the_write(tmp_path: Path) -> None:
    """Sent while the first one is still opening."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        await p.capture()
        p.owner.opens.hold()
        async with running(p.resume(keep_write=True)) as first, running(p.resume()) as second:
            await p.until("RESUMING")
            p.owner.opens.open.set()
            await first
            await second
        with pytest.raises(StaleCheckpoint):
            await p.commit()


@pytest.mark.behaviour("C117")
async def test_kept_records_wait_for_a_lease_ttl(tmp_path: Path) -> None:
    """Dropped when no Commit comes; the reply of one that came is replayed and listed for as long again."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        p.add("a")
        await p.prepare("gone", ttl=10)
        await p.capture(id="gone")
        await p.resume("gone", keep_write=True)
        await p.prepare("came", ttl=10)
        await p.capture(id="came")
        await p.resume("came", keep_write=True)
        clock.now += 9
        first = await p.commit(id="came")
        clock.now += 2
        await asyncio.sleep(3 * FAST.watch_interval)
        with pytest.raises(StaleCheckpoint):
            await p.commit(id="gone")
        again = await p.commit(id="came")
        assert (again.replayed, again.manifest_digest) == (True, first.manifest_digest)
        assert await p.listed(pb.EPISODE_LIST_KIND_COMMITTED, "came") == [A]
        clock.now += 9
        await asyncio.sleep(3 * FAST.watch_interval)
        with pytest.raises(StaleCheckpoint):
            await p.commit(id="came")


@pytest.mark.behaviour("C118")
async def test_a_new_checkpoint_beside_a_kept_write(tmp_path: Path) -> None:
    """Neither changes the other's files."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit()) as first:
            await p.files.wait_entered()
            await p.resume(keep_write=True)
            p.owner.live[A] = {"name": "later"}
            await p.prepare("c2")
            await p.commit(id="c2")
            p.files.release()
            await first
        assert stored(p, "c1") == {A: {"name": "a"}}
        assert stored(p, "c2") == {A: {"name": "later"}}


async def test_keep_write_keeps_nothing_elsewhere(tmp_path: Path) -> None:
    """In PREPARED there are no records, in COMMITTED nothing is left to keep."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare("c1")
        await p.resume("c1", keep_write=True)
        await p.prepare("c2")
        await p.commit(id="c2")
        await p.resume("c2", keep_write=True)
        for id in ("c1", "c2"):
            with pytest.raises(StaleCheckpoint):
                await p.commit(id=id)


@pytest.mark.behaviour("C20")
async def test_two_controllers(tmp_path: Path) -> None:
    """The higher epoch is obeyed; each call of the lower one is refused from then on, Resume included."""
    async with Participant(tmp_path) as p:
        await p.prepare()
        await p.resume(epoch=2, controller="next")
        calls = (p.prepare("c2"), p.resume(), p.retire([A]), p.forget({"a": 0}), p.renew(), p.capture(), p.commit())
        for call in calls:
            with pytest.raises(StaleController):
                await call
        assert (await p.status()).highest_epoch == 2
