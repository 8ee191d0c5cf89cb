"""Activations: parking, waiting for the policy, kept replies, the activation index."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.participants import PolicyReply, SessionContext
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StaleAttempt, StateNotFound
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.agent_rig import GATE, AgentRig
from tests.participants.fakes import R1, R, close, exported, reopen, restore, retire, spin


@pytest.fixture
async def rig() -> AgentRig:
    rig = AgentRig()
    await rig.seed()
    return rig


def reasons(rig: AgentRig) -> list[BlockerReason]:
    return [each.reason for each in rig.owner.report(9).blockers]


@pytest.mark.behaviour("P163")
async def test_an_activation_parks_at_its_next_boundary_and_continues_after_resume(rig: AgentRig) -> None:
    go = asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> Any:
        await session.boundary({"turn": 0})
        await go.wait()
        await session.boundary({"turn": 1})
        return "done"

    running = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    await close(rig.owner)
    assert reasons(rig) == [BlockerReason.RUNNING]
    go.set()
    await spin()
    (record,) = await exported(rig.owner)
    assert (record.decode("boundary"), running.done()) == ({"turn": 1}, False)
    await reopen(rig.owner)
    assert await running == "done"


@pytest.mark.behaviour("P164")
async def test_an_activation_invoked_while_closed_parks_at_its_first_boundary(rig: AgentRig) -> None:
    await close(rig.owner)
    running = rig.invoke()
    assert rig.owner.is_ready()
    await asyncio.sleep(0)
    assert reasons(rig) == [BlockerReason.RUNNING]
    await spin()
    (record,) = await exported(rig.owner)
    assert (record.decode("boundary"), rig.requests) == ({"turn": 0}, [])
    await reopen(rig.owner)
    await rig.answer()
    assert await running == {"answer": "ok"}


@pytest.mark.behaviour("P183")
async def test_a_session_that_waits_for_the_policy_counts_at_the_boundary_before_the_call(rig: AgentRig) -> None:
    """The reply that comes while closed keeps it parked until Resume."""
    running = rig.invoke()
    await spin()
    await close(rig.owner)
    counts = rig.owner.report(9).counts
    assert (rig.owner.is_ready(), counts["waiting_policy"], counts["at_boundary"]) == (True, 1, 1)
    await rig.answer()
    (record,) = await exported(rig.owner)
    assert (record.decode("boundary"), rig.turns) == ({"turn": 0}, [("start", None)])
    await reopen(rig.owner)
    assert await running == {"answer": "ok"}
    assert rig.requests[0].path == "/rollout/r/v1/responses"
    assert rig.requests[0].headers["x-gymckpt-waiting"] == "1"


@pytest.mark.behaviour("P334")
async def test_a_kept_reply_answers_the_equal_request_after_a_restore(rig: AgentRig) -> None:
    """Once; and it is this life's own reply if there is no crash."""
    running = rig.invoke()
    await spin()
    await close(rig.owner)
    await rig.answer({"tokens": [1, 2]})
    records = await exported(rig.owner)
    await reopen(rig.owner)
    assert await running == {"answer": {"tokens": [1, 2]}}
    (after,) = await rig.checkpoint()
    assert "kept_replies" not in after.payloads
    other = AgentRig()
    await restore(other.owner, records)
    (again,) = await exported(other.owner)
    assert "kept_replies" in again.payloads
    await reopen(other.owner)
    assert await other.invoke(episode=R1) == {"answer": {"tokens": [1, 2]}}
    assert other.requests == []
    second = other.invoke(episode=R1)
    await other.answer("fresh")
    assert await second == {"answer": "fresh"}


@pytest.mark.behaviour("P334")
async def test_a_kept_reply_answers_the_first_equal_request_only(rig: AgentRig) -> None:
    running = rig.invoke()
    await spin()
    await close(rig.owner)
    await rig.answer("old")
    records = await exported(rig.owner)
    await reopen(rig.owner)
    await running
    other = AgentRig()
    await restore(other.owner, records)
    await reopen(other.owner)

    async def loop(session: SessionContext, state: Any) -> Any:
        bodies: tuple[Any, ...] = ({"turn": 1}, {"turn": 0, "stream": True}, {"turn": 0})
        return [(await other.policy.call(session, "/v1/responses", body)).body for body in bodies]

    again = asyncio.create_task(other.owner.invoke(R1, "k", loop))
    for body in ("a", "b"):
        await spin()
        await other.answer(body)
    assert await again == ["a", "old", "b"]


@pytest.mark.behaviour("P185")
async def test_a_call_to_a_server_whose_gate_was_never_seen_counts_as_running(rig: AgentRig) -> None:
    """A gate of another service does not count; a reply or a probe with the right one does."""
    rig.policy.gated = False
    running = rig.invoke()
    await spin()
    await close(rig.owner)
    assert reasons(rig) == [BlockerReason.RUNNING]
    assert "x-gymckpt-waiting" not in rig.requests[0].headers
    rig.replies.put_nowait(PolicyReply(200, "ok", {"x-gymckpt-gate": "policyother/x"}))
    await spin()
    await reopen(rig.owner)
    await running
    assert not rig.policy.gated
    rig.replies.put_nowait(PolicyReply(200, "ok", GATE))
    assert await rig.policy.probe()


@pytest.mark.behaviour("P186")
async def test_a_policy_call_that_fails_while_closed_raises_after_resume_and_a_cancel_goes_through(
    rig: AgentRig,
) -> None:
    running = rig.invoke()
    await spin()
    await close(rig.owner)
    rig.replies.put_nowait(ConnectionError("gone"))
    await spin()
    (record,) = await exported(rig.owner)
    assert (record.decode("boundary"), running.done()) == ({"turn": 0}, False)
    await reopen(rig.owner)
    with pytest.raises(ConnectionError, match="gone"):
        await running
    second = rig.invoke()
    await spin()
    await close(rig.owner, 2)
    await rig.answer()
    await retire(rig.owner, rig.port, R)
    with pytest.raises(StaleAttempt):
        await second


@pytest.mark.behaviour("P44")
async def test_a_refusal_of_the_policy_gate_reaches_the_caller_as_that_refusal(rig: AgentRig) -> None:
    running = rig.invoke()
    await spin()
    await rig.answer({"error": {"code": "STALE_ATTEMPT", "detail": "retired there"}}, 409)
    with pytest.raises(StaleAttempt, match="retired there"):
        await running


async def test_a_reply_is_kept_no_longer_than_to_the_next_boundary(rig: AgentRig) -> None:
    """Which has what it said."""
    go = asyncio.Event()

    async def loop(session: SessionContext, state: Any) -> Any:
        await rig.policy.call(session, "/v1/responses", {"turn": 0})
        await session.boundary({"turn": 1})
        session.begin_waiting()
        await go.wait()
        session.end_waiting()

    running = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    await rig.answer()
    (record,) = await rig.checkpoint()
    assert (record.decode("boundary"), "kept_replies" in record.payloads) == ({"turn": 1}, False)
    go.set()
    await running


async def test_a_failed_reply_that_came_while_closed_is_not_kept(rig: AgentRig) -> None:
    running = rig.invoke()
    await spin()
    await close(rig.owner)
    await rig.answer("overloaded", 500)
    (record,) = await exported(rig.owner)
    assert "kept_replies" not in record.payloads
    await reopen(rig.owner)
    assert await running == {"answer": "overloaded"}


async def test_parallel_policy_calls_of_one_session_all_stay_until_resume(rig: AgentRig) -> None:
    async def loop(session: SessionContext, state: Any) -> Any:
        await session.boundary({"turn": 0})
        calls = (rig.policy.call(session, "/v1/responses", {"n": number}) for number in range(2))
        return sorted(reply.body for reply in await asyncio.gather(*calls))

    running = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    await close(rig.owner)
    await rig.answer("a")
    await rig.answer("b")
    (record,) = await exported(rig.owner)
    assert len(record.decode("kept_replies")) == 2
    await reopen(rig.owner)
    assert await running == ["a", "b"]


@pytest.mark.behaviour("P188")
async def test_the_last_completed_index_gets_the_recorded_reply_also_after_a_restore(rig: AgentRig) -> None:
    running = rig.invoke(index="1")
    await rig.answer("first")
    assert await running == {"answer": "first"}
    assert await rig.invoke(index="1") == {"answer": "first"}
    records = await rig.checkpoint()
    other = AgentRig()
    await restore(other.owner, records)
    await reopen(other.owner)
    assert await other.invoke(episode=R1, index="1") == {"answer": "first"}
    assert (other.turns, other.requests, len(rig.requests)) == ([], [], 1)
    second = other.invoke(episode=R1, index="2")
    await other.answer("second")
    assert await second == {"answer": "second"}


@pytest.mark.behaviour("P189")
async def test_a_duplicate_of_the_running_index_joins_it(rig: AgentRig) -> None:
    """It runs once, also if the first caller goes away, and all get the same reply."""
    first, second = rig.invoke(index="1"), rig.invoke(index="1")
    await spin()
    first.cancel()
    await asyncio.wait({first})
    await rig.answer("once")
    assert (await second, len(rig.requests)) == ({"answer": "once"}, 1)


@pytest.mark.behaviour("P190")
@pytest.mark.parametrize("index", ["0", "-1", "text", "3", "", "1.0", "٢"])
async def test_an_illegal_index_is_refused_naming_the_legal_ones(rig: AgentRig, index: str) -> None:
    running = rig.invoke(index="1")
    await rig.answer()
    await running
    with pytest.raises(InvalidArgument, match="legal are 1 or 2"):
        await rig.invoke(index=index)


@pytest.mark.behaviour("P190")
async def test_without_the_header_every_invocation_runs_unless_the_session_is_busy(rig: AgentRig) -> None:
    for _ in range(2):
        running = rig.invoke()
        await rig.answer()
        await running
    busy = rig.invoke()
    await spin()
    with pytest.raises(InvalidArgument, match="busy"):
        await rig.invoke()
    with pytest.raises(InvalidArgument, match="legal are 1"):
        await rig.invoke(index="2")
    await rig.answer()
    await busy
    assert len(rig.requests) == 3


async def test_a_caller_without_an_index_takes_its_activation_with_it(rig: AgentRig) -> None:
    running = rig.invoke()
    await spin()
    running.cancel()
    await asyncio.wait({running})
    assert (running.cancelled(), rig.owner.is_ready()) == (True, True)


async def test_an_activation_cancelled_before_its_first_turn_leaves_nothing(rig: AgentRig) -> None:
    running = rig.invoke()
    await asyncio.sleep(0)
    await rig.owner.close_session(R, "k")  # cancels before its own first await
    with pytest.raises(StaleAttempt):
        await running
    assert (rig.owner.is_ready(), rig.turns) == (True, [])


async def test_an_activation_needs_a_session(rig: AgentRig) -> None:
    with pytest.raises(StateNotFound):
        await rig.invoke("unknown")
