"""What comes while an export, a retire, a close or a cleanup is under way, and must change nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gym_ckpt_grpc.control.ports import HookFailed
from gym_ckpt_grpc.participants import EpisodeContext, RunContext, SessionContext, StepMode, VerifyMode, run_key
from gym_ckpt_grpc.participants.agent_sessions import CloseReceipts
from gym_ckpt_grpc.participants.records import AgentRecord, EnvironmentRecord
from gym_ckpt_grpc.participants.resource_sessions import RefusedSessions
from gym_ckpt_grpc.protocol.errors import InvalidArgument, OutOfTime, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record
from tests.participants.agent_rig import AgentRig
from tests.participants.fakes import R1, FakeClock, R, close, exported, reopen, restore, retire, spin
from tests.participants.legacy_rig import LegacyRig
from tests.participants.resources_rig import ResourcesRig
from tests.participants.test_environment import Rig as EnvironmentRig


class SlowExport(AgentRig):
    """An author whose export takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.exporting = asyncio.Event()

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        states = await super().export_sessions(keys)
        await self.exporting.wait()
        return states


async def _records(rig: SlowExport, during: Any) -> list[Record]:
    """What a checkpoint exports if `during` happens while its author gives the states."""
    await close(rig.owner)
    await spin()
    taking = asyncio.create_task(exported(rig.owner))
    await spin()
    during()
    await spin()
    rig.exporting.set()
    return await taking


@pytest.mark.behaviour("P11")
async def test_an_invocation_during_the_export_does_not_change_what_is_exported() -> None:
    rig = SlowExport()
    await rig.seed()
    started: list[asyncio.Task[Any]] = []
    [record] = await _records(rig, lambda: started.append(rig.invoke(index="1")))
    taken = AgentRecord.from_record(record)
    assert (taken.boundary, taken.activations) == (None, 0)
    await reopen(rig.owner)
    await rig.answer()
    assert await started[0] == {"answer": "ok"}


@pytest.mark.behaviour("P11")
async def test_an_activation_that_ends_during_the_export_is_exported_at_its_boundary() -> None:
    rig = SlowExport()
    await rig.seed()
    waiting = rig.invoke()
    await spin()
    [record] = await _records(rig, waiting.cancel)
    assert AgentRecord.from_record(record).boundary == {"turn": 0}


@pytest.mark.behaviour("P177")
@pytest.mark.parametrize("first", ["retire", "caller"])
async def test_a_caller_that_leaves_does_not_cancel_a_stopping_activation_again(first: str) -> None:
    rig = AgentRig()
    await rig.seed()
    cleaned, go = asyncio.Event(), asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await go.wait()
            cleaned.set()

    caller = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    if first == "caller":
        caller.cancel()
        await spin()
    retiring = asyncio.create_task(retire(rig.owner, rig.port, R))
    await spin()
    if first == "retire":
        caller.cancel()
        await spin()
    go.set()
    await retiring
    assert cleaned.is_set()
    await asyncio.wait({caller})


@pytest.mark.behaviour("P186")
@pytest.mark.parametrize("where", ["policy", "reply", "boundary"])
async def test_an_activation_cancelled_where_it_stood_still_blocks_until_its_cleanup_ended(where: str) -> None:
    """Its cleanup may destroy what the boundary names."""
    rig = AgentRig()
    await rig.seed()
    go, arrive = asyncio.Event(), asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> None:
        try:
            if where == "boundary":
                await arrive.wait()
            await session.boundary({"turn": 0})
            await rig.policy.call(session, "/v1/responses", {})
        finally:
            await go.wait()

    caller = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    await close(rig.owner)
    arrive.set()
    if where == "reply":
        await rig.answer()
    await spin()
    assert rig.owner.is_ready()
    caller.cancel()
    await spin()
    assert [each.reason for each in rig.owner.report(9).blockers] == [BlockerReason.RUNNING]
    go.set()
    await asyncio.wait({caller})
    assert rig.owner.is_ready()


@pytest.mark.behaviour("P222")
async def test_a_session_that_ends_after_the_close_is_no_restart() -> None:
    """Its verify had freed it, and had not answered yet."""
    rig = ResourcesRig()
    rig.held_sessions = lambda: set(rig.counters)  # type: ignore[attr-defined]
    await rig.seed()
    rig.gates["/verify"] = asyncio.Event()
    verify = rig.call("/verify")
    await spin()
    del rig.counters["k"]
    await close(rig.owner)
    rig.gates["/verify"].set()
    await verify.end()
    assert rig.owner.report(9).restarts == ()


@pytest.mark.behaviour("P27")
async def test_a_session_whose_end_waits_for_resume_stays_tracked_while_it_is_retired() -> None:
    rig = ResourcesRig(verify=VerifyMode.REPLAY)
    await rig.seed()
    await close(rig.owner)
    await rig.call("/verify").end()
    rig.retire_gate = asyncio.Event()
    with pytest.raises(OutOfTime):
        await retire(rig.owner, rig.port, R, seconds=0)
    await reopen(rig.owner)
    assert (rig.sessions(), rig.owner.is_ready()) == (1, False)
    rig.retire_gate.set()
    await retire(rig.owner, rig.port, R)
    assert (rig.sessions(), rig.owner.is_ready(), rig.counters) == (0, True, {})


@pytest.mark.behaviour("P227")
async def test_a_retire_does_not_free_the_session_that_a_later_attempt_began_under_the_same_id() -> None:
    rig = ResourcesRig()
    await rig.seed()
    rig.gates["/seed_session"] = asyncio.Event()
    seed = rig.call("/seed_session", "k", R1)
    await spin()
    retiring = asyncio.create_task(retire(rig.owner, rig.port, R))
    await spin()
    rig.gates["/seed_session"].set()
    assert (await seed.end()).status == 200
    await retiring
    assert (rig.counters, rig.sessions(), rig.owner.is_ready()) == ({"k": 0}, 1, True)


@pytest.mark.behaviour("P57")
async def test_what_fails_after_a_replay_step_that_ended_while_closed_starts_over() -> None:
    """Its cleanup runs meanwhile, and may destroy what the boundary before the step names."""
    rig = EnvironmentRig()
    cleaned = asyncio.Event()

    async def clean() -> None:
        cleaned.set()

    async def protocol(ctx: EpisodeContext) -> None:
        ctx.on_cleanup(clean)
        await ctx.boundary({"next": "invoke"})
        async with ctx.step("invoke", StepMode.REPLAY):
            await rig.go.wait()
        raise KeyError("messages")

    run = asyncio.create_task(rig.owner.run(R, {}, protocol))
    await spin()
    await close(rig.owner)
    rig.go.set()
    await cleaned.wait()
    await spin()
    assert [EnvironmentRecord.from_record(each).boundary for each in await exported(rig.owner)] == [None]
    await reopen(rig.owner)
    with pytest.raises(KeyError):
        await run


@pytest.mark.behaviour("P190")
async def test_an_index_is_refused_as_busy_beside_an_activation_without_one() -> None:
    rig = AgentRig()
    await rig.seed()
    running = rig.invoke()
    await spin()
    with pytest.raises(InvalidArgument, match="busy"):
        await rig.invoke(index="1")
    await rig.answer()
    assert await running == {"answer": "ok"}


@pytest.mark.behaviour("P192")
async def test_a_self_call_that_comes_when_its_run_is_over_starts_nothing() -> None:
    """It would run on without a run, and nobody would hear its reply."""
    rig = LegacyRig()
    go = asyncio.Event()

    async def protocol(ctx: RunContext) -> str:
        ctx.on_cleanup(go.wait)
        return "result"

    run = asyncio.create_task(rig.owner.run(R, {}, protocol))
    await spin()
    with pytest.raises(StateNotFound):
        await asyncio.wait_for(rig.invoke(run_key(R), index="1"), 5)
    go.set()
    assert await run == "result"
    assert (rig.turns, rig.owner.report(9).counts["sessions"]) == ([], 0)


class Counted(str):
    """A rollout id that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.behaviour("C65")
@pytest.mark.parametrize("kind", [RefusedSessions, CloseReceipts])
def test_to_forget_one_of_many_rollouts_looks_at_no_other(kind: Any) -> None:
    many = 100
    kept = RefusedSessions() if kind is RefusedSessions else CloseReceipts(300, FakeClock())
    for number in range(many):
        episode = EpisodeId(Counted(f"r{number}"))
        for key in (f"{number}", f"{number} again"):
            kept.add(key, episode) if isinstance(kept, RefusedSessions) else kept.add(key, episode, "reply")
    Counted.compared = 0
    for number in range(1, many):
        kept.forget(f"r{number}", 0)
    assert Counted.compared < 10 * many
    if isinstance(kept, RefusedSessions):
        assert (len(kept), kept.get("0"), kept.get("1")) == (2, EpisodeId("r0"), None)
    else:
        assert (kept.get("0", EpisodeId("r0")), kept.get("1", EpisodeId("r1"))) == ("reply", None)


@pytest.mark.behaviour("P176")
async def test_a_close_beside_one_that_fails_closes_the_session_itself() -> None:
    rig = AgentRig()
    await rig.seed()
    go = asyncio.Event()

    async def fails() -> None:
        await go.wait()
        raise ConnectionError("lost")

    async def frees() -> str:
        return "observed"

    first = asyncio.create_task(rig.owner.close_session(R, "k", fails))
    await spin()
    second = asyncio.create_task(rig.owner.close_session(R, "k", frees))
    await spin()
    go.set()
    with pytest.raises(ConnectionError):
        await first
    assert await second == "observed"
    assert (rig.owner.report(9).counts["sessions"], rig.owner.is_ready()) == (0, True)


@pytest.mark.behaviour("P181")
async def test_a_close_of_a_session_that_a_commit_deletes_waits_and_frees_nothing_twice() -> None:
    before = AgentRig()
    await before.seed()
    rig = AgentRig()
    await restore(rig.owner, await before.checkpoint())
    rig.retire_gate = asyncio.Event()
    deleting = asyncio.create_task(rig.owner.delete_restored(R1))
    await spin()
    freed: list[str] = []

    async def frees() -> None:
        freed.append("k")

    closing = asyncio.create_task(rig.owner.close_session(R1, "k", frees))
    await spin()
    assert not closing.done()
    rig.retire_gate.set()
    await deleting
    await closing
    assert (freed, rig.owner.report(9).counts["sessions"]) == ([], 0)


def _fails() -> Any:
    raise KeyError("turn")


@pytest.mark.behaviour("P13")
@pytest.mark.parametrize("kind", ["agent", "environment"])
async def test_a_boundary_function_that_fails_is_named_by_its_episode(kind: str) -> None:
    agent, environment = AgentRig(), EnvironmentRig()
    owner: Any = agent.owner if kind == "agent" else environment.owner

    begun = asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> None:
        await begun.wait()
        await session.boundary(_fails)

    async def protocol(ctx: EpisodeContext) -> None:
        await begun.wait()
        await ctx.boundary(_fails)

    await agent.seed()
    running = (
        asyncio.create_task(agent.owner.invoke(R, "k", loop))
        if kind == "agent"
        else asyncio.create_task(environment.owner.run(R, {}, protocol))
    )
    await spin()
    await close(owner)
    begun.set()
    await spin()
    with pytest.raises(HookFailed) as caught:
        await exported(owner)
    assert caught.value.episode == R
    await reopen(owner)
    await running


@pytest.mark.behaviour("P70")
async def test_the_cleanup_of_a_run_begins_when_its_loop_has_ended_though_a_retire_comes_meanwhile() -> None:
    rig = LegacyRig()
    log: list[str] = []
    go = asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await go.wait()
            log.append("loop ended")

    async def clean() -> None:
        log.append("cleanup")

    async def protocol(ctx: RunContext) -> None:
        ctx.on_cleanup(clean)
        await rig.owner.invoke(ctx.episode, ctx.session_key, loop, index="1")

    run = asyncio.create_task(rig.owner.run(R, {}, protocol))
    await spin()
    run.cancel()
    await spin()
    retiring = asyncio.create_task(retire(rig.owner, rig.port, R))
    await spin()
    go.set()
    await retiring
    await asyncio.wait({run})
    assert log == ["loop ended", "cleanup"]


@pytest.mark.behaviour("P220")
async def test_a_session_id_with_a_comma_is_the_same_for_gate_and_server() -> None:
    rig = ResourcesRig()
    await rig.seed("one,two", R)
    await rig.add("one,two")
    await rig.checkpoint()
    assert (rig.hooks, rig.sessions()) == ([("export", ["one,two"])], 1)
