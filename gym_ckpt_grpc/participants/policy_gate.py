"""The gate of a policy model server: tickets of generation calls, and replies that wait for Resume.

Source: participants sections 7.1 and 8.1.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from typing import Any, Literal

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import Continuation, CutDisposition
from gym_ckpt_grpc.participants.admission import HELD, Admission, GateRequest, Held, Visit, wait_for
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.constrained import restart_reason
from gym_ckpt_grpc.participants.cut_book import CutBook
from gym_ckpt_grpc.participants.generation_call import GenerationCall
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.reports import covers, run_side_by_side
from gym_ckpt_grpc.participants.request_digest import request_digest
from gym_ckpt_grpc.participants.tickets import CallHooks, Ticket
from gym_ckpt_grpc.protocol.errors import ControlError, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason

GENERATION_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Ends of the paths that generate; other routes pass."""

_PASS = Visit()

log = logging.getLogger(__name__)


class PolicyGate:
    """Tickets and held replies of one serving process.

    backends: names of the inference workers that calls may go to; without any, calls go where they like and nothing
    is cut. cut_tries: failed cuts of a call after which it is not asked again.
    """

    def __init__(
        self,
        admission: Admission,
        blocking: Blocking,
        names: DataPlaneNames,
        *,
        hooks: CallHooks,
        backends: Collection[str] = (),
        cut_tries: int = 2,
    ) -> None:
        self.names = names
        self.untagged = 0
        self.cuts = CutBook(
            hooks,
            blocking,
            undelivered=self.undelivered,
            changed=admission.changed,
            clock=admission.clock,
            backends=backends,
            tries=cut_tries,
            stands=self._cut_stands,
        )
        self._admission = admission
        self._blocking = blocking
        self._hooks = hooks
        self._backends = frozenset(backends)
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

    def refused(self, error: ControlError) -> None:
        self._admission.refused(error)

    def _cut_stands(self, disposition: CutDisposition, calls: int) -> None:
        if self._admission.attached:
            self._admission.port.recorder.event("generation_cut", times=calls, disposition=disposition.name.lower())

    def _attempt(self, request: GateRequest, episode: EpisodeId) -> Ticket | Literal[Held.HELD]:
        self._admission.check_mark(episode)
        if self._admission.closed or self._hooks.held_back(episode):
            return HELD
        waits = self.names.is_waiting(request.headers)
        now = self._admission.clock()
        ticket = Ticket(self, next(self._numbers), episode, request.path, waiting_caller=waits, now=now)
        self._tickets[ticket.number] = ticket
        self._by_rollout.setdefault(episode.rollout_id, {})[ticket.number] = ticket
        self._undelivered += 1
        self._hooks.admitted(episode)
        return ticket

    # ---- generations

    def begin_generation(self, visit: Visit, body: Mapping[str, Any], *, backend: str, model: str) -> GenerationCall:
        """A handler knows the effective request of a call, and which backend it will go to.

        body: after server defaults, without anything that names the attempt; read now, and once. A call that is begun
        again, at another backend, is a new one. Raises UsageError for an unknown backend, TypeError for a body that
        is no JSON. A visit that is no tagged call, or has ended already, gives an inert call.
        """
        call_id = uuid.uuid4().hex
        if not isinstance(visit, Ticket) or visit.ended.done():
            return GenerationCall(call_id)
        if self._backends and backend not in self._backends:
            raise UsageError(f"there is no backend {backend!r}; there are {', '.join(sorted(self._backends))}")
        digest, reason = request_digest(dict(body)), restart_reason(body)
        if visit.call_id:
            self._left(visit, delivered=False)
            self.cuts.begins_anew(visit)
        visit.call_id, visit.backend, visit.model = call_id, backend, model
        visit.request_digest, visit.restart_reason = digest, reason
        visit.continuation = None if reason else self._lease(visit)
        self.cuts.begun(visit)
        return GenerationCall(call_id, visit, self.cuts)

    def call_named(self, visit: Visit, call_id: str) -> None:
        """A server that makes its own call ids, and begins no generations here, says which one a call has.

        Before its ledger has a row of the call: that row is left out of a checkpoint while the reply is undelivered.
        A visit that is no tagged call, or has ended already, has no use for it.
        """
        if isinstance(visit, Ticket) and not visit.ended.done():
            visit.call_id = call_id

    def _lease(self, ticket: Ticket) -> Continuation | None:
        try:
            return self._hooks.lease(ticket)
        except Exception:
            log.exception("no restored cut for a call of %s: claiming one failed", ticket.episode)
            return None

    def _left(self, ticket: Ticket, *, delivered: bool) -> None:
        try:
            self._hooks.left(ticket, delivered)
        except Exception:
            log.exception("settling the lease of a call of %s failed", ticket.episode)

    def generation_failed(self, ticket: Ticket) -> None:
        """The reply will be an error: there is nothing to cut."""
        self.cuts.generation_failed(ticket)

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
            self.cuts.dropped(ticket)
            if not ticket.retired:
                self._blocking.set(ticket.number, BlockerReason.STREAMING_RESPONSE, ticket.episode, ticket.path)
        self._admission.changed()

    def reply_sent(self, ticket: Ticket) -> None:
        """The whole reply was sent: nothing of it can be paused any more."""
        if ticket.pausable:
            ticket.pausable = False
            self._undelivered -= 1
            self.cuts.dropped(ticket)
            self._admission.changed()

    def open(self) -> None:
        """Forget the cuts of this closing, and let the held replies go, in the order they came."""
        self.cuts.end()
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
        self._left(ticket, delivered=ticket.was_delivered)
        self.cuts.dropped(ticket)
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
            self.cuts.dropped(ticket)
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

    @property
    def held_replies(self) -> int:
        """Replies that wait for the opening: whole ones, and streams that stand still."""
        return len(self._sleepers)

    def counts(self) -> dict[str, int]:
        """inflight: tickets. held: undelivered ones while closed. paused: streams that stand still.

        Of the held ones: cut have a durable cut, cut_skipped have a restart reason, cut_failed are all others, if
        cuts are made in this closing.
        """
        held = self._undelivered if self._admission.closed else 0
        cut, skipped = self.cuts.counts()
        return {
            "inflight": len(self._tickets),
            "held": held,
            "paused": self._paused,
            "held_bytes": self._held_bytes,
            "cut": cut,
            "cut_failed": held - cut - skipped if self.cuts.is_open else 0,
            "cut_skipped": skipped if self._admission.closed else 0,
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
