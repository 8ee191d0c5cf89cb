"""Calls at the policy model's gate: what a handler begins, leases, and how its end is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.control.generation import Continuation, CutDisposition
from gym_ckpt_grpc.integrations import visit_of
from gym_ckpt_grpc.participants.admission import Visit
from gym_ckpt_grpc.participants.request_digest import request_digest
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.protocol.errors import UsageError
from tests.participants.cuts_rig import (
    STREAM,
    WAITING,
    CutsRig,
    FakeBackend,
    Generation,
    answers,
    evidence,
    finished,
    hang,
    settle,
    virtual,
)
from tests.participants.fakes import R1, R, S, budget, close
from tests.participants.resources_rig import ResourcesRig

BODY = {"messages": ["x"], "stream": True}
CUT = Continuation("r", "source", ("cuts/1",), 5, "5a" * 32, 64, 1)


@virtual
async def test_a_handler_finds_its_ticket_in_the_scope() -> None:
    """Tagged calls have one; untagged calls, other routes and servers without a gate have an inert visit."""
    rig = CutsRig(FakeBackend("b"))
    tagged, untagged = await rig.running(R), await rig.running(None)
    assert isinstance(tagged.ticket, Ticket)
    assert (tagged.ticket.episode, untagged.ticket) == (R, None)
    assert type(visit_of({})) is type(visit_of({"state": {"gymckpt_visit": "forged"}})) is Visit
    assert await rig.finish([tagged, untagged]) == [200, 200]


@virtual
async def test_a_begun_call_has_its_digest_backend_and_model_on_the_ticket() -> None:
    rig = CutsRig(FakeBackend("b"))
    running = await rig.running(R, BODY)
    assert running.ticket is not None
    assert running.call is not None
    ticket = running.ticket
    assert (ticket.backend, ticket.model, ticket.restart_reason) == ("b", "m", "")
    assert ticket.request_digest == running.call.request_digest == request_digest({"messages": ["x"]})
    assert (ticket.call_id, len(ticket.call_id), int(ticket.call_id, 16) > 0) == (running.id, 32, True)
    assert await rig.finish([running]) == [200]


@virtual
async def test_a_call_to_a_backend_that_does_not_exist_is_a_usage_error() -> None:
    """Naming those that do. Without backends any name will do: nothing is cut."""
    rig = CutsRig(FakeBackend("b"), FakeBackend("c"))
    running = rig.arrive(R, backend="d")
    running.begin.set()
    with pytest.raises(UsageError, match=r"'d'; there are b, c"):
        await running.answered()
    bare = CutsRig()
    assert await bare.finish([await bare.running(R, backend="d")]) == [200]


@virtual
async def test_a_leased_continuation_reaches_the_handler_and_its_end_is_told() -> None:
    """Delivered if a whole good reply was sent; not for an error, a client that left, or a retired call."""
    rig = CutsRig(FakeBackend("b"))
    rig.hooks.restored[request_digest({"messages": ["x"]})] = CUT
    calls = [await rig.running(R, BODY) for _ in range(4)]
    other = await rig.running(S)
    assert [each.call.continuation if each.call else 0 for each in (*calls, other)] == [CUT, CUT, CUT, CUT, None]
    assert [each.ticket.continuation for each in calls if each.ticket] == [CUT] * 4
    good, bad, left, retired = calls
    good.finish()
    bad.status = 503
    bad.finish()
    assert left.client is not None
    left.client.task.cancel()
    await settle()
    assert dict(rig.hooks.ended) == {left.id: False, good.id: True, bad.id: False}
    rig.port.marks.raise_to(R)
    await rig.gate.retire(R, budget())
    assert await retired.answered() == 409
    assert rig.hooks.ended[-1] == (retired.id, False)
    assert await rig.finish([other]) == [200]
    assert rig.hooks.ended[-1] == (other.id, True)


@virtual
async def test_a_stream_is_delivered_when_its_end_was_sent_and_not_when_it_broke() -> None:
    rig = CutsRig(FakeBackend("b"))
    whole, broken = [await rig.running(R, path=STREAM) for _ in range(2)]
    for stream in (whole, broken):
        stream.pieces.put_nowait(b"data: 1\n\n")
    await settle()
    assert broken.client is not None
    broken.client.task.cancel()
    whole.pieces.put_nowait(None)
    await settle()
    assert dict(rig.hooks.ended) == {broken.id: False, whole.id: True}


@virtual
async def test_a_call_that_begins_again_at_another_backend_is_a_new_one() -> None:
    """Its first lease is given back, a cut of it is released, and it is cut where it runs now."""
    first, second = FakeBackend("b"), FakeBackend("c")
    rig = CutsRig(first, second)
    rig.hooks.restored[request_digest(BODY)] = CUT
    running = await rig.running(R, BODY)
    rig.close()
    await settle()
    (cut_id,) = rig.cut_ids()
    assert running.ticket is not None
    assert running.call is not None
    old_id, old = running.id, running.call
    running.call = rig.gate.begin_generation(running.ticket, BODY, backend="c", model="m")
    assert running.id != old_id
    assert rig.hooks.ended == [(old_id, False)]
    assert rig.hooks.released == [("b", cut_id)]
    assert (rig.hooks.leased, running.call.continuation) == ([old_id, running.id], CUT)
    assert not rig.ready
    old.registered()
    old.finished(finished("old"))
    await asyncio.sleep(1)
    assert (rig.ready, rig.cut_ids(), second.sweeps) == (False, [], [])
    running.call.registered()
    await settle()
    assert (rig.ready, first.asked(), second.asked()) == (True, [[old_id]], [[running.id]])
    assert rig.cuts() == (1, 1, 0, 0)
    assert await rig.finish([running]) == [200]
    assert rig.hooks.ended[1:] == [(running.id, True)]


@virtual
async def test_a_call_that_begins_again_after_it_finished_has_no_coordinates_and_no_claim_on_the_time() -> None:
    """Begun anew when the time for cuts is spent, it does not block; nor is it sent because the first one was."""
    first, second = FakeBackend("b"), FakeBackend("c", answers(CutDisposition.NOT_FOUND))
    rig = CutsRig(first, second)
    running, other = await rig.running(R), await rig.running(S, backend="c")
    assert running.call is not None
    assert running.ticket is not None
    running.call.finished(finished("own"))
    rig.gate.begin_generation(running.ticket, BODY, backend="c", model="m")
    rig.close()
    await asyncio.sleep(1)
    assert (rig.ready, rig.cut_ids(), second.asked()) == (False, [], [[other.id]] * 4)
    await rig.until_ready()
    rig.gate.begin_generation(running.ticket, BODY, backend="b", model="m").registered()
    await asyncio.sleep(1)
    assert (rig.ready, first.sweeps, rig.cuts()) == (True, [], (2, 0, 2, 0))
    assert await rig.finish([running, other]) == [200, 200]


@virtual
async def test_a_constrained_call_that_begins_again_without_the_constraint_is_cut() -> None:
    backend = FakeBackend("b")
    rig = CutsRig(backend)
    running = await rig.running(R, {"n": 2})
    rig.close()
    assert (rig.ready, rig.cuts()) == (True, (1, 0, 0, 1))
    assert running.ticket is not None
    again = rig.gate.begin_generation(running.ticket, {}, backend="b", model="m")
    again.registered()
    await rig.until_ready()
    assert (rig.cuts(), backend.asked()) == ((1, 1, 0, 0), [[again.call_id]])
    rig.gate.begin_generation(running.ticket, {"n": 2}, backend="b", model="m")
    assert (rig.ready, rig.cuts()) == (True, (1, 0, 0, 1))
    assert await rig.finish([running]) == [200]


@pytest.mark.behaviour("P104")
@pytest.mark.parametrize("closed", [True, False])
@virtual
async def test_a_ticket_that_leaves_is_reported_even_if_settling_its_lease_fails(
    closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is gone from every count, the rest of the gate works on, and the caller has its reply."""
    rig = CutsRig(FakeBackend("b", hang))
    leaves, delivered = await rig.running(R), await rig.running(S)
    rig.hooks.failure = RuntimeError("the desk is gone")
    if closed:
        rig.close()
        await settle()
    changes = rig.port.changes
    assert leaves.client is not None
    leaves.client.task.cancel()
    await settle()
    assert rig.counts("inflight") == (1,)
    assert rig.port.changes - changes == int(closed)
    assert "settling the lease of a call of r failed" in caplog.text
    assert await rig.finish([delivered]) == [200]
    assert rig.counts("inflight", "held", "cut", "cut_failed") == (0, 0, 0, 0)
    assert rig.ready


@virtual
async def test_a_lease_that_fails_costs_the_continuation_and_not_the_call(caplog: pytest.LogCaptureFixture) -> None:
    rig = CutsRig(FakeBackend("b"))
    rig.hooks.failure = RuntimeError("no")
    running = await rig.running(R)
    assert running.call is not None
    assert running.call.continuation is None
    assert "claiming one failed" in caplog.text
    rig.hooks.failure = None
    assert await rig.finish([running]) == [200]


@virtual
async def test_calls_of_an_episode_that_is_held_back_wait_although_admission_is_open() -> None:
    rig = CutsRig(FakeBackend("b"))
    rig.hooks.kept_back.add(R)
    held, other, later = rig.arrive(R), await rig.running(S), await rig.running(R1)
    held.begin.set()
    held.send.set()
    await settle()
    assert (rig.admission.waiting, rig.counts("inflight"), held.call) == (1, (2,), None)
    rig.hooks.kept_back.clear()
    rig.admission.wake("r")
    await settle()
    assert (rig.admission.waiting, rig.counts("inflight")) == (0, (3,))
    assert await rig.finish([held, other, later]) == [200, 200, 200]


@virtual
async def test_a_paused_stream_that_finishes_has_its_own_cut_and_leaves_no_trace_after_its_end() -> None:
    rig = CutsRig(FakeBackend("b"))
    running = await rig.running(R, path=STREAM, headers=WAITING)
    running.pieces.put_nowait(b"data: 1\n\n")
    await settle()
    rig.close()
    await settle()
    (prefix,) = rig.cut_ids()
    assert running.call is not None
    running.call.finished(evidence("own", finish_reason="length"))
    running.pieces.put_nowait(b"data: 2\n\n")
    running.pieces.put_nowait(None)
    await settle()
    assert (rig.cut_ids(), rig.hooks.released) == (["own"], [("b", prefix)])
    assert rig.counts("held", "paused", "held_bytes", "cut") == (1, 1, 9, 1)
    rig.open()
    assert await running.answered() == 200
    assert rig.counts("inflight", "held", "paused", "held_bytes", "cut") == (0, 0, 0, 0, 0)
    assert rig.hooks.ended == [(running.id, True)]


@pytest.mark.behaviour("P100")
@virtual
async def test_a_verification_that_asks_a_judge_through_the_policy_server_completes_while_closed() -> None:
    """Both servers are closed: the judge's call belongs to no episode, so the resources become ready."""
    policy, resources = CutsRig(FakeBackend("b")), ResourcesRig()
    held = await policy.running(R)
    scored = asyncio.Event()
    judged: list[Generation] = []

    async def verify(scope: Any, body: bytes) -> Any:
        await scored.wait()
        judge = policy.arrive(None)
        judge.begin.set()
        judge.send.set()
        judged.append(judge)
        return 200, {}, await judge.answered()

    resources.app.routes["/verify"] = verify
    await resources.seed()
    verifying = resources.call("/verify")
    await settle()
    await close(resources.owner)
    policy.close()
    scored.set()
    await settle()
    assert (resources.owner.is_ready(), policy.ready, policy.counts("untagged")) == (False, True, (1,))
    judged[0].finish()
    assert (await verifying.end()).json() == 200
    assert (resources.owner.is_ready(), policy.counts("untagged", "held", "cut")) == (True, (0, 1, 1))
    assert await policy.finish([held]) == [200]
