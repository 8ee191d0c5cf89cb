"""Policy calls whose reply is streamed, and several policy calls of one session at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gym_ckpt_grpc.participants import PolicyClient, PolicyRequest, SessionContext, StreamReply
from gym_ckpt_grpc.protocol import UsageError
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record
from tests.participants.agent_rig import GATE, AgentRig
from tests.participants.fakes import R1, R2, R, close, exported, reopen, restore, retire, spin


class StreamRig(AgentRig):
    """A loop that reads one stream. wire: events, `None` for the end, or an error, as they come over the wire."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = PolicyClient(self.send, service="policy", open_stream=self.open_stream)
        self.policy.gated = True
        self.status = 200
        self.failure: Any = None
        self.gate: Mapping[str, str] = GATE
        self.wire: asyncio.Queue[Any] = asyncio.Queue()
        self.open_streams = 0
        self.reads = asyncio.Event()  # whether the loop takes what arrives
        self.reads.set()
        self.heard: list[Any] = []

    @asynccontextmanager
    async def open_stream(self, request: PolicyRequest) -> AsyncIterator[StreamReply]:
        self.requests.append(request)
        self.open_streams += 1
        try:
            yield StreamReply(self.status, self.gate, self.events(), self.failure)
        finally:
            self.open_streams -= 1

    async def events(self) -> AsyncIterator[Any]:
        while (event := await self.wire.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    async def comes(self, *events: Any) -> None:
        for event in events:
            self.wire.put_nowait(event)
        await spin()

    async def loop(self, session: SessionContext, state: Any) -> Any:
        turn = state["turn"] if state else 0
        await session.boundary({"turn": turn})
        async with self.policy.stream(session, "/v1/responses", {"turn": turn}) as events:
            async for event in events:
                self.heard.append(event)
                await self.reads.wait()
        return [events.status, self.heard]

    async def started(self) -> asyncio.Task[Any]:
        await self.seed()
        running = self.invoke()
        await spin()
        return running

    async def taken(self) -> Record:
        (record,) = await exported(self.owner)
        return record


@pytest.fixture
async def rig() -> StreamRig:
    return StreamRig()


@pytest.mark.behaviour("P184")
async def test_a_paused_stream_counts_at_the_boundary_before_the_call(rig: StreamRig) -> None:
    """Before its first event and after; nothing of it is in the record, and it goes on after Resume."""
    running = await rig.started()
    await close(rig.owner)
    assert (await rig.taken()).decode("boundary") == {"turn": 0}
    await reopen(rig.owner)
    await rig.comes("a", "b")
    await close(rig.owner, 2)
    counts = rig.owner.report(9).counts
    assert (rig.owner.is_ready(), counts["waiting_policy"], counts["at_boundary"]) == (True, 1, 1)
    record = await rig.taken()
    assert (record.decode("boundary"), set(record.payloads)) == ({"turn": 0}, {"boundary", "seed", "session"})
    await reopen(rig.owner)
    await rig.comes("c", None)
    assert await running == [200, ["a", "b", "c"]]
    (request,) = rig.requests
    assert (request.path, request.body) == ("/rollout/r/v1/responses", {"turn": 0, "stream": True})
    assert (request.headers["x-gymckpt-waiting"], rig.open_streams) == ("1", 0)
    (after,) = await rig.checkpoint()
    assert set(after.payloads) == {"seed", "session"}


@pytest.mark.behaviour("P184", "P334")
@pytest.mark.parametrize("when", ["while closed", "before, unread"])
async def test_a_stream_that_ended_is_kept_and_answers_the_equal_call_after_a_restore(
    when: str, rig: StreamRig
) -> None:
    """The loop hears of its end after Resume; the replacement hears all of it without asking anybody."""
    running = await rig.started()
    await rig.comes("a")
    if when == "before, unread":
        rig.reads.clear()
        await rig.comes("b", None)
    await close(rig.owner)
    if when == "while closed":
        await rig.comes("b", None)
    rig.reads.set()
    await spin()
    record = await rig.taken()
    assert (record.decode("boundary"), running.done()) == ({"turn": 0}, False)
    await reopen(rig.owner)
    assert await running == [200, ["a", "b"]]
    other = StreamRig()
    await restore(other.owner, [record])
    await reopen(other.owner)
    assert await other.invoke(episode=R1) == [200, ["a", "b"]]
    assert other.requests == []
    second = other.invoke(episode=R1)
    await other.comes("fresh", None)
    assert (await second)[1] == ["a", "b", "fresh"]


@pytest.mark.behaviour("P184", "P186")
async def test_a_stream_that_breaks_while_closed_raises_after_resume_and_a_cancel_goes_through(rig: StreamRig) -> None:
    running = await rig.started()
    await close(rig.owner)
    await rig.comes("a", ConnectionError("gone"))
    record = await rig.taken()
    assert (running.done(), "kept_replies" in record.payloads) == (False, False)
    await reopen(rig.owner)
    with pytest.raises(ConnectionError, match="gone"):
        await running
    second = rig.invoke()
    await spin()
    await close(rig.owner, 2)
    await retire(rig.owner, rig.port, R)
    with pytest.raises(StaleAttempt):
        await second
    assert rig.open_streams == 0


@pytest.mark.behaviour("P186")
async def test_closing_a_session_that_reads_a_stream_does_not_wait_for_resume(rig: StreamRig) -> None:
    running = await rig.started()
    await close(rig.owner)
    await rig.owner.close_session(R, "k")
    with pytest.raises(StaleAttempt):
        await running
    assert (rig.owner.is_ready(), rig.open_streams) == (True, 0)


@pytest.mark.behaviour("P184")
async def test_a_loop_that_stops_reading_while_closed_stays_until_resume(rig: StreamRig) -> None:
    left: list[str] = []

    async def loop(session: SessionContext, state: Any) -> Any:
        await session.boundary({"turn": 0})
        async with rig.policy.stream(session, "/v1/responses", {}) as events:
            async for event in events:
                if event == "enough":
                    break
        left.append("left")

    await rig.seed()
    running = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    await close(rig.owner)
    await rig.comes("enough")
    record = await rig.taken()
    assert (left, rig.open_streams, "kept_replies" in record.payloads) == ([], 0, False)
    await reopen(rig.owner)
    await running
    assert left == ["left"]


class SlowHead(StreamRig):
    """Its stream begins only when `head` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.head = asyncio.Event()

    @asynccontextmanager
    async def open_stream(self, request: PolicyRequest) -> AsyncIterator[StreamReply]:
        await self.head.wait()
        async with super().open_stream(request) as reply:
            yield reply


@pytest.mark.behaviour("P184", "P186")
async def test_a_failed_stream_that_came_while_closed_is_not_kept() -> None:
    """The session goes on from its boundary, and asks again after a restore."""
    rig = SlowHead()
    rig.status, rig.failure = 500, "overloaded"
    running = await rig.started()
    await close(rig.owner)
    rig.head.set()
    await rig.comes("half", None)
    record = await rig.taken()
    assert (running.done(), "kept_replies" in record.payloads) == (False, False)
    await reopen(rig.owner)
    assert await running == [500, ["half"]]
    other = StreamRig()
    await restore(other.owner, [record])
    await reopen(other.owner)
    again = other.invoke(episode=R1)
    await other.comes("fresh", None)
    assert await again == [200, ["fresh"]]


@pytest.mark.behaviour("P185")
async def test_a_stream_of_a_server_whose_gate_was_never_seen_counts_as_running(rig: StreamRig) -> None:
    """Its own reply shows the gate, to the calls after it."""
    rig.policy.gated = False
    running = await rig.started()
    await rig.comes("a")
    assert rig.policy.gated
    await close(rig.owner)
    assert [each.reason for each in rig.owner.report(9).blockers] == [BlockerReason.RUNNING]
    assert "x-gymckpt-waiting" not in rig.requests[0].headers
    await rig.comes(None)
    await reopen(rig.owner)
    assert await running == [200, ["a"]]


@pytest.mark.behaviour("P44")
async def test_a_streamed_call_that_is_refused_raises_the_refusal_and_another_failure_is_told(rig: StreamRig) -> None:
    rig.status, rig.failure = 409, {"error": {"code": "STALE_ATTEMPT", "detail": "retired there"}}
    running = await rig.started()
    with pytest.raises(StaleAttempt, match="retired there"):
        await running
    rig.status, rig.failure = 500, "overloaded"
    await rig.comes(None)
    assert await rig.invoke() == [500, []]
    (record,) = await rig.checkpoint()
    assert (set(record.payloads), rig.open_streams) == ({"seed", "session"}, 0)


async def test_a_kept_stream_does_not_answer_a_call_that_wants_a_whole_reply(rig: StreamRig) -> None:
    running = await rig.started()
    await close(rig.owner)
    await rig.comes("a", None)
    record = await rig.taken()
    await reopen(rig.owner)
    await running
    other = StreamRig()
    await restore(other.owner, [record])
    await reopen(other.owner)

    async def loop(session: SessionContext, state: Any) -> Any:
        return (await other.policy.call(session, "/v1/responses", {"turn": 0})).body

    again = asyncio.create_task(other.owner.invoke(R1, "k", loop))
    await spin()
    await other.answer("whole")
    assert await again == "whole"


async def test_a_client_without_a_transport_for_streams_says_so(rig: StreamRig) -> None:
    async def loop(session: SessionContext, state: Any) -> Any:
        PolicyClient(rig.send, service="policy").stream(session, "/v1/responses", {})

    await rig.seed()
    with pytest.raises(UsageError, match="open_stream"):
        await rig.owner.invoke(R, "k", loop)


@pytest.mark.behaviour("P183", "P334")
async def test_a_call_still_under_way_beside_one_that_was_answered_holds_up_no_later_checkpoint(rig: StreamRig) -> None:
    """Two calls in parallel: the first one's reply comes in one checkpoint, the second one's only after the next.

    The first one is delivered, and the session still stands before it: so it is in the record, over two restores.
    """

    async def loop(session: SessionContext, state: Any) -> Any:
        await session.boundary({"turn": 0})
        calls = (rig.policy.call(session, "/v1/responses", {"n": number}) for number in range(2))
        return sorted(reply.body for reply in await asyncio.gather(*calls))

    await rig.seed()
    running = asyncio.create_task(rig.owner.invoke(R, "k", loop))
    await spin()
    await close(rig.owner)
    await rig.answer("a")
    await reopen(rig.owner)
    await close(rig.owner, 2)
    record = await rig.taken()
    assert record.decode("boundary") == {"turn": 0}
    await rig.answer("b")
    await reopen(rig.owner)
    assert await running == ["a", "b"]
    for attempt in (R1, R2):
        other = StreamRig()
        rig.policy, rig.requests = other.policy, other.requests
        await restore(other.owner, [record])
        await reopen(other.owner)
        again = asyncio.create_task(other.owner.invoke(attempt, "k", loop))
        await spin()
        (record,) = await other.checkpoint()
        await other.answer("b")
        assert (await again, [each.body for each in other.requests]) == (["a", "b"], [{"n": 1}])
