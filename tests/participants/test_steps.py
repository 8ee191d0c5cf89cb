"""The episode-steps engine: boundaries, wait and replay steps, deadlines, restarts, retiring."""

from __future__ import annotations

import asyncio

import pytest

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.participants.steps import EpisodeDeadline, Live
from gym_ckpt_grpc.protocol.errors import InvalidArgument, OutOfTime, StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.fakes import FakeClock, R, S, budget, spin
from tests.participants.steps_rig import Deadline, Rig, Work, forever


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.behaviour("P53")
async def test_a_boundary_recorded_while_open_does_not_wait(rig: Rig) -> None:
    async def work(live: Live) -> None:
        await rig.steps.boundary(live, {"next": "a"})

    await asyncio.wait_for(rig.start(R, work), 1)


@pytest.mark.behaviour("P54")
async def test_a_wait_step_blocks_and_the_boundary_with_its_result_is_exported(rig: Rig) -> None:
    go = asyncio.Event()

    async def work(live: Live) -> None:
        await rig.steps.boundary(live, "before")
        async with rig.steps.step(live, "verify", "wait"):
            await go.wait()
        await rig.steps.boundary(live, "result")

    task = rig.start(R, work)
    await spin()
    rig.close()
    rig.clock.now += 3
    (blocker,) = rig.blocking.oldest(10)
    assert (blocker.reason, blocker.place, blocker.episode, blocker.age) == (BlockerReason.WAIT_STEP, "verify", R, 3.0)
    assert rig.taken() == {}
    go.set()
    await spin()
    assert (len(rig.blocking), rig.taken()) == (0, {R: "result"})
    rig.open()
    await task


@pytest.mark.behaviour("P55", "P56")
async def test_a_replay_step_does_not_block_and_its_result_waits_at_the_next_boundary(rig: Rig) -> None:
    """The boundary before it is exported, until it records the next one while closed; and it never blocks between."""
    go, after = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def work(live: Live) -> None:
        await rig.steps.boundary(live, "before")
        async with rig.steps.step(live, "generate", "replay"):
            await go.wait()
        await after.wait()
        await rig.steps.boundary(live, "after")
        seen.append("delivered")

    task = rig.start(R, work)
    await spin()
    rig.close()
    assert (len(rig.blocking), rig.taken()) == (0, {R: "before"})
    go.set()
    await spin()
    assert (len(rig.blocking), rig.taken()) == (0, {R: "before"})
    after.set()
    await spin()
    assert (len(rig.blocking), rig.taken(), seen) == (0, {R: "after"}, [])
    rig.open()
    await task
    assert seen == ["delivered"]


async def test_between_a_replay_step_and_its_boundary_an_episode_blocks_the_next_checkpoint(rig: Rig) -> None:
    go = asyncio.Event()

    async def work(live: Live) -> None:
        async with rig.steps.step(live, "generate", "replay"):
            await spin(1)
        await go.wait()
        await rig.steps.boundary(live, "after")

    rig.close()
    task = rig.start(R, work)
    await spin()
    assert len(rig.blocking) == 0
    rig.open()
    rig.close()
    assert rig.reasons() == [(BlockerReason.RUNNING, "")]
    go.set()
    await spin()
    assert rig.taken() == {R: "after"}
    rig.open()
    await task


@pytest.mark.behaviour("P57")
@pytest.mark.parametrize("cleans", [False, True])
async def test_a_replay_step_that_raises_while_closed_is_exported_with_no_boundary(rig: Rig, cleans: bool) -> None:
    """Its cleanup may destroy what the boundary names; the failure is told after the checkpoint only."""
    fail = asyncio.Event()

    async def work(live: Live) -> None:
        await rig.steps.boundary(live, "before")
        try:
            async with rig.steps.step(live, "generate", "replay"):
                await fail.wait()
                raise RuntimeError("lost")
        finally:
            rig.steps.finish(live, cleans=cleans)
            await rig.steps.hold_end(live)

    task = rig.start(R, work)
    await spin()
    rig.close()
    fail.set()
    await spin()
    assert (len(rig.blocking), rig.taken(), task.done()) == (0, {R: None}, False)
    rig.open()
    with pytest.raises(RuntimeError, match="lost"):
        await task


@pytest.mark.behaviour("P58")
async def test_a_replay_step_that_raises_while_open_blocks_until_the_episode_ends(rig: Rig) -> None:
    go = asyncio.Event()

    async def work(live: Live) -> None:
        await rig.steps.boundary(live, "before")
        try:
            async with rig.steps.step(live, "generate", "replay"):
                raise RuntimeError("lost")
        except RuntimeError:
            await go.wait()

    task = rig.start(R, work)
    await spin()
    rig.close()
    assert (rig.reasons(), rig.taken()) == ([(BlockerReason.RUNNING, "")], {})
    go.set()
    await task
    assert len(rig.blocking) == 0


@pytest.mark.behaviour("P60")
async def test_a_restored_episode_is_exported_at_its_restored_boundary_before_it_records_another(rig: Rig) -> None:
    async def work(live: Live) -> None:
        async with rig.steps.step(live, "generate", "replay"):
            await forever(live)

    task = rig.start(R, work, boundary="restored")
    await spin()
    rig.close()
    assert rig.taken() == {R: "restored"}
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.behaviour("P61", "P187")
async def test_an_episode_woken_and_overtaken_by_a_new_close_stays_parked_for_both(rig: Rig) -> None:
    async def work(live: Live) -> str:
        await rig.steps.boundary(live, "here")
        return "went on"

    rig.close()
    task = rig.start(R, work)
    await spin()
    rig.open()
    rig.close()
    assert (len(rig.blocking), rig.taken()) == (0, {R: "here"})
    await spin()
    assert (len(rig.blocking), rig.taken(), task.done()) == (0, {R: "here"}, False)
    rig.open()
    assert await task == "went on"


@pytest.mark.behaviour("P62")
async def test_only_what_moves_uses_up_its_deadline(rig: Rig) -> None:
    """Parked, in a replay step, or parked before the close: suspended. Running and in a wait step: not."""
    gate = asyncio.Event()

    async def parks(live: Live) -> None:
        await rig.steps.boundary(live, "here")
        await gate.wait()

    async def replays(live: Live) -> None:
        async with rig.steps.step(live, "generate", "replay"):
            await gate.wait()

    async def waits(live: Live) -> None:
        async with rig.steps.step(live, "verify", "wait"):
            await gate.wait()

    async def runs(live: Live) -> None:
        await gate.wait()

    works: dict[EpisodeId, Work] = {EpisodeId(work.__name__): work for work in (parks, replays, waits, runs)}
    late = EpisodeId("late")
    deadlines = {episode: Deadline() for episode in [*works, late]}
    tasks = [rig.start(each, work, deadline=deadlines[each]) for each, work in works.items() if work is not parks]
    await spin()
    rig.close()
    tasks.append(rig.start(EpisodeId("parks"), parks, deadline=deadlines[EpisodeId("parks")]))
    tasks.append(rig.start(late, replays, deadline=deadlines[late]))
    await spin()
    suspended = {str(episode) for episode, deadline in deadlines.items() if deadline.suspended}
    assert suspended == {"parks", "replays", "late"}
    rig.open()
    rig.close()  # overtaken: what parks is still parked, and its deadline stands still again
    assert deadlines[EpisodeId("parks")].suspended
    rig.open()
    assert not any(deadline.suspended for deadline in deadlines.values())
    gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.behaviour("P63")
async def test_reopening_gives_back_exactly_the_time_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves a scope alone that has exited."""
    loop = asyncio.get_running_loop()
    clock = FakeClock(loop.time())
    monkeypatch.setattr(loop, "time", clock)
    async with asyncio.timeout(50) as scope:  # noqa: ASYNC100
        deadline = EpisodeDeadline(scope)
        clock.now += 20
        deadline.suspend()
        deadline.suspend()
        assert scope.when() is None
        clock.now += 1000
        deadline.resume()
        deadline.resume()
        assert scope.when() == clock.now + 30
        deadline.suspend()
    deadline.resume()
    deadline.suspend()
    assert scope.when() is None


@pytest.mark.behaviour("P64", "P65")
async def test_a_restart_neither_blocks_nor_parks_nor_is_exported(rig: Rig) -> None:
    """Also inside a wait step; it is listed until it has ended."""
    go = asyncio.Event()

    async def work(live: Live) -> None:
        async with rig.steps.step(live, "verify", "wait"):
            await go.wait()
        await rig.steps.boundary(live, "not a place to stay")

    task = rig.start(R, work, restart=True)
    await spin()
    rig.close()
    assert (len(rig.blocking), rig.taken(), rig.steps.restarts()) == (0, {}, [R])
    go.set()
    await asyncio.wait_for(task, 1)
    assert (rig.steps.restarts(), rig.steps.restart_count) == ([], 0)


@pytest.mark.behaviour("P66")
@pytest.mark.parametrize("mode", ["replay", "wait"])
async def test_a_restart_mark_set_while_closed_takes_effect_after_the_checkpoint(rig: Rig, mode: str) -> None:
    """In a replay step it waits there, exported at the boundary before; in a wait step it goes on and parks."""
    go = asyncio.Event()

    async def work(live: Live) -> None:
        await rig.steps.boundary(live, "before")
        async with rig.steps.step(live, "seed", mode):
            await go.wait()
            await rig.steps.mark_restart(live)
        await rig.steps.boundary(live, "after")
        await forever(live)

    task = rig.start(R, work)
    await spin()
    rig.close()
    go.set()
    await spin()
    taken = {R: "before"} if mode == "replay" else {R: "after"}
    assert (rig.taken(), rig.steps.restarts(), len(rig.blocking)) == (taken, [], 0)
    rig.open()
    await spin()
    rig.close()
    assert (rig.taken(), rig.steps.restarts(), len(rig.blocking)) == ({}, [R], 0)
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.behaviour("P67")
async def test_a_restart_being_retired_blocks_and_is_not_listed(rig: Rig) -> None:
    go = asyncio.Event()

    async def work(live: Live) -> None:
        try:
            await forever(live)
        finally:
            await go.wait()

    task = rig.start(R, work, restart=True)
    await spin()
    rig.close()
    with pytest.raises(OutOfTime):
        await rig.steps.retire(rig.lives[R], Budget(0))
    assert (rig.reasons(), rig.steps.restarts()) == ([(BlockerReason.RETIRING, "")], [])
    go.set()
    await asyncio.wait({task})


@pytest.mark.behaviour("P69")
async def test_a_retire_of_a_parked_episode_cancels_it_and_blocks_until_it_ended(rig: Rig) -> None:
    go = asyncio.Event()
    went_on: list[str] = []

    async def work(live: Live) -> None:
        try:
            await rig.steps.boundary(live, "here")
            went_on.append("continued")
        finally:
            await go.wait()

    rig.close()
    task = rig.start(R, work)
    await spin()
    retiring = asyncio.create_task(rig.steps.retire(rig.lives[R], budget()))
    await spin()
    assert (rig.reasons(), rig.taken()) == ([(BlockerReason.RETIRING, "")], {})
    go.set()
    await retiring
    assert (went_on, len(rig.blocking), task.cancelled()) == ([], 0, True)


@pytest.mark.behaviour("P70")
async def test_a_retire_during_final_cleanup_does_not_interrupt_it(rig: Rig) -> None:
    go = asyncio.Event()

    async def work(live: Live) -> str:
        rig.steps.finish(live)
        await go.wait()
        return "cleaned"

    task = rig.start(R, work)
    await spin()
    retiring = asyncio.create_task(rig.steps.retire(rig.lives[R], budget()))
    await spin()
    assert not retiring.done()
    go.set()
    await retiring
    assert await task == "cleaned"


@pytest.mark.behaviour("P71")
async def test_a_retire_cancels_once_over_retries_and_a_close_between(rig: Rig) -> None:
    cancels: list[int] = []
    go = asyncio.Event()

    async def work(live: Live) -> None:
        try:
            await forever(live)
        except asyncio.CancelledError:
            cancels.append(1)
            try:
                await go.wait()
            except asyncio.CancelledError:
                cancels.append(2)
                raise
            raise

    task = rig.start(R, work)
    await spin()
    for _ in range(3):
        with pytest.raises(OutOfTime):
            await rig.steps.retire(rig.lives[R], Budget(0))
        await spin()
        rig.close()
        rig.open()
    go.set()
    await rig.steps.retire(rig.lives[R], budget())
    assert (cancels, task.cancelled(), rig.steps.live) == ([1], True, {})


@pytest.mark.behaviour("P72")
async def test_a_second_start_of_a_key_is_refused_and_disturbs_nothing(rig: Rig) -> None:
    """INVALID_ARGUMENT while it lives, STALE_ATTEMPT while it is being retired."""
    go = asyncio.Event()

    async def work(live: Live) -> None:
        try:
            await forever(live)
        finally:
            await go.wait()

    task = rig.start(R, work)
    await spin()
    with pytest.raises(InvalidArgument):
        await rig.start(R, work)
    with pytest.raises(OutOfTime):
        await rig.steps.retire(rig.lives[R], Budget(0))
    with pytest.raises(StaleAttempt):
        await rig.start(R, work)
    assert list(rig.steps.live.values()) == [rig.lives[R]]
    go.set()
    await asyncio.wait({task})


@pytest.mark.behaviour("P73")
async def test_the_closing_event_is_set_while_a_checkpoint_waits(rig: Rig) -> None:
    async def work(live: Live) -> None:
        async with rig.steps.step(live, "harness", "wait"):
            await rig.steps.closing.wait()
        await rig.steps.boundary(live, "stopped early")

    task = rig.start(R, work)
    await spin()
    assert not task.done()
    rig.close()
    await spin()
    assert rig.taken() == {R: "stopped early"}
    rig.open()
    assert not rig.steps.closing.is_set()
    await task


@pytest.mark.behaviour("P74")
async def test_blockers_are_listed_oldest_first_and_counted_without_a_scan(rig: Rig) -> None:
    """Blocking begins anew when an episode comes back from a replay step."""
    first, second = EpisodeId("first"), EpisodeId("second")
    go = asyncio.Event()

    async def replay_then_run(live: Live) -> None:
        async with rig.steps.step(live, "generate", "replay"):
            await go.wait()
        await forever(live)

    tasks = [rig.start(first, replay_then_run)]
    await spin()
    rig.clock.now += 5
    tasks.append(rig.start(second, forever))
    await spin()
    rig.clock.now += 5
    go.set()
    await spin()
    rig.clock.now += 2
    assert [(each.episode, each.age) for each in rig.blocking.oldest(2)] == [(second, 7.0), (first, 2.0)]
    assert [each.episode for each in rig.blocking.oldest(1)] == [second]
    assert len(rig.blocking) == 2
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_boundary_function_is_called_at_the_export_only(rig: Rig) -> None:
    calls: list[int] = []

    async def work(live: Live) -> None:
        await rig.steps.boundary(live, lambda: calls.append(1))

    task = rig.start(S, work)
    await spin()
    await task
    assert calls == []
