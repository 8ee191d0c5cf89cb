"""Faults that random sequences (tests/random) found, each as the shortest story that shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_ckpt_grpc.protocol.errors import StaleCheckpoint
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.control.scripted import FAST, Clock, Participant, eventually, running

A, A1, B, B1 = EpisodeId("a"), EpisodeId("a", 1), EpisodeId("b"), EpisodeId("b", 1)
HOOK_FAILS = RuntimeError("on purpose")


async def checkpoint(p: Participant, id: str, *names: str) -> None:
    """A checkpoint of these episodes, which are gone after it."""
    p.add(*names)
    await p.prepare(id)
    await p.commit(id=id)
    await p.resume(id)
    p.owner.live.clear()


@pytest.mark.behaviour("C22", "C116")
async def test_the_commit_of_a_higher_epoch_finds_no_kept_records_and_changes_nothing(tmp_path: Path) -> None:
    """It was obeyed first, which dropped the records and raised the epoch, and then refused."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        await p.capture()
        await p.resume(keep_write=True)
        with pytest.raises(StaleCheckpoint):
            await p.commit(epoch=2)
        assert (await p.status()).highest_epoch == 1
        assert (await p.commit()).record_count == 1


@pytest.mark.behaviour("C80", "C109")
async def test_keep_write_keeps_nothing_of_an_export_that_still_runs(tmp_path: Path) -> None:
    """Admission opened over it, so that the rest of the records told of a later moment."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.owner.exports.hold()
        async with running(p.commit()) as call:
            await p.owner.exports.reached(1)
            await p.resume(keep_write=True)
            p.owner.live[A] = {"name": "later"}
            p.owner.exports.open.set()
            with pytest.raises(StaleCheckpoint):
                await call
        assert p.written() == []


@pytest.mark.behaviour("C123")
async def test_a_call_that_waits_for_an_earlier_controllers_write_holds_the_lease(tmp_path: Path) -> None:
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("publish", "manifest.json")
        async with running(p.commit()):
            await p.files.wait_entered()
            await p.resume(keep_write=True)
            await p.prepare("c2", ttl=10)
            async with running(p.commit(id="c2", epoch=2)) as call:
                await eventually(lambda: p.plane.status().highest_epoch == 2)
                clock.now += 60
                await asyncio.sleep(3 * FAST.watch_interval)
                assert (await p.phase(), p.is_open()) == ("PREPARED", False)
                p.files.release()
                assert (await call).record_count == 1
        assert (await p.status()).leases_expired == 0


@pytest.mark.behaviour("C96")
async def test_a_failed_deletion_is_forgotten_once_the_episode_has_started(tmp_path: Path) -> None:
    """The retry found the old failure again, although nothing was left to be deleted."""
    async with Participant(tmp_path) as p:
        await checkpoint(p, "c0", "a")
        await p.restore([A], "r0", source="c0")
        await p.resume("r0")
        await p.prepare()
        p.owner.deletes.error = HOOK_FAILS
        with pytest.raises(Exception, match="incident"):
            await p.commit([])
        p.owner.deletes.error = None
        p.owner.pending.clear()
        assert (await p.commit([])).deleting == 0


@pytest.mark.behaviour("C93", "C115")
async def test_a_kept_commit_deletes_nothing_that_was_restored_after_its_capture(tmp_path: Path) -> None:
    async with Participant(tmp_path) as p:
        await checkpoint(p, "c0", "a", "b")
        await p.restore([A], "r0", source="c0")
        await p.resume("r0")
        await p.prepare()
        await p.capture([])
        await p.resume(keep_write=True)
        await p.restore([B], "r1", source="c0")
        await p.commit([])
        assert p.owner.pending == {B1}


@pytest.mark.behaviour("C326")
async def test_a_lease_that_ends_in_restored_frees_only_what_its_own_restore_installed(tmp_path: Path) -> None:
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        await checkpoint(p, "c0", "a", "b")
        await p.restore([A], "r0", source="c0")
        await p.resume("r0")
        await p.restore([B], "r1", source="c0", ttl=10)
        clock.now += 11
        await p.until("IDLE")
        assert p.owner.pending == {A1}


@pytest.mark.behaviour("C143")
async def test_taking_back_an_install_goes_on_past_a_hook_that_fails(tmp_path: Path) -> None:
    """Nobody waits for it any more: the second episode is freed although the first one's hook fails."""
    async with Participant(tmp_path) as p:
        await checkpoint(p, "c0", "a", "b")
        p.owner.activates.hold()

        async def failing_for_a(episode: EpisodeId) -> None:
            if episode == A1:
                raise HOOK_FAILS
            p.owner.pending.discard(episode)

        p.owner.delete_restored = failing_for_a  # type: ignore[method-assign]
        async with running(p.restore([A, B], source="c0")):
            await p.owner.activates.reached(1)
            await p.waiters(1)
        await p.waiters(0)
        p.owner.activates.open.set()
        await p.until("IDLE")
        assert p.owner.pending == {A1}


@pytest.mark.behaviour("C75")
async def test_an_attempt_whose_stop_failed_is_freed_by_the_retire_of_a_later_one(tmp_path: Path) -> None:
    """It blocked every later Prepare and Forget, since nobody retires it again."""
    async with Participant(tmp_path) as p:
        p.add("a")
        p.owner.retires.error = HOOK_FAILS
        await p.retire([A])
        p.owner.retires.error = None
        await p.retire([A1])
        assert list((await p.forget({"a": 1})).rollout_ids) == ["a"]
        assert (await p.prepare()).report.blocker_count == 0
