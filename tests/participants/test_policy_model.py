"""The policy model's gate behind the middleware: tickets, held replies, streams, untagged calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from gym_ckpt_grpc.control.ports import EpisodeListKind
from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.participants import PolicyModelOwner
from gym_ckpt_grpc.protocol.errors import InvalidArgument, InvalidPhase, OutOfTime, RetireIncomplete
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import (
    R1,
    R2,
    App,
    Call,
    FakePort,
    R,
    S,
    call,
    close,
    exported,
    listed,
    reopen,
    restore,
    retire,
    spin,
)

RESPONSES = "/v1/responses"
STREAM = "/v1/messages"
WAITING = {"x-gymckpt-waiting": "1"}


class Rig:
    """A policy server whose calls end when `go` is set, or stream what is put into `pieces`."""

    def __init__(self) -> None:
        self.owner = PolicyModelOwner()
        self.port = FakePort(ParticipantKind.POLICY_MODEL)
        self.owner.attach(self.port)
        self.go = asyncio.Event()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.app = App({RESPONSES: self.answer, STREAM: self.stream, "/models": self.answer, "/health": self.ok})
        self.served = CheckpointMiddleware(self.app, self.owner.gate())

    async def ok(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        return 200, {}, "ok"

    async def answer(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        await self.go.wait()
        return 200, {"content-length": "4"}, "ok"

    async def stream(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        async def events() -> AsyncIterator[bytes]:
            while (piece := await self.pieces.get()) is not None:
                yield piece

        return 200, {"content-type": "text/event-stream; charset=utf-8"}, events()

    def call(self, episode: EpisodeId | None, path: str = RESPONSES, headers: Mapping[str, str] | None = None) -> Call:
        return call(self.served, f"/rollout/{episode}{path}" if episode else path, {}, headers=headers)

    def counts(self, *names: str) -> tuple[int, ...]:
        counts = self.owner.report(9).counts
        return tuple(counts[name] for name in names)

    def reasons(self) -> list[tuple[BlockerReason, EpisodeId | None]]:
        return [(each.reason, each.episode) for each in self.owner.report(9).blockers]


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.behaviour("P96")
async def test_a_new_tagged_call_while_closed_waits_and_is_served_after_resume(rig: Rig) -> None:
    rig.go.set()
    await close(rig.owner)
    held = rig.call(R)
    await spin()
    assert (rig.counts("inflight", "waiting"), rig.app.seen, rig.owner.is_ready()) == ((0, 1), [], True)
    await reopen(rig.owner)
    assert (await held.end()).json() == "ok"
    assert (rig.counts("inflight", "waiting"), rig.app.seen) == ((0, 0), [RESPONSES])


@pytest.mark.behaviour("P97")
async def test_a_waiting_call_is_refused_when_its_attempt_is_retired(rig: Rig) -> None:
    await close(rig.owner)
    held = rig.call(R)
    await spin()
    await retire(rig.owner, rig.port, R)
    answer = await held.end()
    assert (answer.status, answer.code, rig.app.seen) == (409, "STALE_ATTEMPT", [])


@pytest.mark.behaviour("P98")
async def test_a_call_in_flight_does_not_block_and_its_reply_is_delivered_after_resume_only(rig: Rig) -> None:
    running = rig.call(R)
    await spin()
    await close(rig.owner)
    assert (rig.counts("inflight", "held"), rig.owner.is_ready()) == ((1, 1), True)
    rig.go.set()
    await spin()
    assert (running.answer.status, rig.counts("inflight", "held", "held_bytes")) == (0, (1, 1, 4))
    await reopen(rig.owner)
    assert (await running.end()).json() == "ok"
    assert rig.counts("inflight", "held", "held_bytes") == (0, 0, 0)


async def test_a_held_reply_overtaken_by_a_new_close_stays_held(rig: Rig) -> None:
    running = rig.call(R)
    await spin()
    await close(rig.owner)
    rig.go.set()
    await spin()
    rig.owner.admission.open()
    rig.owner.gate().open()
    await close(rig.owner, 2)
    await spin()
    assert running.answer.status == 0
    await reopen(rig.owner)
    assert (await running.end()).status == 200


@pytest.mark.behaviour("P99")
async def test_an_untagged_call_passes_while_closed_and_survives_every_retire(rig: Rig) -> None:
    before = rig.call(None)
    await spin()
    await close(rig.owner)
    during = rig.call(None)
    await spin()
    assert (rig.counts("untagged", "inflight", "held"), rig.owner.is_ready()) == ((2, 0, 0), True)
    await retire(rig.owner, rig.port, R)
    rig.go.set()
    assert [(await each.end()).status for each in (before, during)] == [200, 200]
    assert rig.counts("untagged") == (0,)


@pytest.mark.behaviour("P101")
async def test_a_malformed_capture_key_is_an_invalid_argument(rig: Rig) -> None:
    answer = await call(rig.served, "/rollout/.bad/v1/responses").end()
    assert (answer.status, answer.code, rig.app.seen) == (400, "INVALID_ARGUMENT", [])


@pytest.mark.behaviour("P102")
async def test_every_reply_carries_the_gate_header(rig: Rig) -> None:
    """Tagged, untagged, other routes, health, and refusals of every kind."""
    rig.go.set()
    rig.port.marks.raise_to(S)
    calls = [rig.call(R), rig.call(None), rig.call(R, "/models"), call(rig.served, "/health"), rig.call(S)]
    calls.append(call(rig.served, "/rollout/.bad/v1/responses"))
    answers = [await each.end() for each in calls]
    assert [each.status for each in answers] == [200, 200, 200, 200, 409, 400]
    assert {each.headers["x-gymckpt-gate"] for each in answers} == {"policy/inc"}


@pytest.mark.behaviour("P103")
async def test_a_retire_replies_only_after_the_running_generation_is_cancelled(rig: Rig) -> None:
    """And leaves later attempts and other rollouts alone."""
    running, later, other = rig.call(R), rig.call(R2), rig.call(S)
    await spin()
    await retire(rig.owner, rig.port, R1)
    assert rig.counts("inflight") == (2,)
    answer = await running.end()
    assert (answer.status, answer.code) == (409, "STALE_ATTEMPT")
    rig.go.set()
    assert [(await each.end()).status for each in (later, other)] == [200, 200]


async def test_a_retire_also_cancels_a_held_reply(rig: Rig) -> None:
    running = rig.call(R)
    await spin()
    await close(rig.owner)
    rig.go.set()
    await spin()
    await retire(rig.owner, rig.port, R)
    assert (await running.end()).code == "STALE_ATTEMPT"
    assert (rig.counts("inflight", "held_bytes"), rig.owner.is_ready()) == ((0, 0), True)


async def test_a_retire_cut_short_blocks_and_vetoes_forget(rig: Rig) -> None:
    stuck = asyncio.Event()

    async def stubborn(scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        try:
            await asyncio.Event().wait()
        finally:
            await stuck.wait()
        return 200, {}, None

    rig.app.routes[RESPONSES] = stubborn
    running = rig.call(R)
    await spin()
    for _ in range(2):
        with pytest.raises(OutOfTime):
            await retire(rig.owner, rig.port, R, seconds=0)
    assert rig.reasons() == [(BlockerReason.RETIRING, R)]
    with pytest.raises(RetireIncomplete):
        rig.owner.check_forget("r", 0)
    stuck.set()
    await retire(rig.owner, rig.port, R)
    rig.owner.check_forget("r", 0)
    assert (await running.end()).code == "STALE_ATTEMPT"


@pytest.mark.behaviour("P94")
async def test_a_reply_already_streaming_without_the_waiting_header_blocks_and_ends_unmodified(rig: Rig) -> None:
    running = rig.call(R, STREAM)
    rig.pieces.put_nowait(b"data: 1\n\n")
    await spin()
    await close(rig.owner)
    assert rig.reasons() == [(BlockerReason.STREAMING_RESPONSE, R)]
    rig.pieces.put_nowait(b"data: 2\n\n")
    rig.pieces.put_nowait(None)
    await running.end()
    assert (running.answer.body, rig.owner.is_ready()) == (b"data: 1\n\ndata: 2\n\n", True)
    await spin()
    assert rig.port.changes > 0


@pytest.mark.behaviour("P95")
async def test_a_stream_of_a_waiting_caller_is_paused_between_two_events(rig: Rig) -> None:
    """It does not block, and its bytes are those of an undisturbed run."""
    running = rig.call(R, STREAM, WAITING)
    rig.pieces.put_nowait(b"data: 1\n\ndata: ")
    await spin()
    await close(rig.owner)
    rig.pieces.put_nowait(b"2\n\n")
    rig.pieces.put_nowait(b"data: 3\n\n")
    rig.pieces.put_nowait(None)
    await spin()
    assert running.answer.body == b"data: 1\n\ndata: 2\n\n"
    assert (rig.counts("paused", "held", "held_bytes"), rig.owner.is_ready()) == ((1, 1, 9), True)
    await reopen(rig.owner)
    await running.end()
    assert running.answer.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
    assert rig.counts("paused", "held", "held_bytes", "inflight") == (0, 0, 0, 0)


@pytest.mark.behaviour("P110")
async def test_without_a_ledger_there_are_no_records(rig: Rig) -> None:
    """Scope `all` is refused naming it, an export is empty, and rows to restore are INVALID_PHASE."""
    with pytest.raises(InvalidArgument) as caught:
        await exported(rig.owner)
    assert caught.value.violations[0].field == "scope"
    assert await exported(rig.owner, EpisodeScope.of([R])) == []
    with pytest.raises(InvalidPhase) as refused:
        await rig.owner.stage([Record(R, "gymckpt.policy_model")], RestoreScope.plan([R]))
    assert refused.value.episodes == (R,)


@pytest.mark.behaviour("P119")
async def test_a_restored_target_is_pending_until_its_first_admitted_call(rig: Rig) -> None:
    """A held call does not start it; started, it is neither pending nor deleted."""
    rig.go.set()
    s1 = EpisodeId("s", 1)
    await restore(rig.owner, [], [R, S])
    held = rig.call(R1)
    await spin()
    assert rig.owner.restored_pending() == {R1, s1}
    assert await listed(rig.owner, EpisodeListKind.RESTORED_PENDING) == [R1, s1]
    await reopen(rig.owner)
    await held.end()
    await rig.owner.delete_restored(R1)
    assert rig.owner.restored_pending() == {s1}
    await rig.owner.delete_restored(s1)
    assert rig.owner.restored_pending() == frozenset()
    assert (await rig.call(s1).end()).status == 200


@pytest.mark.behaviour("P105")
async def test_counts_are_exact_at_every_moment_of_random_arrivals(rig: Rig, rng: Any) -> None:
    """Against a count by hand of the calls that have not been answered."""
    rig.go.set()
    calls: list[Call] = []
    closed = False
    for _ in range(300):
        action = rng.random()
        if action < 0.4:
            calls.append(rig.call(R if rng.random() < 0.8 else None))
        elif action < 0.6:
            await (reopen(rig.owner) if closed else close(rig.owner))
            closed = not closed
        elif action < 0.7:
            rig.go.set()
        elif action < 0.8:
            rig.go.clear()
        await spin(20)
        counted = rig.counts("inflight", "waiting", "untagged")
        assert sum(counted) == sum(not each.task.done() for each in calls)
        assert rig.counts("held") == ((counted[0],) if closed else (0,))
    rig.go.set()
    await reopen(rig.owner)
    await asyncio.gather(*(each.end() for each in calls))
    assert rig.counts("inflight", "waiting", "held", "held_bytes", "untagged") == (0, 0, 0, 0, 0)
