"""`GenerationCall`: one call of a policy model server, as the handler of its request sees it."""

from __future__ import annotations

from typing import Protocol

from gym_ckpt_grpc.control.generation import Continuation, CutEvidence
from gym_ckpt_grpc.participants.tickets import Ticket


class CallReports(Protocol):
    """Who hears how a call goes on."""

    def registered(self, ticket: Ticket) -> None:
        """Its backend was sent the request."""

    def finished(self, ticket: Ticket, evidence: CutEvidence) -> None:
        """Its generation is complete and durable."""


class GenerationCall:
    """One generation, from the moment its effective request is known.

    call_id: a new id, to ride in the capture admission as the model call id. Without a ticket, as for an untagged
    call, it is inert: nothing is counted, nothing continued.
    """

    __slots__ = ("_reports", "_ticket", "call_id", "continuation", "request_digest", "restart_reason")

    def __init__(self, call_id: str, ticket: Ticket | None = None, reports: CallReports | None = None) -> None:
        self.call_id = call_id
        self.request_digest = ticket.request_digest if ticket else ""
        self.restart_reason = ticket.restart_reason if ticket else ""
        self.continuation: Continuation | None = ticket.continuation if ticket else None
        self._ticket = ticket
        self._reports = reports

    def registered(self) -> None:
        """The backend has been sent the request: from now on a checkpoint may ask it for a cut."""
        if self._ticket is not None and self._reports is not None and self._current(self._ticket):
            self._reports.registered(self._ticket)

    def finished(self, evidence: CutEvidence) -> None:
        """The generation is complete, and its tokens are durable under the coordinates of `evidence`.

        To be called before the head of the reply is sent, or before the last events of a stream are. If a checkpoint
        finds the reply undelivered, it has the whole of it. Evidence that is not complete is logged and not used.
        """
        if self._ticket is not None and self._reports is not None and self._current(self._ticket):
            self._reports.finished(self._ticket, evidence)

    def _current(self, ticket: Ticket) -> bool:
        """Whether the request was not begun anew since, at another backend."""
        return ticket.call_id == self.call_id
