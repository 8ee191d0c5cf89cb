"""The hook contract, for every kind: closing, readiness, reports, restoring, retiring, deleting."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest

from gym_ckpt_grpc.control.ports import Closing, EpisodeListKind
from gym_ckpt_grpc.protocol import UsageError
from gym_ckpt_grpc.protocol.errors import InvalidPhase, OutOfTime, StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.fakes import (
    R1,
    R2,
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
from tests.participants.kinds import KINDS, AgentKind, EnvironmentKind, KindRig, ResourcesKind


@pytest.fixture(params=list(KINDS))
async def rig(request: pytest.FixtureRequest) -> KindRig:
    return KINDS[request.param]()


async def records_of(rig: KindRig, *episodes: EpisodeId) -> Any:
    return await type(rig)().records(*episodes)


@pytest.mark.behaviour("P1")
async def test_closing_sets_the_flag_before_its_first_await(rig: KindRig) -> None:
    closing = rig.owner.close_admission(Closing("c", 1, budget()))
    with contextlib.suppress(StopIteration):
        closing.send(None)
    assert rig.owner.admission.closed
    closing.close()


@pytest.mark.behaviour("P3")
async def test_opening_twice_changes_nothing(rig: KindRig) -> None:
    await close(rig.owner)
    await reopen(rig.owner)
    await rig.begin(R)
    before = rig.owner.report(9)
    await reopen(rig.owner)
    assert rig.owner.report(9) == before
    await rig.end()


@pytest.mark.behaviour("P4")
async def test_readiness_of_1000_live_items_costs_what_that_of_one_does(rig: KindRig) -> None:
    """No report, no scan, no digest: counted by a profile of its calls, and nothing is iterated."""

    class NoScan(dict[Any, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("scanned")

        keys = values = items = __iter__

    def cost() -> int:
        calls: list[str] = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            assert not rig.owner.is_ready()
        finally:
            sys.setprofile(None)
        return len(calls)

    await rig.begin(R)
    one = cost()
    for number in range(999):
        await rig.begin(EpisodeId(f"r{number}"))
    entries = rig.owner._blocking._entries
    assert len(entries) == 1000
    rig.owner._blocking._entries = NoScan(entries)
    assert cost() == one
    rig.owner._blocking._entries = entries
    await rig.end()


@pytest.mark.behaviour("P7", "P8")
async def test_a_report_lists_100_of_many_blockers_oldest_first_and_the_exact_total(rig: KindRig) -> None:
    """Each with reason, age and place; the full list is behind it, each once."""
    count = 5000 if isinstance(rig, EnvironmentKind) else 1100
    episodes = [EpisodeId(f"r{number}") for number in range(count)]
    for episode in episodes:
        await rig.begin(episode)
        rig.owner.admission.clock.now += 1
    report = rig.owner.report(100)
    assert (len(report.blockers), report.blocker_count) == (100, count)
    assert [each.episode for each in report.blockers] == episodes[:100]
    assert [each.age for each in report.blockers] == [float(count - number) for number in range(100)]
    assert {each.reason for each in report.blockers} & {BlockerReason.UNSPECIFIED} == set()
    assert await listed(rig.owner, EpisodeListKind.BLOCKING) == episodes
    await rig.end()


@pytest.mark.behaviour("P9")
async def test_nothing_is_told_while_admission_is_open(rig: KindRig) -> None:
    await rig.begin(R)
    await rig.fresh(S)
    rig.go.set()
    await rig.end()
    await spin()
    assert rig.port.changes == 0


@pytest.mark.behaviour("P16")
async def test_stage_alone_changes_nothing_that_can_be_seen(rig: KindRig) -> None:
    """And discard leaves no trace of it."""
    records = await records_of(rig, R)
    await close(rig.owner)
    before = rig.owner.report(9)
    staged = await rig.owner.stage(records, RestoreScope.plan([R]))
    assert (rig.owner.report(9), rig.owner.restored_pending()) == (before, frozenset())
    assert await exported(rig.owner, EpisodeScope.of([R1])) == []
    await rig.owner.discard(staged)
    assert (rig.owner.report(9), rig.owner.restored_pending()) == (before, frozenset())


@pytest.mark.behaviour("P19")
async def test_delete_restored_leaves_no_refusal(rig: KindRig) -> None:
    await restore(rig.owner, await records_of(rig, R), [R])
    pending = rig.owner.restored_pending()
    await rig.owner.delete_restored(R1)
    assert pending == {R1}
    assert (rig.owner.restored_pending(), list(rig.port.marks)) == (frozenset(), [])
    await reopen(rig.owner)
    assert await rig.fresh(R1)


@pytest.mark.behaviour("P20", "P238")
async def test_delete_restored_of_what_has_started_does_nothing(rig: KindRig) -> None:
    await restore(rig.owner, await records_of(rig, R), [R])
    await reopen(rig.owner)
    await rig.begin(R1)
    if isinstance(rig, AgentKind | ResourcesKind):
        await rig.rig.seed("key-r", R1)  # the session of the record has the source's key
    before = rig.owner.report(9).counts
    assert rig.owner.restored_pending() == frozenset()
    await rig.owner.delete_restored(R1)
    assert rig.owner.report(9).counts == before
    await rig.end()


@pytest.mark.behaviour("P27")
async def test_a_retire_cut_short_stays_a_blocker_and_the_retry_finishes_it(rig: KindRig) -> None:
    await rig.begin(R)
    for _ in range(2):
        with pytest.raises(OutOfTime):
            await retire(rig.owner, rig.port, R, seconds=0.02)
    blockers = rig.owner.report(9).blockers
    assert {each.episode for each in blockers} == {R}
    assert (BlockerReason.RETIRING in {each.reason for each in blockers}, rig.owner.is_ready()) == (True, False)
    assert [batch async for batch in rig.owner.export(EpisodeScope.of([R])) if batch.records] == []
    rig.go.set()
    await rig.owner.retire(R, budget())
    assert not rig.owner.report(9).blockers
    await rig.end()


@pytest.mark.behaviour("P28")
async def test_retiring_an_attempt_stops_earlier_ones_and_leaves_others_alone(rig: KindRig) -> None:
    for episode in (R, R1, R2, S):
        await rig.begin(episode)
    with pytest.raises(OutOfTime):
        await retire(rig.owner, rig.port, R1, seconds=0.02)
    reasons = {each.episode: each.reason for each in rig.owner.report(9).blockers}
    assert {episode for episode, reason in reasons.items() if reason is BlockerReason.RETIRING} == {R, R1}
    assert set(reasons) == {R, R1, R2, S}
    rig.go.set()
    await rig.owner.retire(R1, budget())
    await rig.end()


@pytest.mark.behaviour("P31")
async def test_retiring_what_was_never_seen_succeeds(rig: KindRig) -> None:
    await retire(rig.owner, rig.port, R)
    rig.owner.check_forget("r", 0)
    rig.owner.forget("r", 0)
    assert (rig.owner.is_ready(), list(rig.port.marks)) == (True, [R])


@pytest.mark.behaviour("P32")
async def test_a_restore_of_a_rollout_with_live_work_or_an_unclaimed_record_is_refused(rig: KindRig) -> None:
    records = await records_of(rig, R, S)
    scope = RestoreScope.plan([R, S])
    await rig.begin(R2)
    with pytest.raises(InvalidPhase) as caught:
        await rig.owner.stage(records, scope)
    assert (set(caught.value.episodes), rig.owner.restored_pending()) == ({R2}, frozenset())
    await rig.end()
    other: KindRig = type(rig)()
    await restore(other.owner, [each for each in records if each.episode == R], [R])
    with pytest.raises(InvalidPhase) as caught:
        await other.owner.stage(records, scope)
    assert set(caught.value.episodes) == {R1}


@pytest.mark.behaviour("P33", "P30")
async def test_a_restore_beside_other_rollouts_succeeds_and_raises_no_marks(rig: KindRig) -> None:
    records = await records_of(rig, R)
    await rig.begin(S)
    await rig.fresh(EpisodeId("before"))
    await restore(rig.owner, records, [R])
    await reopen(rig.owner)
    assert list(rig.port.marks) == []
    assert S in {each.episode for each in rig.owner.report(9).blockers}
    await rig.end()


@pytest.mark.behaviour("P34")
async def test_a_restore_at_or_below_a_mark_is_refused(rig: KindRig) -> None:
    records = await records_of(rig, R)
    for marked, target in ((R1, ()), (R2, (2,)), (R2, ())):
        rig.port.marks.raise_to(marked)
        with pytest.raises(StaleAttempt) as caught:
            await rig.owner.stage(records, RestoreScope.plan([R], target))
        assert caught.value.episodes == (EpisodeId("r", target[0] if target else 1),)
    assert rig.owner.restored_pending() == frozenset()
    await rig.owner.stage(records, RestoreScope.plan([R], (3,)))


async def test_an_owner_belongs_to_one_participant(rig: KindRig) -> None:
    rig.owner.attach(rig.port)
    with pytest.raises(UsageError):
        rig.owner.attach(FakePort())


async def test_lists_of_restarts_and_pending_are_complete(rig: KindRig) -> None:
    episodes = [EpisodeId(f"r{number}") for number in range(1, 1201)]
    await restore(rig.owner, await records_of(rig, *episodes), episodes)
    found = await listed(rig.owner, EpisodeListKind.RESTORED_PENDING)
    assert (len(found), set(found)) == (1200, rig.owner.restored_pending())
    assert await listed(rig.owner, EpisodeListKind.RESTART) == []
