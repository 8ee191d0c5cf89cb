"""Resources servers: export, install, retire, delete."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.protocol.errors import OutOfTime, RetireIncomplete
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import R1, R, S, budget, close, exported, reopen, restore, retire, spin
from tests.participants.resources_rig import ResourcesRig


@pytest.fixture
def rig() -> ResourcesRig:
    return ResourcesRig()


@pytest.mark.behaviour("P220")
async def test_the_export_hook_is_called_once_without_sessions_of_retired_attempts(rig: ResourcesRig) -> None:
    for name in ("r", "s", "t"):
        await rig.seed(name, EpisodeId(name))
    rig.retire_gate = asyncio.Event()
    with pytest.raises(OutOfTime):
        await retire(rig.owner, rig.port, S, seconds=0)
    await close(rig.owner)
    batches = [batch async for batch in rig.owner.export(EpisodeScope.all())]
    assert [each.episode for batch in batches for each in batch.records] == [R, EpisodeId("t")]
    assert rig.hooks == [("export", ["r", "t"])]


@pytest.mark.behaviour("P221")
async def test_invalid_restored_state_installs_nothing(rig: ResourcesRig) -> None:
    await rig.seed("k", R)
    await rig.seed("m", S)
    rig.counters["m"] = -1
    records = await rig.checkpoint()
    other = ResourcesRig()
    with pytest.raises(InvalidState):
        await restore(other.owner, records)
    assert (other.counters, other.sessions(), other.owner.restored_pending()) == ({}, 0, frozenset())


@pytest.mark.behaviour("P222")
async def test_a_tracked_session_missing_from_held_sessions_is_a_restart(rig: ResourcesRig) -> None:
    """Asked once per close; forgotten at Resume."""
    asked: list[int] = []

    def held_sessions() -> set[str]:
        asked.append(1)
        return {"m"}

    rig.held_sessions = held_sessions  # type: ignore[attr-defined]
    await rig.seed("k", R)
    await rig.seed("m", S)
    await close(rig.owner)
    assert rig.owner.report(9).restarts == (R,)
    assert [each.episode for each in await exported(rig.owner)] == [S]
    assert asked == [1]
    await reopen(rig.owner)
    assert rig.owner.report(9).restarts == ()


@pytest.mark.behaviour("P223")
async def test_a_session_first_missed_in_the_export_is_left_out_untracked_and_named(rig: ResourcesRig) -> None:
    """Also a restored, unused one."""
    await rig.seed("k", R)
    await rig.seed("m", S)
    records = await rig.checkpoint()
    other = ResourcesRig()
    await restore(other.owner, records)
    for owner_rig, episode in ((rig, R), (other, R1)):
        del owner_rig.counters["k"]
        await close(owner_rig.owner)
        batches = [batch async for batch in owner_rig.owner.export(EpisodeScope.all())]
        assert [each for batch in batches for each in batch.left_out] == [episode]
        assert [each.fields["session_id"] for batch in batches for each in batch.records] == ["m"]
        assert owner_rig.sessions() == 1
    assert other.owner.restored_pending() == {EpisodeId("s", 1)}


@pytest.mark.behaviour("P224")
async def test_deleting_a_restored_unused_session_frees_it_and_the_attempt_can_seed_again(rig: ResourcesRig) -> None:
    """A request for it is held until the deletion has ended."""
    await rig.seed()
    await rig.add()
    records = await rig.checkpoint()
    other = ResourcesRig()
    await restore(other.owner, records)
    await reopen(other.owner)
    other.retire_gate = asyncio.Event()
    deleting = asyncio.create_task(other.owner.delete_restored(R1))
    await spin()
    held = other.call("/seed_session", "k", R1)
    await spin()
    assert held.answer.status == 0
    other.retire_gate.set()
    await deleting
    assert (await held.end()).status == 200
    assert (other.owner.restored_pending(), other.counters) == (frozenset(), {"k": 0})


async def test_a_failing_deletion_leaves_the_episode_pending(rig: ResourcesRig) -> None:
    """And the retry deletes it once."""
    await rig.seed()
    records = await rig.checkpoint()
    other = ResourcesRig()
    await restore(other.owner, records)
    await reopen(other.owner)

    async def fails(session_id: str) -> None:
        raise RuntimeError("no")

    other.retire_session = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await other.owner.delete_restored(R1)
    assert (other.owner.restored_pending(), other.sessions()) == (frozenset({R1}), 1)
    del other.retire_session
    await other.owner.delete_restored(R1)
    await other.owner.delete_restored(R1)
    assert (other.owner.restored_pending(), other.hooks[1:]) == (frozenset(), [("retire", ["k"])])


@pytest.mark.behaviour("P225")
async def test_late_calls_and_seeds_of_a_retired_attempt_are_refused_and_a_close_is_not(rig: ResourcesRig) -> None:
    """The next attempt seeds normally; Forget lifts the refusal."""
    await rig.seed()
    await retire(rig.owner, rig.port, R)
    late = [rig.call("/add"), rig.call("/seed_session", "k", R), rig.call("/close_session")]
    answers = [await each.end() for each in late]
    assert [each.status for each in answers] == [409, 409, 200]
    assert (rig.counters, rig.owner.status_extra()["retired_sessions"]) == ({}, "1")
    await rig.seed("other", R1)
    assert await rig.add("other") == 1
    rig.owner.check_forget("r", 0)
    rig.port.marks.forget("r", 0)
    rig.owner.forget("r", 0)
    assert await rig.add() == 1
    assert rig.owner.status_extra()["retired_sessions"] == "0"


@pytest.mark.behaviour("P226")
async def test_a_retire_refuses_new_requests_cancels_the_one_in_flight_once_and_then_frees(rig: ResourcesRig) -> None:
    await rig.seed()
    go = asyncio.Event()
    cancels: list[int] = []

    async def add(scope: Any, body: bytes) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancels.append(1)
            await go.wait()
            raise

    rig.app.routes["/add"] = add
    running = rig.call("/add")
    await spin()
    retiring = asyncio.create_task(retire(rig.owner, rig.port, R))
    await spin()
    assert (await rig.call("/add").end()).code == "STALE_ATTEMPT"
    assert (rig.hooks, retiring.done()) == ([], False)
    again = asyncio.create_task(rig.owner.retire(R, budget()))
    await spin()
    go.set()
    await asyncio.gather(retiring, again)
    assert (await running.end()).code == "STALE_ATTEMPT"
    assert (cancels, rig.counters, rig.sessions()) == ([1], {}, 0)


@pytest.mark.behaviour("P227")
async def test_a_retire_waits_for_a_seed_of_its_attempt_and_not_for_one_at_the_gate(rig: ResourcesRig) -> None:
    go = rig.gates["/seed_session"] = asyncio.Event()
    running = rig.call("/seed_session", "k", R)
    await spin()
    await close(rig.owner)
    held = rig.call("/seed_session", "m", S)
    await spin()
    retiring = asyncio.create_task(retire(rig.owner, rig.port, R))
    await retire(rig.owner, rig.port, S)
    assert ((await held.end()).code, retiring.done()) == ("STALE_ATTEMPT", False)
    go.set()
    await retiring
    await running.end()
    assert (rig.counters, rig.sessions(), rig.hooks) == ({}, 0, [("retire", ["k"])])


@pytest.mark.behaviour("P228", "P229")
async def test_a_retire_cut_short_blocks_under_its_key_and_is_freed_by_the_retry(rig: ResourcesRig) -> None:
    rig.retire_gate = asyncio.Event()
    await rig.seed()
    with pytest.raises(OutOfTime):
        await retire(rig.owner, rig.port, R, seconds=0.02)
    (blocker,) = rig.owner.report(9).blockers
    assert (blocker.reason, blocker.episode) == (BlockerReason.RETIRING, R)
    with pytest.raises(RetireIncomplete):
        rig.owner.check_forget("r", 0)
    assert (await rig.call("/add").end()).code == "STALE_ATTEMPT"
    rig.retire_gate.set()
    await rig.owner.retire(R, budget())
    rig.owner.check_forget("r", 0)
    assert (rig.owner.is_ready(), rig.counters) == (True, {})


@pytest.mark.behaviour("P230")
async def test_retiring_one_of_1000_rollouts_does_not_scan_all_sessions(rig: ResourcesRig) -> None:
    for number in range(1000):
        rig.owner.session_started(f"k{number}", EpisodeId(f"r{number}"))
    looked_at: list[str] = []
    table = rig.owner._sessions

    class Spy(dict[str, Any]):
        def __iter__(self) -> Any:
            looked_at.append("all")
            return super().__iter__()

        def values(self) -> Any:
            looked_at.append("all")
            return super().values()

        items = keys = values

    table._sessions = Spy(table._sessions)
    await retire(rig.owner, rig.port, EpisodeId("r500"))
    assert (looked_at, len(table)) == ([], 999)


@pytest.mark.behaviour("P233", "P234")
async def test_cleanup_of_a_retired_attempt_passes_the_closed_gate_and_a_held_one_is_woken_by_the_mark(
    rig: ResourcesRig,
) -> None:
    await rig.seed()
    await close(rig.owner)
    held = rig.call("/close_session")
    await spin()
    assert held.answer.status == 0
    await retire(rig.owner, rig.port, R)
    assert ((await held.end()).status, rig.sessions()) == (200, 0)
    assert (await rig.call("/close_session").end()).status == 200
    assert (await rig.call("/close_session", "k", R).end()).status == 200
    assert (await rig.call("/add").end()).code == "STALE_ATTEMPT"
    assert rig.owner.is_ready()


@pytest.mark.behaviour("P11")
async def test_live_state_changed_during_and_after_an_export_changes_no_record(rig: ResourcesRig) -> None:
    """The export is read a batch at a time, and the world moves on between and behind."""
    for number in range(200):
        await rig.seed(f"k{number}", EpisodeId(f"r{number}"))
    await close(rig.owner)
    records: list[Record] = []
    async for batch in rig.owner.export(EpisodeScope.all()):
        records += batch.records
        for name in rig.counters:
            rig.counters[name] += 1
    assert (len(records), {each.decode("state")["count"] for each in records}) == (200, {0})


async def test_a_discard_undoes_what_the_hook_installed(rig: ResourcesRig) -> None:
    await rig.seed()
    records = await rig.checkpoint()
    other = ResourcesRig()
    staged = await other.owner.stage(records, RestoreScope.plan([R]))
    assert (other.counters, other.sessions()) == ({"k": 0}, 0)
    await other.owner.discard(staged)
    assert (other.counters, other.sessions(), other.owner.is_ready()) == ({}, 0, True)
