"""`Ticket`: one admitted tagged call of a policy model server, and what its owner does about it.

Source: participants sections 7.1 and 8.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from gym_ckpt_grpc.control.generation import CallIdentity, Continuation, CutDisposition, CutEvidence
from gym_ckpt_grpc.participants.admission import Cancellable, Reply, Visit
from gym_ckpt_grpc.participants.cut_ack import Cut
from gym_ckpt_grpc.protocol.ids import EpisodeId

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class CallHooks(Protocol):
    """What the owner of a policy model server does about its calls. All are called on the loop and must not wait."""

    def admitted(self, episode: EpisodeId) -> None:
        """A tagged call of this episode was admitted."""

    def held_back(self, episode: EpisodeId) -> bool:
        """Whether calls of this episode wait although admission is open."""

    def lease(self, ticket: Ticket) -> Continuation | None:
        """A restored cut that the call goes on from. Asked once its digest, backend and model are known; never for a
        call with a restart reason. An exception costs the continuation, not the call."""

    def left(self, ticket: Ticket, delivered: bool) -> None:
        """The call has ended, or begins again at a backend. delivered: its whole reply, a good one, was sent."""

    def cut_made(self, backend: str, cut_id: str, call_id: str) -> bool:
        """A backend gave a call a cut. Not told of cuts from a call's own coordinates. False if the cut cannot stand,
        since the backend is just being told to give it up."""

    def release(self, backend: str, cut_ids: Sequence[str]) -> None:
        """No call has these cuts any more, or none ever had: they were replaced, came late, or are not valid."""


class ReplyGate(Protocol):
    """What a ticket asks of its gate."""

    async def hold_reply(self, ticket: Ticket, size: int) -> None:
        """Wait while closed. size: bytes held."""

    def begin_reply(self, ticket: Ticket, *, pausable: bool) -> None:
        """The reply begins."""

    def reply_sent(self, ticket: Ticket) -> None:
        """The whole reply was sent."""

    def generation_failed(self, ticket: Ticket) -> None:
        """The reply will be an error: there is nothing to cut."""

    def leave(self, ticket: Ticket) -> None:
        """The call has ended."""


class Ticket(Visit):
    """One admitted tagged call, from admission to the end of its reply.

    number: order of admission, 1 and up. admitted_at: clock seconds. call_id, backend, model, request_digest: "" until
    the handler begins the generation; restart_reason: "" as well if it can be cut. registered: its backend was sent
    the request. tries: cuts of it that failed in this closing. disposition: the last that stands in this closing.
    own_evidence: coordinates of its finished generation. owed: a checkpoint waits for its disposition.
    """

    __slots__ = (
        "_gate",
        "_good",
        "admitted_at",
        "backend",
        "begun",
        "between_events",
        "call_id",
        "continuation",
        "cut",
        "disposition",
        "ended",
        "episode",
        "model",
        "number",
        "owed",
        "own_evidence",
        "path",
        "pausable",
        "registered",
        "request_digest",
        "restart_reason",
        "retired",
        "runs",
        "tries",
        "waiting_caller",
        "was_delivered",
    )

    def __init__(
        self, gate: ReplyGate, number: int, episode: EpisodeId, path: str, *, waiting_caller: bool, now: float
    ) -> None:
        self.number = number
        self.episode = episode
        self.path = path
        self.admitted_at = now
        self.waiting_caller = waiting_caller
        self.runs = Cancellable()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun = self.pausable = self.retired = self.was_delivered = False
        self.between_events = True
        self.call_id = self.backend = self.model = self.request_digest = self.restart_reason = ""
        self.registered = self.owed = False
        self.continuation: Continuation | None = None
        self.own_evidence: CutEvidence | None = None
        self.cut: Cut | None = None
        self.tries = 0
        self.disposition = CutDisposition.UNSPECIFIED
        self._gate = gate
        self._good = False

    @property
    def id(self) -> str:
        """Its name in sweeps."""
        return str(self.number)

    @property
    def undelivered(self) -> bool:
        """Whether a checkpoint counts this call as not made: its reply has not begun, or can be paused."""
        return not self.begun or self.pausable

    def identity(self) -> CallIdentity:
        """As an inventory names it."""
        return CallIdentity(self.id, self.episode, self.call_id, self.request_digest)

    # ---- Visit

    async def starting(self, reply: Reply) -> None:
        self._good = reply.status < 300
        if not self._good:
            self._gate.generation_failed(self)
        length = reply.headers.get("content-length", "")
        await self._gate.hold_reply(self, int(length) if length.isdigit() else 0)
        streams = reply.headers.get("content-type", "").partition(";")[0].strip() == "text/event-stream"
        self._gate.begin_reply(self, pausable=streams and self.waiting_caller)

    async def sending(self, body: bytes) -> None:
        if body and self.pausable and self.between_events:
            await self._gate.hold_reply(self, len(body))
        if body:
            self.between_events = body.endswith(_EVENT_ENDS)

    def delivered(self) -> None:
        self.was_delivered = self._good
        self._gate.reply_sent(self)

    def absorbs(self) -> bool:
        return self.runs.absorb()

    def leave(self) -> None:
        self._gate.leave(self)
