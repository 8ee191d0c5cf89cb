"""What outlives one checkpoint: epochs, resumed ids, marks; and the lease."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_ckpt_grpc.protocol.fences import EpochFence, Marks, ResumedIds
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.lease import MAX_LEASE_TTL, Lease

episodes = st.builds(EpisodeId, st.sampled_from(["a", "b", "c"]), st.integers(0, 5))


def test_the_highest_epoch_never_falls() -> None:
    """A lower epoch is refused for ever, an equal one is not."""
    fence = EpochFence()
    assert not fence.refuses(0)
    fence.obey(5)
    fence.obey(3)
    assert fence.highest == 5
    assert fence.refuses(4)
    assert fence.refuses(0)
    assert not fence.refuses(5)


@pytest.mark.behaviour("C23")
def test_resumed_ids_are_bounded_oldest_first() -> None:
    """At least 64 are remembered; one that is used again counts as young."""
    ids = ResumedIds(64)
    for number in range(64):
        ids.add(f"c{number}")
    assert all(f"c{number}" in ids for number in range(64))
    ids.add("c0")
    ids.add("new")
    assert "c1" not in ids
    assert "c0" in ids
    assert len(ids) == 64


@pytest.mark.behaviour("C26", "C27", "C64")
@given(st.lists(episodes), episodes)
def test_marks_refuse_what_was_retired_and_earlier(retired: list[EpisodeId], asked: EpisodeId) -> None:
    """At or below a mark: refused. Later attempts and other rollouts pass, in whatever order marks were raised."""
    marks = Marks()
    for episode in retired:
        marks.raise_to(episode)
    same = [episode.attempt for episode in retired if episode.rollout_id == asked.rollout_id]
    assert marks.refuses(asked) is (asked.attempt <= max(same, default=-1))
    assert len(marks) == len({episode.rollout_id for episode in retired})


@pytest.mark.behaviour("C28")
@given(st.lists(episodes), st.lists(episodes), episodes)
def test_merged_marks_refuse_what_either_refused(left: list[EpisodeId], right: list[EpisodeId], e: EpisodeId) -> None:
    """Merging another set's export is the union of both refusals."""
    first, second = Marks(), Marks()
    for episode in left:
        first.raise_to(episode)
    for episode in right:
        second.raise_to(episode)
    either = first.refuses(e) or second.refuses(e)
    first.merge(second)
    assert first.refuses(e) is either


@pytest.mark.behaviour("C29", "C30")
def test_forget_erases_up_to_an_attempt() -> None:
    """A mark above `through_attempt` stays; a rollout that was never retired changes nothing."""
    marks = Marks({"a": 2})
    assert not marks.forget("b", 9)
    assert not marks.forget("a", 1)
    assert marks.refuses(EpisodeId("a", 2))
    assert marks.forget("a", 2)
    assert not marks.refuses(EpisodeId("a", 0))
    assert not marks.forget("a", 2)
    assert list(Marks({"b": 1, "a": 0})) == [EpisodeId("a"), EpisodeId("b", 1)]


def test_a_lease_is_clamped_and_never_shortened() -> None:
    """Ten minutes at most; an earlier `now` does not take anything away."""
    assert Lease(MAX_LEASE_TTL + 1, 0).ttl == MAX_LEASE_TTL
    lease = Lease(10, now=100)
    lease.extend(105)
    lease.extend(101)
    assert lease.remaining(105) == 10
    assert not lease.expired(114.9)
    assert lease.expired(115)
    assert lease.remaining(200) == 0


def test_a_call_under_way_holds_the_lease() -> None:
    """It counts from the end of the last of the calls."""
    lease = Lease(10, now=0)
    lease.hold()
    lease.hold()
    lease.release(now=50)
    assert lease.wake_at() == math.inf
    assert lease.remaining(1000) == 10
    assert not lease.expired(1000)
    lease.release(now=1000)
    assert lease.wake_at() == 1010
    assert not lease.expired(1009.9)
    assert lease.expired(1010)


@given(st.lists(st.tuples(st.sampled_from(["extend", "hold", "release"]), st.integers(0, 5)), max_size=30))
def test_no_step_shortens_a_lease(steps: list[tuple[str, int]]) -> None:
    """Whatever happens, the end of a lease only moves away."""
    lease, now, held = Lease(10, 0), 0.0, 0
    for step, later in steps:
        before = lease.remaining(now)
        if step == "extend":
            lease.extend(now)
        elif step == "hold":
            lease.hold()
            held += 1
        elif held:
            lease.release(now)
            held -= 1
        assert lease.remaining(now) >= before
        now += later
