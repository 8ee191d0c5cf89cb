"""Legacy runs: restoring, claiming, retiring."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.control.ports import HookFailed, InvalidState
from gym_ckpt_grpc.participants import RunContext, SessionContext, run_key
from gym_ckpt_grpc.participants.records import AgentRecord
from gym_ckpt_grpc.protocol.errors import (
    InvalidArgument,
    InvalidPhase,
    OutOfTime,
    RetireIncomplete,
    StaleAttempt,
)
from gym_ckpt_grpc.protocol.ids import EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.testing import serve
from gymckpt.v1 import participant_pb2 as pb
from tests.participants.fakes import (
    R1,
    R2,
    R,
    S,
    close,
    exported,
    listed,
    reopen,
    restore,
    retire,
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


# ---- restoring and claiming ----------------------------------------------------------------------------------


@pytest.mark.behaviour("P182", "P237")
async def test_an_unclaimed_restored_run_is_exported_again_and_continues_as_the_one_after(rig: LegacyRig) -> None:
    """With the boundary of its loop and the step of its protocol, under the key of each attempt."""
    running = rig.run()
    await spin()
    (record,) = await rig.checkpoint()
    await rig.answer()
    await running
    second = LegacyRig()
    await restore(second.owner, [record])
    assert second.owner.restored_pending() == {R1}
    assert await listed(second.owner, EpisodeListKind.RESTORED_PENDING) == [R1]
    (again,) = await exported(second.owner)
    assert (again.episode, again.fields["session_key"], second.hooks) == (R1, "run:r-a1", [])
    assert await exported(second.owner, EpisodeScope.of([R])) == []
    third = LegacyRig()
    await restore(third.owner, [again])
    held = third.run(R2)
    await spin()
    assert (third.log, set(third.owner.restored_pending())) == ([], {R2})
    await reopen(third.owner)
    await third.answer()
    assert await held == ["r-a2", {"answer": "ok"}]
    assert third.hooks == [("restore", ["run:r-a2"])]
    assert (third.log, third.turns[0]) == ([("r-a2", "loop"), ("r-a2", "verify")], ("start", {"turn": 0}))
    assert third.states == {"run:r-a2": {"of": "run:r"}}


async def test_another_attempt_than_the_restored_one_starts_as_a_new_run(rig: LegacyRig) -> None:
    record = await rig.record_at("loop")
    other = LegacyRig()
    await restore(other.owner, [record])
    await reopen(other.owner)
    running = other.run(R2)
    await spin()
    assert (other.log[0], set(other.owner.restored_pending())) == (("r-a2", "seed"), {R1})
    await other.answer()
    await running


@pytest.mark.behaviour("P194")
async def test_a_run_claimed_at_verify_is_not_pending_and_survives_a_commit_of_nothing(tmp_path: Path) -> None:
    first = LegacyRig(verify="replay")
    first.hold("verify")
    first.owner.admission._port = None
    async with serve(first.owner, roots=[tmp_path]) as p:
        dead = first.run()
        await spin()
        await first.answer()
        assert (await p.client.prepare("source")).phase == pb.PHASE_PREPARED
        await p.client.commit("source", [R])
        await p.client.resume("source")
        dead.cancel()
    rig = LegacyRig(verify="replay")
    go = rig.hold("verify")
    rig.owner.admission._port = None
    async with serve(rig.owner, roots=[tmp_path]) as p:
        await p.client.restore("restore", [R], source="source")
        await p.client.resume("restore")
        assert await p.client.listed(EpisodeListKind.RESTORED_PENDING) == [R1]
        running = rig.run(R1)
        await spin()
        assert await p.client.listed(EpisodeListKind.RESTORED_PENDING) == []
        assert (await p.client.prepare("c")).phase == pb.PHASE_PREPARED
        assert (await p.client.commit("c", [])).record_count == 0
        await p.client.resume("c")
        assert rig.owner.report(9).counts["sessions"] == 1
        go.set()
        assert await running == ["r-a1", {"answer": "ok"}]
    assert (rig.log, rig.requests, rig.hooks) == ([("r-a1", "verify")], [], [("restore", ["run:r-a1"])])


@pytest.mark.behaviour("P195")
@pytest.mark.parametrize("how", ["fails", "cancelled"])
async def test_a_run_whose_restore_hook_fails_is_unregistered_and_claimable_again(how: str, rig: LegacyRig) -> None:
    """What the hook may have installed is freed."""
    record = await rig.record_at("loop")
    other = LegacyRig()
    other.restore_gate = asyncio.Event()
    other.restore_error = RuntimeError("no disk")
    await restore(other.owner, [record])
    await reopen(other.owner)
    claim = other.run(R1)
    await spin()
    assert other.owner.restored_pending() == frozenset()
    with pytest.raises(InvalidArgument, match="running already"):
        await other.run(R1)
    if how == "cancelled":
        claim.cancel()
    other.restore_gate.set()
    with pytest.raises((RuntimeError, asyncio.CancelledError)):
        await claim
    assert other.hooks == [("restore", ["run:r-a1"]), ("retire", ["run:r-a1"])]
    assert (set(other.owner.restored_pending()), other.owner.report(9).counts["sessions"]) == ({R1}, 0)
    await close(other.owner, 2)
    (again,) = await exported(other.owner)
    assert (again.episode, steps(again)) == (R1, {"next": "loop"})
    await reopen(other.owner)
    other.restore_error = None
    running = other.run(R1)
    await spin()
    await other.answer()
    assert await running == ["r-a1", {"answer": "ok"}]
    assert [step for _, step in other.log] == ["loop", "verify"]


@pytest.mark.behaviour("P196")
async def test_a_run_closed_upon_during_its_restore_hook_is_exported(rig: LegacyRig) -> None:
    """As what it was restored from; once installed it parks at its boundary, and is exported from its author."""
    record = await rig.record_at("loop")
    other = LegacyRig()
    other.restore_gate = asyncio.Event()
    await restore(other.owner, [record])
    await reopen(other.owner)
    running = other.run(R1)
    await spin()
    await close(other.owner, 2)
    (first,) = await exported(other.owner)
    assert (first.episode, first.decode("session"), steps(first)) == (R1, {"of": "run:r"}, {"next": "loop"})
    assert other.hooks == [("restore", ["run:r-a1"])]
    other.restore_gate.set()
    await spin()
    (second,) = await exported(other.owner)
    assert (second.episode, second.decode("session"), steps(second)) == (R1, {"of": "run:r"}, {"next": "loop"})
    assert (other.hooks[1], other.contexts) == (("export", ["run:r-a1"]), {})
    await reopen(other.owner)
    await other.answer()
    assert await running == ["r-a1", {"answer": "ok"}]


async def test_what_a_run_was_restored_with_comes_back(rig: LegacyRig) -> None:
    """The id of the author's cookie, to its hook as well; and a kept reply of the policy."""
    running = rig.run(cookie_session_id="the first")
    await spin()
    await close(rig.owner)
    await rig.answer("kept")
    (record,) = await exported(rig.owner)
    await reopen(rig.owner)
    await running
    other = LegacyRig()
    seen: list[Any] = []
    hook = other.restore_sessions

    async def sees(sessions: Any) -> None:
        seen.extend((each.key, each.episode, each.cookie_session_id) for each in sessions)
        await hook(sessions)

    other.restore_sessions = sees  # type: ignore[method-assign]
    await restore(other.owner, [record])
    await reopen(other.owner)
    assert await other.run(R1, cookie_session_id="the second") == ["r-a1", {"answer": "kept"}]
    assert (seen, other.requests) == ([("run:r-a1", R1, "the first")], [])
    assert other.contexts[R1].cookie_session_id == "the first"


async def test_records_that_are_no_runs_of_their_episode_are_refused(rig: LegacyRig) -> None:
    record = await rig.record_at("loop")
    stranger = AgentRecord(R, "run:other", {}, protocol_boundary={"next": "loop"}).to_record()
    stray = AgentRecord(R, "key", {}, protocol_boundary={"next": "loop"}).to_record()
    for bad in ([record, record], [stranger], [stray]):
        other = LegacyRig()
        with pytest.raises(InvalidState):
            await other.owner.stage(bad, RestoreScope.plan([R]))
        assert (other.hooks, other.owner.restored_pending()) == ([], frozenset())


async def test_a_restore_is_refused_while_a_run_of_its_rollout_is_here(rig: LegacyRig) -> None:
    """Live, or unclaimed."""
    record = await rig.record_at("loop")
    with pytest.raises(InvalidPhase) as caught:
        await rig.owner.stage([record], RestoreScope.plan([R]))
    assert caught.value.episodes == (R,)
    other = LegacyRig()
    await restore(other.owner, [record])
    with pytest.raises(InvalidPhase) as caught:
        await other.owner.stage([record], RestoreScope.plan([R]))
    assert caught.value.episodes == (R1,)


async def test_a_discarded_or_deleted_run_leaves_nothing_and_its_attempt_starts_from_its_input(rig: LegacyRig) -> None:
    record = await rig.record_at("loop")
    other = LegacyRig()
    await close(other.owner)
    await other.owner.discard(await other.owner.stage([record], RestoreScope.plan([R])))
    assert await exported(other.owner) == []
    await restore(other.owner, [record])
    await other.owner.delete_restored(R2)
    assert other.owner.restored_pending() == {R1}
    await other.owner.delete_restored(R1)
    assert other.owner.restored_pending() == frozenset()
    await reopen(other.owner)
    running = other.run(R1)
    await spin()
    assert (other.log[0], other.hooks) == (("r-a1", "seed"), [])
    await other.answer()
    await running


async def test_a_run_missing_from_the_authors_export_is_named(rig: LegacyRig) -> None:
    running = rig.run()
    await spin()
    rig.states.clear()
    await close(rig.owner)
    with pytest.raises(HookFailed) as caught:
        await exported(rig.owner)
    assert caught.value.episode == R
    await reopen(rig.owner)
    await rig.answer()
    await running


# ---- retiring ------------------------------------------------------------------------------------------------


async def test_a_retire_stops_the_run_and_its_loop_once_waits_for_both_and_then_frees(rig: LegacyRig) -> None:
    go = asyncio.Event()
    events: list[str] = []

    async def loop(session: SessionContext, state: Any) -> Any:
        try:
            await session.boundary({"turn": 0})
            await asyncio.Event().wait()
        finally:
            events.append("loop")
            await go.wait()

    async def protocol(ctx: RunContext) -> Any:
        async def clean() -> None:
            events.append("clean")

        ctx.on_cleanup(clean)
        await rig.owner.invoke(R, run_key(R), loop, index="1")

    running = asyncio.create_task(rig.owner.run(R, {}, protocol))
    await spin()
    with pytest.raises(OutOfTime):
        await retire(rig.owner, rig.port, R, 0.02)
    await close(rig.owner)
    assert {reason for reason, _ in blockers(rig)} == {BlockerReason.RETIRING}
    assert not rig.owner.is_ready()
    with pytest.raises(RetireIncomplete):
        rig.owner.check_forget("r", 0)
    with pytest.raises(StaleAttempt):
        await rig.run()
    go.set()
    await retire(rig.owner, rig.port, R)
    with pytest.raises(StaleAttempt):
        await running
    assert (events, rig.hooks) == (["loop", "clean"], [("retire", ["run:r"])])
    assert (rig.owner.is_ready(), rig.owner.report(9).counts["sessions"]) == (True, 0)
    rig.owner.check_forget("r", 0)


@pytest.mark.behaviour("P26")
@pytest.mark.parametrize("closed", [False, True])
async def test_a_retire_during_the_restore_hook_waits_for_it_and_leaves_nothing(closed: bool, rig: LegacyRig) -> None:
    """Its protocol never begins."""
    record = await rig.record_at("loop")
    other = LegacyRig()
    other.restore_gate = asyncio.Event()
    await restore(other.owner, [record])
    await reopen(other.owner)
    claim = other.run(R1)
    await spin()
    retiring = asyncio.create_task(retire(other.owner, other.port, R1))
    await spin()
    if closed:
        await close(other.owner, 2)
    assert (retiring.done(), blockers(other)) == (False, [(BlockerReason.RETIRING, "")])
    other.restore_gate.set()
    await retiring
    with pytest.raises(StaleAttempt):
        await claim
    assert (other.states, other.hooks[1:], other.contexts) == ({}, [("retire", ["run:r-a1"])], {})
    assert (other.owner.is_ready(), other.owner.restored_pending()) == (True, frozenset())
    assert await exported(other.owner) == []


async def test_a_retire_drops_an_unclaimed_run_and_a_held_one_is_refused(rig: LegacyRig) -> None:
    record = await rig.record_at("loop")
    other = LegacyRig()
    await restore(other.owner, [record])
    held, stays = other.run(R1), other.run(S)
    await spin()
    await retire(other.owner, other.port, R1)
    with pytest.raises(StaleAttempt):
        await held
    assert (other.owner.restored_pending(), other.hooks, stays.done()) == (frozenset(), [], False)
    await reopen(other.owner)
    await other.answer()
    await stays
