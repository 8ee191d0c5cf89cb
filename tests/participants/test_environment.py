"""The environment owner: begin order, task identity, restored boundaries, cleanup."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from gym_ckpt_grpc.control.ports import EpisodeListKind, HookFailed, InvalidState
from gym_ckpt_grpc.participants import EnvironmentOwner, EnvironmentSettings, EpisodeContext, StepMode
from gym_ckpt_grpc.protocol.errors import InvalidArgument, OutOfTime, StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record, encode
from tests.participants.fakes import (
    R1,
    R2,
    FakeClock,
    FakePort,
    R,
    S,
    budget,
    close,
    exported,
    listed,
    reopen,
    restore,
    retire,
    spin,
)

TASK = {"prompt": "play", "setup": {"seed": 1}}


class Rig:
    """An owner and a protocol that counts to `turns`, one boundary a turn, each held by `go`."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.owner = EnvironmentOwner(EnvironmentSettings(**settings), clock=self.clock)
        self.port = FakePort()
        self.owner.attach(self.port)
        self.go = asyncio.Event()
        self.started: list[tuple[EpisodeId, Any]] = []

    def run(self, episode: EpisodeId, task: Any = None) -> asyncio.Task[Any]:
        return asyncio.create_task(self.owner.run(episode, task or TASK, self.protocol))

    async def protocol(self, ctx: EpisodeContext) -> str:
        self.started.append((ctx.episode, ctx.restored))
        state = ctx.restored or {"next": "invoke"}
        await ctx.boundary(state)
        async with ctx.step("invoke", StepMode.REPLAY):
            await self.go.wait()
        await ctx.boundary({"next": "return"})
        return f"{ctx.episode} done"

    async def checkpoint(self) -> list[Record]:
        await close(self.owner)
        await spin()
        records = await exported(self.owner)
        await reopen(self.owner)
        return records

    async def finish(self, *tasks: asyncio.Task[Any]) -> None:
        self.go.set()
        await asyncio.gather(*tasks)


async def a_record(boundary: Any = None, task: Any = None) -> Record:
    """The record of an episode r that is in its replay step."""
    rig = Rig()
    running = rig.run(R, task)
    await spin()
    (record,) = await rig.checkpoint()
    await rig.finish(running)
    return record


@pytest.mark.behaviour("P75")
async def test_a_run_of_a_new_episode_while_closed_is_held_and_leaves_no_record() -> None:
    rig = Rig()
    await close(rig.owner)
    held = rig.run(R)
    await spin()
    assert (rig.started, await exported(rig.owner), rig.owner.report(9).counts["waiting"]) == ([], [], 1)
    await reopen(rig.owner)
    await rig.finish(held)
    assert (rig.started, held.result()) == ([(R, None)], "r done")


@pytest.mark.behaviour("P59")
async def test_an_episode_without_a_boundary_is_exported_with_none_and_starts_from_its_input() -> None:
    rig = Rig()

    async def protocol(ctx: EpisodeContext) -> None:
        rig.started.append((ctx.episode, ctx.restored))
        async with ctx.step("seed", "replay"):
            await rig.go.wait()

    first = asyncio.create_task(rig.owner.run(R, TASK, protocol))
    await spin()
    (record,) = await rig.checkpoint()
    assert "boundary" not in record.payloads
    await rig.finish(first)
    other = Rig()
    await restore(other.owner, [record])
    await reopen(other.owner)
    await other.finish(other.run(R1))
    assert other.started == [(R1, None)]


@pytest.mark.behaviour("P76", "P77", "P86")
async def test_a_replacement_is_held_until_resume_and_its_record_is_exported_meanwhile() -> None:
    """Also by a later checkpoint, under the next attempt; then it continues at the same boundary, as N+2."""
    record = await a_record()
    rig = Rig()
    await restore(rig.owner, [record])
    held = rig.run(R1)
    await spin()
    assert (rig.started, rig.owner.restored_pending()) == ([], frozenset({R1}))
    (again,) = await exported(rig.owner)
    assert (again.episode, again.decode("boundary")) == (R1, {"next": "invoke"})
    held.cancel()
    await asyncio.wait({held})
    late = Rig()
    await restore(late.owner, [again])
    await reopen(late.owner)
    await late.finish(late.run(R2))
    assert late.started == [(R2, {"next": "invoke"})]


async def test_a_replacement_continues_once_and_is_not_pending_any_more() -> None:
    rig = Rig()
    await restore(rig.owner, [await a_record()])
    await reopen(rig.owner)
    running = rig.run(R1)
    await spin()
    assert (rig.started, rig.owner.restored_pending()) == ([(R1, {"next": "invoke"})], frozenset())
    await rig.finish(running)
    await rig.finish(rig.run(R1))
    assert rig.started[1] == (R1, None)


@pytest.mark.behaviour("P78")
async def test_another_attempt_than_the_restored_one_starts_as_new() -> None:
    rig = Rig()
    await restore(rig.owner, [await a_record()])
    await reopen(rig.owner)
    await rig.finish(rig.run(R2))
    assert (rig.started, rig.owner.restored_pending()) == ([(R2, None)], frozenset({R1}))


@pytest.mark.behaviour("P79")
async def test_a_replacement_with_another_task_is_refused_and_the_record_stays() -> None:
    rig = Rig()
    await restore(rig.owner, [await a_record()])
    await reopen(rig.owner)
    with pytest.raises(InvalidArgument) as caught:
        await rig.run(R1, {"prompt": "play", "setup": {"seed": 2}, "extra": 1})
    assert [each.field for each in caught.value.violations] == ["task.extra", "task.setup"]
    assert (rig.started, rig.owner.restored_pending()) == ([], frozenset({R1}))
    await rig.finish(rig.run(R1))
    assert rig.started == [(R1, {"next": "invoke"})]


@pytest.mark.behaviour("P80")
async def test_what_the_task_identity_leaves_out_may_differ() -> None:
    identity = {"task_identity": lambda task: {"prompt": task["prompt"]}}
    first = Rig(**identity)
    running = first.run(R)
    await spin()
    (record,) = await first.checkpoint()
    await first.finish(running)
    rig = Rig(**identity)
    await restore(rig.owner, [record])
    await reopen(rig.owner)
    await rig.finish(rig.run(R1, {"prompt": "play", "temperature": 2}))
    assert rig.started == [(R1, {"next": "invoke"})]


@pytest.mark.behaviour("P81")
async def test_a_run_queued_for_a_slot_at_the_close_is_held() -> None:
    rig = Rig(slots=1)
    first, queued = rig.run(R), rig.run(S)
    await spin()
    await close(rig.owner)
    rig.go.set()
    await spin()
    records = await exported(rig.owner)
    assert ([each.episode for each in records], [who for who, _ in rig.started]) == ([R], [R])
    await reopen(rig.owner)
    await asyncio.gather(first, queued)
    assert [who for who, _ in rig.started] == [R, S]


@pytest.mark.behaviour("P82")
async def test_a_refused_begin_does_not_end_the_live_episode() -> None:
    rig = Rig()
    running = rig.run(R)
    await spin()
    with pytest.raises(InvalidArgument):
        await rig.run(R)
    assert rig.owner.report(9).counts["episodes"] == 1
    (record,) = await rig.checkpoint()
    assert record.episode == R
    await rig.finish(running)


@pytest.mark.behaviour("P83")
async def test_a_protocol_without_boundaries_begins_as_a_restart() -> None:
    rig = Rig(boundaries=False)
    running = rig.run(R)
    await spin()
    await close(rig.owner)
    assert (await exported(rig.owner), rig.owner.report(9).restarts) == ([], (R,))
    assert await listed(rig.owner, EpisodeListKind.RESTART) == [R]
    await rig.finish(running)


@pytest.mark.behaviour("P84")
async def test_a_restart_header_on_any_seed_reply_makes_the_episode_a_restart() -> None:
    rig = Rig()
    modes: list[str] = []

    async def protocol(ctx: EpisodeContext) -> None:
        async with ctx.step("seed", "replay"):
            modes.append(await ctx.seed_reply({"X-Gymckpt-Verify": "replay"}))
            assert rig.owner.report(9).restart_count == 0
            modes.append(await ctx.seed_reply({"x-gymckpt-restart": "1"}))
        await rig.go.wait()

    running = asyncio.create_task(rig.owner.run(R, TASK, protocol))
    await spin()
    assert (modes, rig.owner.report(9).restarts) == (["replay", "wait"], (R,))
    await rig.finish(running)


@pytest.mark.behaviour("P85")
async def test_retiring_a_restored_episode_empties_the_pending_list() -> None:
    rig = Rig()
    await restore(rig.owner, [await a_record()])
    await retire(rig.owner, rig.port, R1)
    assert rig.owner.restored_pending() == frozenset()


async def test_a_deleted_restored_episode_starts_from_its_input() -> None:
    rig = Rig()
    await restore(rig.owner, [await a_record()])
    await rig.owner.delete_restored(R1)
    await reopen(rig.owner)
    await rig.finish(rig.run(R1))
    assert rig.started == [(R1, None)]


@pytest.mark.behaviour("P88")
async def test_a_retire_replies_after_the_episode_and_its_cleanup_ended() -> None:
    rig = Rig()
    cleaned = asyncio.Event()

    async def protocol(ctx: EpisodeContext) -> None:
        ctx.on_cleanup(cleaned.wait)
        await rig.go.wait()

    running = asyncio.create_task(rig.owner.run(R, TASK, protocol))
    await spin()
    retiring = asyncio.create_task(retire(rig.owner, rig.port, R))
    await spin()
    assert not retiring.done()
    cleaned.set()
    await retiring
    with pytest.raises(StaleAttempt):
        await running
    assert (list(rig.port.marks), rig.owner.report(9).counts["episodes"]) == ([R], 0)


@pytest.mark.behaviour("P89")
async def test_the_end_runs_when_cancels_land_in_the_cleanup() -> None:
    rig = Rig()
    go = asyncio.Event()
    cleaned: list[int] = []

    async def protocol(ctx: EpisodeContext) -> None:
        async def first() -> None:
            await go.wait()
            cleaned.append(1)

        async def last() -> None:
            cleaned.append(2)
            raise RuntimeError("cleanup failed")

        ctx.on_cleanup(first)
        ctx.on_cleanup(last)

    running = asyncio.create_task(rig.owner.run(R, TASK, protocol))
    await spin()
    for _ in range(2):
        running.cancel()
        await spin()
    assert (cleaned, running.done()) == ([2], False)
    go.set()
    await asyncio.wait({running})
    assert (cleaned, running.cancelled(), rig.owner.report(9).counts["episodes"]) == ([2, 1], True, 0)


async def test_cleanup_has_one_limit_in_all() -> None:
    rig = Rig(cleanup_limit=0.01)

    async def protocol(ctx: EpisodeContext) -> str:
        ctx.on_cleanup(asyncio.Event().wait)
        return "result"

    assert await rig.owner.run(R, TASK, protocol) == "result"
    assert rig.owner.report(9).counts["episodes"] == 0


@pytest.mark.behaviour("P44")
async def test_a_control_refusal_inside_an_episode_reaches_the_caller_as_that_refusal() -> None:
    rig = Rig()

    async def protocol(ctx: EpisodeContext) -> None:
        raise OutOfTime("from a callee")

    with pytest.raises(OutOfTime, match="from a callee"):
        await rig.owner.run(R, TASK, protocol)


async def test_a_run_past_its_limit_ends_in_a_timeout_and_parked_time_does_not_count() -> None:
    rig = Rig(episode_limit=0.02)

    async def protocol(ctx: EpisodeContext) -> None:
        await ctx.boundary({"next": "x"})
        await asyncio.Event().wait()

    await close(rig.owner)
    await reopen(rig.owner)
    with pytest.raises(TimeoutError):
        await rig.owner.run(R, TASK, protocol)
    assert rig.owner.report(9).counts["episodes"] == 0


@pytest.mark.behaviour("P57")
async def test_an_episode_that_failed_in_a_replay_step_while_closed_is_told_after_resume() -> None:
    """Ready, exported as start over from input, and one disposition: the failure waits for the opening."""
    rig = Rig()
    fail = asyncio.Event()

    async def protocol(ctx: EpisodeContext) -> None:
        await ctx.boundary({"next": "invoke"})
        async with ctx.step("invoke", "replay"):
            await fail.wait()
            raise RuntimeError("lost")

    running = asyncio.create_task(rig.owner.run(R, TASK, protocol))
    await spin()
    await close(rig.owner)
    fail.set()
    await spin()
    (record,) = await exported(rig.owner)
    assert ("boundary" in record.payloads, running.done()) == (False, False)
    await reopen(rig.owner)
    with pytest.raises(RuntimeError, match="lost"):
        await running


@pytest.mark.behaviour("P235")
async def test_a_straggler_is_retired_in_the_open_checkpoint_and_others_stay_parked() -> None:
    """Nobody waits for Resume: neither a parked episode, nor one whose failure is held."""
    rig = Rig()

    async def hangs(ctx: EpisodeContext) -> None:
        async with ctx.step("verify", "wait"):
            await asyncio.Event().wait()

    async def fails(ctx: EpisodeContext) -> None:
        async with ctx.step("invoke", "replay"):
            await rig.go.wait()
            raise RuntimeError("lost")

    straggler = asyncio.create_task(rig.owner.run(R, TASK, hangs))
    failing = asyncio.create_task(rig.owner.run(EpisodeId("f"), TASK, fails))
    other = rig.run(S)
    await spin()
    await close(rig.owner)
    rig.go.set()
    await spin()
    (blocker,) = rig.owner.report(9).blockers
    assert (blocker.reason, blocker.episode) == (BlockerReason.WAIT_STEP, R)
    await retire(rig.owner, rig.port, R)
    await retire(rig.owner, rig.port, EpisodeId("f"))
    assert ([each.episode for each in await exported(rig.owner)], other.done()) == ([S], False)
    for task in (straggler, failing):
        with pytest.raises(StaleAttempt):
            await task
    await reopen(rig.owner)
    await other


async def test_a_retire_in_the_step_before_it_swallows_nothing() -> None:
    """A protocol that hides its cancel and returns is refused all the same."""
    rig = Rig()

    async def protocol(ctx: EpisodeContext) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "hidden"
        return "never"

    running = asyncio.create_task(rig.owner.run(R, TASK, protocol))
    await spin()
    await retire(rig.owner, rig.port, R)
    with pytest.raises(StaleAttempt):
        await running
    assert not running.cancelled()


async def test_a_boundary_that_cannot_be_kept_names_its_episode() -> None:
    rig = Rig()

    async def replay(ctx: EpisodeContext) -> None:
        await ctx.boundary({"when": (1, 2)})
        async with ctx.step("x", "replay"):
            await rig.go.wait()

    running = asyncio.create_task(rig.owner.run(R, TASK, replay))
    await spin()
    await close(rig.owner)
    with pytest.raises(HookFailed) as caught:
        await exported(rig.owner)
    assert caught.value.episode == R
    await reopen(rig.owner)
    await rig.finish(running)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "gymckpt.agent"},
        {"schema_version": 2},
        {"fields": {"task_digest": "x", "unknown": 1}},
        {"fields": {"task_digest": 5}},
        {"fields": {}},
        {"payloads": {"unknown": encode(1)}},
        {"payloads": {"task_field_digests": encode({"a": 1})}},
    ],
)
async def test_a_record_that_is_not_exactly_one_is_refused(change: dict[str, Any]) -> None:
    record = await a_record()
    changed = replace(record, **change)
    rig = Rig()
    with pytest.raises(InvalidState) as caught:
        await restore(rig.owner, [changed])
    assert (caught.value.episode, rig.owner.restored_pending()) == (R, frozenset())


async def test_only_the_scope_is_exported() -> None:
    rig = Rig()
    tasks = [rig.run(R), rig.run(S)]
    await spin()
    await close(rig.owner)
    assert [each.episode for each in await exported(rig.owner, EpisodeScope.of([S]))] == [S]
    assert await exported(rig.owner, EpisodeScope.of([])) == []
    await reopen(rig.owner)
    await rig.finish(*tasks)


async def test_a_deletion_leaves_another_attempt_alone() -> None:
    rig = Rig()
    await restore(rig.owner, [await a_record()])
    await rig.owner.delete_restored(R2)
    await rig.owner.retire(R, budget())
    assert rig.owner.restored_pending() == {R1}
