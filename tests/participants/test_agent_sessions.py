"""Native agent sessions: seeding, closing, exporting, restoring, retiring."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.control.ports import HookFailed, InvalidState
from gym_ckpt_grpc.participants import SessionContext
from gym_ckpt_grpc.protocol.errors import InvalidArgument, InvalidPhase, OutOfTime, RetireIncomplete, StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.agent_rig import AgentRig
from tests.participants.fakes import R1, R2, FakePort, R, S, budget, close, exported, reopen, restore, retire, spin


@pytest.fixture
def rig() -> AgentRig:
    return AgentRig()


def blockers(rig: AgentRig) -> list[tuple[BlockerReason, str]]:
    return [(each.reason, each.place) for each in rig.owner.report(9).blockers]


@pytest.mark.behaviour("P165")
async def test_a_seed_while_closed_is_held_and_an_ordinary_session_after_resume(rig: AgentRig) -> None:
    await close(rig.owner)
    held = asyncio.create_task(rig.seed())
    await spin()
    assert (rig.states, await exported(rig.owner), rig.owner.report(9).counts["waiting"]) == ({}, [], 1)
    await reopen(rig.owner)
    assert await held == {"seeded": "k"}
    assert [each.episode for each in await rig.checkpoint()] == [R]


@pytest.mark.behaviour("P166", "P167", "P170")
async def test_seeds_in_progress_block_each_until_both_finished(rig: AgentRig) -> None:
    """A restore of their rollout is refused meanwhile, and the session is exported afterwards."""
    go = asyncio.Event()
    built: list[int] = []

    async def build() -> Any:
        built.append(1)
        await go.wait()
        rig.states["k"] = "state"
        return "reply"

    seeds = [asyncio.create_task(rig.owner.seed(R, "k", {}, build)) for _ in range(2)]
    await spin()
    await close(rig.owner)
    assert blockers(rig) == [(BlockerReason.IN_FLIGHT_REQUEST, "seed")] * 2
    with pytest.raises(InvalidPhase) as caught:
        await rig.owner.stage([], RestoreScope.plan([R]))
    assert set(caught.value.episodes) == {R}
    go.set()
    await spin()
    assert [each.episode for each in await exported(rig.owner)] == [R]
    await reopen(rig.owner)
    assert (await asyncio.gather(*seeds), built) == (["reply", "reply"], [1])


@pytest.mark.behaviour("P168", "P227")
async def test_a_seed_whose_attempt_is_retired_meanwhile_frees_what_it_built(rig: AgentRig) -> None:
    go = asyncio.Event()

    async def build() -> Any:
        await go.wait()
        rig.states["k"] = "state"

    seed = asyncio.create_task(rig.owner.seed(R, "k", {}, build))
    await spin()
    retiring = asyncio.create_task(retire(rig.owner, rig.port, R))
    await spin()
    assert not retiring.done()
    go.set()
    await retiring
    assert (rig.states, rig.hooks) == ({}, [("retire", ["k"])])
    with pytest.raises(StaleAttempt):
        await seed
    assert rig.owner.is_ready()


@pytest.mark.behaviour("P169")
async def test_the_same_seed_again_gets_the_same_reply_and_keeps_the_continuation(rig: AgentRig) -> None:
    assert await rig.seed(body={"a": 1, "b": 2}) == await rig.seed(body={"b": 2, "a": 1})
    with pytest.raises(InvalidArgument):
        await rig.seed(body={"a": 2})
    with pytest.raises(StaleAttempt):
        await rig.seed(episode=R1, body={"a": 1, "b": 2})
    running = rig.invoke()
    await spin()
    records = await rig.checkpoint()
    await rig.answer()
    await running
    other = AgentRig()
    await restore(other.owner, records)
    await reopen(other.owner)
    assert await other.seed(episode=R1, body={"a": 1, "b": 2}) == {"seeded": "k"}
    again = other.invoke(episode=R1)
    await other.answer()
    await again
    assert other.turns[0] == ("start", {"turn": 0})


@pytest.mark.behaviour("P171", "P172")
async def test_a_boundary_function_runs_only_if_exported_and_gives_the_state_as_of_its_registration(
    rig: AgentRig,
) -> None:
    """The loop has moved on by then: it works in its replay step."""
    go = asyncio.Event()
    calls: list[int] = []

    async def loop(session: SessionContext, state: Any) -> Any:
        messages = ["a"]

        def boundary(count: int = len(messages)) -> Any:
            calls.append(1)
            return messages[:count]

        await session.boundary(boundary)
        messages.append("b")
        session.begin_waiting()
        await go.wait()
        session.end_waiting()

    await rig.seed()
    running = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    await close(rig.owner)
    assert calls == []
    (record,) = await exported(rig.owner)
    assert (record.decode("boundary"), calls) == (["a"], [1])
    go.set()
    await reopen(rig.owner)
    await running


@pytest.mark.behaviour("P173", "P175")
async def test_restore_installs_sessions_under_the_next_attempt(rig: AgentRig) -> None:
    """Hooks once with all sessions; the old attempt is refused; the continuation goes to the first activation."""
    await rig.seed("k", R)
    await rig.seed("m", S)
    running = rig.invoke("k")
    await spin()
    records = await rig.checkpoint()
    assert rig.hooks == [("export", ["k", "m"])]
    await rig.answer()
    await running
    other = AgentRig()
    await restore(other.owner, records)
    assert (other.hooks, other.owner.restored_pending()) == (
        [("restore", ["k", "m"])],
        frozenset({R1, EpisodeId("s", 1)}),
    )
    await reopen(other.owner)
    assert other.states == {"k": {"of": "k"}, "m": {"of": "m"}}
    with pytest.raises(StaleAttempt):
        await other.invoke("k", R)
    for expected in ({"turn": 0}, None):
        again = other.invoke("k", R1)
        await other.answer()
        await again
        assert other.turns[0] == ("start", expected)
        other.turns.clear()
    assert other.owner.restored_pending() == {EpisodeId("s", 1)}


@pytest.mark.behaviour("P174")
async def test_a_session_missing_from_the_authors_export_is_named(rig: AgentRig) -> None:
    await rig.seed("k", R)
    await rig.seed("m", S)
    del rig.states["m"]
    await close(rig.owner)
    with pytest.raises(HookFailed) as caught:
        await exported(rig.owner)
    assert caught.value.episode == S


@pytest.mark.behaviour("P176")
async def test_closing_a_session_stops_its_activation_and_blocks_until_it_has_stopped(rig: AgentRig) -> None:
    """Also while closed; repeats succeed and get the same reply; the state is freed once."""
    go = asyncio.Event()
    freed: list[int] = []

    async def loop(session: SessionContext, state: Any) -> Any:
        try:
            await session.boundary({"turn": 0})
        finally:
            await go.wait()

    async def free() -> Any:
        freed.append(1)
        return "observed"

    await rig.seed()
    await close(rig.owner)
    running = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    assert rig.owner.is_ready()
    closes = [asyncio.create_task(rig.owner.close_session(R, "k", free)) for _ in range(2)]
    await spin()
    assert blockers(rig) == [(BlockerReason.RUNNING, "close")]
    go.set()
    assert await asyncio.gather(*closes) == ["observed", "observed"]
    with pytest.raises(StaleAttempt):
        await running
    assert (rig.owner.is_ready(), rig.owner.report(9).counts["sessions"], freed) == (True, 0, [1])
    assert await rig.owner.close_session(R, "k", free) == "observed"


@pytest.mark.behaviour("P52", "P233")
async def test_closing_what_is_already_freed_succeeds_and_other_late_calls_are_refused(rig: AgentRig) -> None:
    assert await rig.owner.close_session(R, "never seeded") is None
    await rig.seed()
    await retire(rig.owner, rig.port, R)
    await close(rig.owner)
    assert await rig.owner.close_session(R, "k") is None
    for late in (rig.seed(), rig.invoke()):
        with pytest.raises(StaleAttempt):
            await late


async def test_a_close_whose_free_fails_can_be_repeated(rig: AgentRig) -> None:
    async def fails() -> Any:
        raise RuntimeError("no")

    await rig.seed()
    with pytest.raises(RuntimeError):
        await rig.owner.close_session(R, "k", fails)
    assert (rig.owner.is_ready(), rig.owner.report(9).counts["sessions"]) == (True, 1)
    await rig.owner.close_session(R, "k")
    assert rig.owner.report(9).counts["sessions"] == 0


@pytest.mark.behaviour("P177")
async def test_close_and_retire_cancel_once_and_call_the_hook_once(rig: AgentRig) -> None:
    """A close after a cut-short retire is left to the retire; a retire during a close waits for it."""
    for close_first in (False, True):
        go = asyncio.Event()
        cancels: list[int] = []

        async def loop(session: SessionContext, state: Any, go: asyncio.Event = go, cancels: Any = cancels) -> Any:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancels.append(1)
                await go.wait()
                raise

        rig = AgentRig()
        await rig.seed()
        running = asyncio.create_task(rig.owner.invoke(R, "k", loop))
        await spin()
        closing = asyncio.create_task(rig.owner.close_session(R, "k")) if close_first else None
        await spin()
        with pytest.raises(OutOfTime):
            await retire(rig.owner, rig.port, R, seconds=0)
        await spin()
        if closing is None:
            assert await rig.owner.close_session(R, "k") is None
        assert blockers(rig) == [(BlockerReason.RETIRING, "")]
        go.set()
        await retire(rig.owner, rig.port, R)
        if closing is not None:
            await closing
        with pytest.raises(StaleAttempt):
            await running
        assert (cancels, rig.hooks, rig.owner.is_ready()) == ([1], [("retire", ["k"])], True)


@pytest.mark.behaviour("P178")
async def test_a_late_seed_of_a_closed_session_is_refused_while_its_receipt_lives(rig: AgentRig) -> None:
    await rig.seed()
    await rig.owner.close_session(R, "k")
    rig.clock.now += 299
    with pytest.raises(StaleAttempt):
        await rig.seed()
    rig.clock.now += 1
    assert await rig.seed() == {"seeded": "k"}


@pytest.mark.behaviour("P179")
async def test_a_retire_waits_for_the_activation_and_calls_the_hook_once(rig: AgentRig) -> None:
    await rig.seed()
    running = rig.invoke()
    await spin()
    await retire(rig.owner, rig.port, R)
    with pytest.raises(StaleAttempt):
        await running
    assert (rig.hooks, list(rig.port.marks), rig.states) == ([("retire", ["k"])], [R], {})
    await close(rig.owner)
    assert await exported(rig.owner) == []


@pytest.mark.behaviour("P180", "P229")
async def test_a_session_whose_retire_hook_was_cut_short_blocks_and_is_freed_by_the_retry(rig: AgentRig) -> None:
    rig.retire_gate = asyncio.Event()
    await rig.seed()
    retiring = asyncio.create_task(retire(rig.owner, rig.port, R, seconds=0.02))
    with pytest.raises(OutOfTime):
        await retiring
    assert blockers(rig) == [(BlockerReason.RETIRING, "")]
    with pytest.raises(RetireIncomplete):
        rig.owner.check_forget("r", 0)
    rig.retire_gate.set()
    await rig.owner.retire(R, budget())
    rig.owner.check_forget("r", 0)
    assert (rig.owner.is_ready(), rig.states) == (True, {})


@pytest.mark.behaviour("P181")
async def test_deleting_one_restored_session_frees_only_that_one(rig: AgentRig) -> None:
    """A request for it is held until that has ended; a failing hook leaves it pending."""
    await rig.seed("k", R)
    await rig.seed("m", S)
    records = await rig.checkpoint()
    other = AgentRig()
    await restore(other.owner, records)
    await reopen(other.owner)
    other.retire_gate = asyncio.Event()
    deleting = asyncio.create_task(other.owner.delete_restored(R1))
    await spin()
    held = asyncio.create_task(other.seed("k", R1))
    await spin()
    assert (other.owner.report(9).counts["waiting"], held.done()) == (1, False)
    other.retire_gate.set()
    await deleting
    assert await held == {"seeded": "k"}
    assert other.owner.restored_pending() == {EpisodeId("s", 1)}
    assert other.states == {"k": {"of": "k"}, "m": {"of": "m"}}


@pytest.mark.behaviour("P182")
async def test_unclaimed_restored_sessions_are_exported_again_and_continue_as_the_one_after(rig: AgentRig) -> None:
    await rig.seed()
    running = rig.invoke()
    await spin()
    records = await rig.checkpoint()
    await rig.answer()
    await running
    second = AgentRig()
    await restore(second.owner, records)
    again = await exported(second.owner)
    assert [each.episode for each in again] == [R1]
    third = AgentRig()
    await restore(third.owner, again)
    await reopen(third.owner)
    continued = third.invoke(episode=R2)
    await third.answer()
    await continued
    assert third.turns[0] == ("start", {"turn": 0})


async def test_a_failing_install_leaves_nothing_behind(rig: AgentRig) -> None:
    """The author's hook refuses, or a discard follows: no session, and what cannot be freed stays a blocker."""
    await rig.seed()
    records = await rig.checkpoint()
    scope = RestoreScope.plan([R])
    rig.states["k"] = "bad"
    bad = await rig.checkpoint()
    other = AgentRig()
    with pytest.raises(InvalidState):
        await other.owner.stage(bad, scope)
    staged = await other.owner.stage(records, scope)
    assert other.owner.report(9).counts["sessions"] == 0
    await other.owner.discard(staged)
    assert (other.states, other.owner.report(9).counts["sessions"], other.owner.is_ready()) == ({}, 0, True)
    staged = await other.owner.stage(records, scope)

    async def fails(key: str) -> None:
        raise RuntimeError("stuck")

    other.retire_session = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await other.owner.discard(staged)
    assert blockers(other) == [(BlockerReason.RETIRING, "")]
    del other.retire_session
    await retire(other.owner, FakePort(), R1)
    assert (other.states, other.owner.is_ready()) == ({}, True)


async def test_two_records_of_one_session_are_refused(rig: AgentRig) -> None:
    await rig.seed()
    (record,) = await rig.checkpoint()
    other = AgentRig()
    with pytest.raises(InvalidState):
        await other.owner.stage([record, record], RestoreScope.plan([R]))
    with pytest.raises(InvalidState):
        await other.owner.stage([record], RestoreScope.plan([S]))
    assert other.hooks == []
