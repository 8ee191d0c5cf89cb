"""Legacy runs: their steps, the loop inside them, and what may call them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.integrations import CheckpointMiddleware, episode_of
from gym_ckpt_grpc.participants import AgentSettings, RunContext, SessionContext, run_key
from gym_ckpt_grpc.participants.steps import EpisodeDeadline
from gym_ckpt_grpc.protocol.errors import (
    InvalidArgument,
    StateNotFound,
)
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import (
    R1,
    App,
    R,
    call,
    close,
    exported,
    listed,
    reopen,
    restore,
    spin,
)
from tests.participants.legacy_rig import LegacyRig


@pytest.fixture
async def rig() -> LegacyRig:
    return LegacyRig()


def blockers(rig: LegacyRig) -> list[tuple[BlockerReason, str]]:
    return [(each.reason, each.place) for each in rig.owner.report(9).blockers]


def steps(record: Record) -> Any:
    return record.decode("protocol_boundary")


# ---- steps ---------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P191")
@pytest.mark.parametrize("step", ["seed", "loop", "verify"])
async def test_a_run_does_not_block_in_a_replay_step_and_is_exported_before_it(step: str) -> None:
    rig = LegacyRig(verify="replay")
    go = rig.hold(step)
    running = rig.run()
    await spin()
    if step == "verify":
        await rig.answer()
    await close(rig.owner)
    assert (blockers(rig), rig.log[-1]) == ([], ("r", step))
    (record,) = await exported(rig.owner)
    assert (steps(record)["next"], record.fields["session_key"]) == (step, "run:r")
    await reopen(rig.owner)
    go.set()
    await spin()
    if step != "verify":
        await rig.answer()
    assert await running == ["r", {"answer": "ok"}]
    assert (rig.log, rig.owner.report(9).counts["sessions"]) == (
        [("r", "seed"), ("r", "loop"), ("r", "verify")],
        0,
    )


@pytest.mark.behaviour("P191")
async def test_a_run_blocks_between_steps_and_in_wait_steps(rig: LegacyRig) -> None:
    """And is exported at the boundary after either."""
    between, wait = rig.hold("before verify"), rig.hold("verify")
    running = rig.run()
    await spin()
    await rig.answer()
    await close(rig.owner)
    assert blockers(rig) == [(BlockerReason.RUNNING, "")]
    between.set()
    await spin()
    assert blockers(rig) == [(BlockerReason.WAIT_STEP, "verify")]
    wait.set()
    await spin()
    (record,) = await exported(rig.owner)
    assert steps(record) == {"next": "return", "result": ["r", {"answer": "ok"}]}
    assert not running.done()
    await reopen(rig.owner)
    assert await running == ["r", {"answer": "ok"}]


@pytest.mark.behaviour("P191")
async def test_the_loop_of_a_run_blocks_between_its_own_boundaries(rig: LegacyRig) -> None:
    """It is exported with both: the step of the run, and where the loop is."""
    go = asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> Any:
        await session.boundary({"turn": 0})
        await go.wait()
        await session.boundary({"turn": 1})
        return "said"

    rig.loop = loop  # type: ignore[method-assign]
    running = rig.run()
    await spin()
    await close(rig.owner)
    assert [(each.reason, each.episode) for each in rig.owner.report(9).blockers] == [(BlockerReason.RUNNING, R)]
    go.set()
    await spin()
    (record,) = await exported(rig.owner)
    assert (steps(record), record.decode("boundary")) == ({"next": "loop"}, {"turn": 1})
    await reopen(rig.owner)
    assert await running == ["r", "said"]


async def test_a_loop_that_ended_while_its_run_is_not_told_yet_is_never_run_again(rig: LegacyRig) -> None:
    """The reply is in the record: the equal self-call of the replacement is answered from it."""
    told = asyncio.Event()
    ask = rig.self_call

    async def late(ctx: RunContext) -> Any:
        reply = await ask(ctx)
        await told.wait()
        return reply

    rig.self_call = late  # type: ignore[method-assign]
    running = rig.run()
    await spin()
    await rig.answer()
    (record,) = await rig.checkpoint()
    assert (steps(record), record.fields["activations"]) == ({"next": "loop"}, 1)
    told.set()
    await running
    other = LegacyRig()
    await restore(other.owner, [record])
    await reopen(other.owner)
    assert await other.run(R1) == ["r-a1", {"answer": "ok"}]
    assert (other.requests, other.turns) == ([], [])


@pytest.mark.behaviour("P57", "P59")
async def test_a_step_that_fails_while_closed_makes_the_run_start_over_from_its_input(rig: LegacyRig) -> None:
    """Without state: neither hook of the author is asked for a run that has none to go on from."""

    async def fails(ctx: RunContext) -> Any:
        await asyncio.sleep(0)
        raise RuntimeError("no")

    go = rig.hold("loop")
    rig.self_call = fails  # type: ignore[method-assign]
    running = rig.run()
    await spin()
    await close(rig.owner)
    go.set()
    await spin()
    (record,) = await exported(rig.owner)
    assert (set(record.payloads), rig.hooks, running.done()) == ({"session"}, [], False)
    await reopen(rig.owner)
    with pytest.raises(RuntimeError):
        await running
    other = LegacyRig()
    await restore(other.owner, [record])
    await reopen(other.owner)
    again = other.run(R1)
    await spin()
    assert (other.log[0], other.hooks) == (("r-a1", "seed"), [])
    await other.answer()
    await again


# ---- the data plane ------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P192")
async def test_a_run_that_comes_to_its_owner_only_while_closed_is_held_there(rig: LegacyRig) -> None:
    """The gate had admitted its request, which waited for a place of the author's own until the close."""
    await close(rig.owner)
    running = rig.run()
    await spin()
    assert (rig.log, rig.contexts, rig.owner.report(9).counts["waiting"]) == ([], {}, 1)
    assert await exported(rig.owner) == []
    await reopen(rig.owner)
    await rig.answer()
    assert await running == ["r", {"answer": "ok"}]


@pytest.mark.behaviour("P192")
async def test_a_new_run_while_closed_is_held_and_the_self_call_of_a_running_one_passes(rig: LegacyRig) -> None:
    """Over the middleware; the self-call parks at its first boundary."""
    at_self_call = asyncio.Event()

    async def run(scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        return 200, {}, await rig.owner.run(episode_of(scope), {}, rig.protocol)

    async def responses(scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        episode = episode_of(scope)
        return 200, {}, await rig.owner.invoke(episode, run_key(episode), rig.loop)

    served = CheckpointMiddleware(App({"/run": run, "/v1/responses": responses}), rig.owner.gate())

    async def self_call(ctx: RunContext) -> Any:
        await at_self_call.wait()
        answer = await call(served, f"/rollout/{ctx.episode}/v1/responses", headers=ctx.self_call_headers()).end()
        return answer.json()

    rig.self_call = self_call  # type: ignore[method-assign]
    first = call(served, "/rollout/r/run")
    await spin()
    await close(rig.owner)
    assert rig.owner.is_ready()
    at_self_call.set()
    second = call(served, "/rollout/s/run")
    await spin()
    (record,) = await exported(rig.owner)
    assert (record.episode, steps(record), record.decode("boundary")) == (R, {"next": "loop"}, {"turn": 0})
    assert (rig.owner.report(9).counts["waiting"], rig.log[-1]) == (1, ("r", "loop"))
    await reopen(rig.owner)
    await rig.answer()
    await rig.answer()
    assert (await first.end()).json() == ["r", {"answer": "ok"}]
    assert (await second.end()).json() == ["s", {"answer": "ok"}]


@pytest.mark.behaviour("P193")
async def test_two_attempts_of_one_rollout_run_side_by_side_without_sharing_state(rig: LegacyRig) -> None:
    first, second = rig.run(R), rig.run(R1)
    await spin()
    assert rig.states == {"run:r": {"of": "run:r"}, "run:r-a1": {"of": "run:r-a1"}}
    records = {each.episode: each for each in await rig.checkpoint()}
    assert [records[each].decode("session") for each in (R, R1)] == [{"of": "run:r"}, {"of": "run:r-a1"}]
    await rig.answer("zero")
    assert await first == ["r", {"answer": "zero"}]
    assert not second.done()
    await rig.answer("one")
    assert await second == ["r-a1", {"answer": "one"}]


async def test_a_second_run_of_a_live_key_is_refused_and_disturbs_nothing(rig: LegacyRig) -> None:
    running = rig.run()
    await spin()
    with pytest.raises(InvalidArgument, match="running already"):
        await rig.run()
    await rig.answer()
    assert await running == ["r", {"answer": "ok"}]


async def test_keys_of_runs_are_no_keys_of_sessions(rig: LegacyRig) -> None:
    """They cannot be seeded or closed, and a self-call needs its run."""
    with pytest.raises(InvalidArgument):
        await rig.seed("run:r")
    with pytest.raises(StateNotFound):
        await rig.invoke("run:r")
    running = rig.run()
    await spin()
    assert await rig.owner.close_session(R, "run:r") is None
    await rig.answer()
    assert await running == ["r", {"answer": "ok"}]


async def test_the_self_call_names_its_activation_and_the_worker_that_holds_the_run() -> None:
    for routing_id, owner in (("w1", {"x-gymckpt-owner": "w1"}), ("", {})):
        rig = LegacyRig(settings=AgentSettings(routing_id=routing_id))
        running = rig.run(cookie_session_id="cookie")
        await spin()
        assert rig.contexts[R].self_call_headers(2) == {"x-gymckpt-activation": "2", **owner}
        await rig.answer()
        await running


@pytest.mark.behaviour("P62")
async def test_a_run_past_its_limit_ends_but_its_time_stands_still_in_a_checkpoint() -> None:
    rig = LegacyRig(settings=AgentSettings(run_limit=0.01))
    rig.hold("loop")
    with pytest.raises(TimeoutError):
        await rig.run()
    assert rig.owner.report(9).counts["sessions"] == 0
    other = LegacyRig(settings=AgentSettings(run_limit=60))
    go = other.hold("loop")
    running = other.run()
    await spin()
    (live,) = other.owner._steps.of_rollout("r")
    assert isinstance(live.deadline, EpisodeDeadline)
    for closed in (True, False):
        await (close(other.owner) if closed else reopen(other.owner))
        assert (live.deadline._scope.when() is None) is closed
    go.set()
    await other.answer()
    await running


async def test_a_run_whose_caller_leaves_takes_its_activation_with_it(rig: LegacyRig) -> None:
    """Although the activation, having an index, outlives the self-call."""
    go = asyncio.Event()
    events: list[str] = []

    async def loop(session: SessionContext, state: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("stopping")
            await go.wait()
            events.append("stopped")

    async def protocol(ctx: RunContext) -> Any:
        async def clean() -> None:
            events.append("clean")

        ctx.on_cleanup(clean)
        await rig.owner.invoke(R, run_key(R), loop, index="1")

    running = asyncio.create_task(rig.owner.run(R, {}, protocol))
    await spin()
    running.cancel()
    await spin()
    assert (rig.owner.is_ready(), rig.owner.report(9).counts["sessions"]) == (False, 1)
    go.set()
    await asyncio.wait({running})
    assert running.cancelled()
    assert events == ["stopping", "stopped", "clean"]
    assert (rig.owner.is_ready(), rig.owner.report(9).counts["sessions"]) == (True, 0)


# ---- restarts ------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P84")
@pytest.mark.parametrize("late", [False, True])
async def test_a_run_marked_as_a_restart_neither_blocks_nor_parks_nor_is_exported(late: bool, rig: LegacyRig) -> None:
    """Its loop included, whether that begins after the mark or before."""
    go = asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> Any:
        await session.boundary({"turn": 0})
        await go.wait()
        await session.boundary({"turn": 1})
        return "said"

    async def protocol(ctx: RunContext) -> Any:
        await ctx.boundary({"next": "loop"})
        if not late:
            await ctx.seed_reply({"x-gymckpt-restart": "1"})
        inner = asyncio.create_task(rig.owner.invoke(R, run_key(R), loop))
        await spin()
        if late:
            await ctx.mark_restart()
        return await inner

    running = asyncio.create_task(rig.owner.run(R, {}, protocol))
    await spin(20)
    await close(rig.owner)
    assert (blockers(rig), await exported(rig.owner)) == ([], [])
    assert await listed(rig.owner, EpisodeListKind.RESTART) == [R]
    go.set()
    assert await running == "said"
    assert await listed(rig.owner, EpisodeListKind.RESTART) == []


@pytest.mark.behaviour("P66")
async def test_a_mark_set_while_closed_reaches_the_loop_after_the_checkpoint(rig: LegacyRig) -> None:
    go, marked = asyncio.Event(), asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> Any:
        await session.boundary({"turn": 0})
        await go.wait()
        await session.boundary({"turn": 1})
        return "said"

    async def protocol(ctx: RunContext) -> Any:
        await marked.wait()
        await ctx.mark_restart()
        return await rig.owner.invoke(R, run_key(R), loop)

    running = asyncio.create_task(rig.owner.run(R, {}, protocol))
    await spin()
    await close(rig.owner)
    marked.set()
    await spin()
    assert await listed(rig.owner, EpisodeListKind.RESTART) == []
    await reopen(rig.owner)
    await close(rig.owner, 2)
    assert (blockers(rig), await listed(rig.owner, EpisodeListKind.RESTART)) == ([], [R])
    go.set()
    assert await running == "said"
