"""The gate of a policy model server: tickets of generation calls, and replies that wait for Resume.

Source: participants section 7.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Literal

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.participants.admission import HELD, Admission, Cancellable, GateRequest, Held, Reply, Visit, wait_for
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.reports import covers, run_side_by_side
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason

GENERATION_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Ends of the paths that generate; other routes pass."""

_PASS = Visit()
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class Ticket(Visit):
    """One admitted tagged call, from admission to the end of its reply. number: order of admission, 1 and up."""

    __slots__ = (
        "_gate",
        "begun",
        "between_events",
        "ended",
        "episode",
        "number",
        "path",
        "pausable",
        "retired",
        "runs",
        "waiting_caller",
    )

    def __init__(self, gate: PolicyGate, number: int, request: GateRequest, episode: EpisodeId) -> None:
        self.number = number
        self.episode = episode
        self.path = request.path
        self.waiting_caller = gate.names.is_waiting(request.headers)
        self.runs = Cancellable()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun = False
        self.pausable = False
        self.between_events = True
        self.retired = False
        self._gate = gate

    @property
    def undelivered(self) -> bool:
        """Whether a checkpoint counts this call as not made: its reply has not begun, or can be paused."""
        return not self.begun or self.pausable

    async def starting(self, reply: Reply) -> None:
        length = reply.headers.get("content-length", "")
        await self._gate.hold_reply(self, int(length) if length.isdigit() else 0)
        streams = reply.headers.get("content-type", "").partition(";")[0].strip() == "text/event-stream"
        self._gate.begin_reply(self, pausable=streams and self.waiting_caller)

    async def sending(self, body: bytes) -> None:
        if self.pausable and self.between_events:
            await self._gate.hold_reply(self, len(body))
        if body:
            self.between_events = body.endswith(_EVENT_ENDS)

    def absorbs(self) -> bool:
        return self.runs.absorb()

    def leave(self) -> None:
        self._gate.leave(self)


class PolicyGate:
    """Tickets and held replies of one serving process. admitted: called with the episode of each admitted call."""

    def __init__(
        self,
        admission: Admission,
        blocking: Blocking,
        names: DataPlaneNames,
        *,
        admitted: Callable[[EpisodeId], None],
    ) -> None:
        self.names = names
        self.untagged = 0
        self._admission = admission
        self._blocking = blocking
        self._admitted = admitted
        self._numbers = count(1)
        self._tickets: dict[int, Ticket] = {}
        self._by_rollout: dict[str, dict[int, Ticket]] = {}
        self._sleepers: dict[asyncio.Future[None], None] = {}  # in the order they came
        self._undelivered = 0
        self._paused = 0
        self._held_bytes = 0

    # ---- Gate

    async def enter(self, request: GateRequest) -> Visit:
        """Admit, hold or refuse a call. Untagged calls and other routes pass."""
        if not request.path.endswith(GENERATION_PATHS):
            return _PASS
        episode = request.episode
        if episode is None:
            return _Untagged(self)
        return await self._admission.admit(lambda: self._attempt(request, episode), episode)

    def reply_headers(self) -> Mapping[str, str]:
        """Tells callers that this gate holds replies: `<service>/<incarnation_id>`."""
        if not self._admission.attached:
            return {}
        identity = self._admission.port.identity
        return {self.names.gate_header: f"{identity.service}/{identity.incarnation_id}"}

    def _attempt(self, request: GateRequest, episode: EpisodeId) -> Ticket | Literal[Held.HELD]:
        self._admission.check_mark(episode)
        if self._admission.closed:
            return HELD
        ticket = Ticket(self, next(self._numbers), request, episode)
        self._tickets[ticket.number] = ticket
        self._by_rollout.setdefault(episode.rollout_id, {})[ticket.number] = ticket
        self._undelivered += 1
        self._admitted(episode)
        return ticket

    # ---- replies

    async def hold_reply(self, ticket: Ticket, size: int) -> None:
        """Wait while closed; overtaken by a new close, wait for that one as well. size: bytes held."""
        if not self._admission.closed:
            return
        self._held_bytes += size
        if ticket.begun:
            self._paused += 1
        try:
            while self._admission.closed:
                await self._sleep()
        finally:
            self._held_bytes -= size
            if ticket.begun:
                self._paused -= 1

    async def _sleep(self) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers[sleeper] = None
        try:
            await sleeper
        finally:
            del self._sleepers[sleeper]

    def begin_reply(self, ticket: Ticket, *, pausable: bool) -> None:
        """The reply begins: from now on it is delivered, unless it can be paused."""
        ticket.begun, ticket.pausable = True, pausable
        if not pausable:
            self._undelivered -= 1
            if not ticket.retired:
                self._blocking.set(ticket.number, BlockerReason.STREAMING_RESPONSE, ticket.episode, ticket.path)
        self._admission.changed()

    def open(self) -> None:
        """Let the held replies go, in the order they came."""
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    def leave(self, ticket: Ticket) -> None:
        """The call has ended."""
        if self._tickets.pop(ticket.number, None) is None:
            return
        of_rollout = self._by_rollout[ticket.episode.rollout_id]
        del of_rollout[ticket.number]
        if not of_rollout:
            del self._by_rollout[ticket.episode.rollout_id]
        if ticket.undelivered:
            self._undelivered -= 1
        self._blocking.clear(ticket.number)
        if not ticket.ended.done():
            ticket.ended.set_result(None)
        self._admission.changed()

    # ---- retire, counts

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        """Cancel the calls of an attempt and earlier ones, once, and wait until they ended. Raises OutOfTime."""
        covered = [ticket for ticket in self.of_rollout(episode.rollout_id) if covers(episode, ticket.episode)]
        for ticket in covered:
            ticket.retired = True
            self._blocking.set(ticket.number, BlockerReason.RETIRING, ticket.episode, ticket.path)
            ticket.runs.cancel()
        self._admission.changed()
        await run_side_by_side(wait_for(each.ended, budget, f"a call of {each.episode}") for each in covered)

    def of_rollout(self, rollout_id: str) -> list[Ticket]:
        """The calls under way of a rollout, any attempt."""
        return list(self._by_rollout.get(rollout_id, {}).values())

    def undelivered(self) -> Iterable[Ticket]:
        """The calls that a checkpoint counts as not made."""
        return [ticket for ticket in self._tickets.values() if ticket.undelivered]

    def counts(self) -> dict[str, int]:
        """inflight: tickets. held: undelivered ones while closed. paused: streams that stand still."""
        return {
            "inflight": len(self._tickets),
            "held": self._undelivered if self._admission.closed else 0,
            "paused": self._paused,
            "held_bytes": self._held_bytes,
            "untagged": self.untagged,
        }


class _Untagged(Visit):
    """A call of no episode (a judge, a health evaluation): counted while it runs, and nothing else."""

    __slots__ = ("_gate",)

    def __init__(self, gate: PolicyGate) -> None:
        self._gate = gate
        gate.untagged += 1

    def leave(self) -> None:
        self._gate.untagged -= 1
