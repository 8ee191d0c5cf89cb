"""`CutBook`: which undelivered calls of a closed policy model server have a cut, and which still wait for one.

It neither asks backends nor knows when: `cut_sweeps` does, and tells it what came back. Source: participants
section 8.1.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from gym_ckpt_grpc.control.generation import CallIdentity, CutAck, CutDisposition, CutEvidence, SweepHeader
from gym_ckpt_grpc.participants.blocking import Blocking, Clock
from gym_ckpt_grpc.participants.cut_ack import DURABLE, Cut, check_evidence
from gym_ckpt_grpc.participants.tickets import CallHooks, Ticket
from gym_ckpt_grpc.protocol.report import BlockerReason

PLACE = "generation_cut"
"""Where a call that is owed a disposition blocks."""

log = logging.getLogger(__name__)


class CutBook:
    """Cuts of one serving process, for the closing that is under way.

    undelivered: gives the calls that a checkpoint counts as not made. changed: told when readiness may have changed.
    backends: names of those that can be asked; without any the book stays shut. tries: failed cuts of a call after
    which it is not asked again, 1 and up. stands: told how many calls came to a disposition, each call once in a
    closing.
    """

    def __init__(
        self,
        hooks: CallHooks,
        blocking: Blocking,
        *,
        undelivered: Callable[[], Iterable[Ticket]],
        changed: Callable[[], None],
        clock: Clock,
        backends: Collection[str] = (),
        tries: int = 2,
        stands: Callable[[CutDisposition, int], None] = lambda disposition, calls: None,
    ) -> None:
        self.on_askable: Callable[[str], None] = lambda backend: None
        """Called with a backend's name when one more call can be asked about there."""
        self._hooks = hooks
        self._blocking = blocking
        self._undelivered = undelivered
        self._changed = changed
        self._clock = clock
        self._backends = frozenset(backends)
        self._tries = tries
        self._stands = stands
        self._told: set[str] = set()
        self._open = False
        self._asking = False
        self._calls: dict[str, Ticket] = {}  # of this closing, by ticket id, as the next three
        self._owed: dict[str, Ticket] = {}
        self._cut: set[str] = set()
        self._held: dict[tuple[str, str], str] = {}  # (backend, cut id): ticket id
        self._skipped: set[str] = set()  # undelivered calls with a restart reason, also while open

    # ---- a closing

    def begin(self) -> None:
        """Admission has closed for a checkpoint: undelivered calls are owed a disposition, which blocks."""
        self._open = self._asking = bool(self._backends)
        if not self._open:
            return
        for ticket in self._undelivered():
            if ticket.retired or ticket.restart_reason:
                continue
            self._calls[ticket.id] = ticket
            if ticket.own_evidence is not None:
                self._cut_by_own(ticket, ticket.own_evidence)
            else:
                self._owe(ticket)
        self._changed()

    def expire(self) -> None:
        """The time for cuts is spent: what is still owed has failed, and does not block any more."""
        self._asking = False
        for ticket in list(self._owed.values()):
            ticket.disposition = CutDisposition.FAILED
            self._settle(ticket)

    def end(self) -> None:
        """Admission opens: the cuts of this closing are forgotten, and the calls simply go on."""
        self._tell(self._calls.values())
        self._told.clear()
        self._open = self._asking = False
        for ticket in list(self._calls.values()):
            self._forget(ticket)

    def settled(self) -> None:
        """The records of this closing are durable. Of a checkpoint that stops the run admission never opens."""
        self._tell(ticket for ticket in self._calls.values() if not ticket.owed)

    def _tell(self, tickets: Iterable[Ticket]) -> None:
        """Tell what calls came to: each once in a closing, however often it was asked about."""
        known = (ticket for ticket in tickets if ticket.disposition is not CutDisposition.UNSPECIFIED)
        news = {ticket.id: ticket.disposition for ticket in known if ticket.id not in self._told}
        self._told.update(news)
        for disposition, calls in Counter(news.values()).items():
            self._stands(disposition, calls)

    def counts(self) -> tuple[int, int]:
        """Undelivered calls with a durable cut, and those with a restart reason."""
        return len(self._cut), len(self._skipped)

    @property
    def is_open(self) -> bool:
        """Whether cuts are made in this closing."""
        return self._open

    # ---- calls

    def begun(self, ticket: Ticket) -> None:
        """Digest, backend and restart reason of a call are known."""
        if not ticket.undelivered:
            return
        if ticket.restart_reason:
            self._skipped.add(ticket.id)
            self._forget(ticket)
        elif self._open and not ticket.retired:
            self._calls[ticket.id] = ticket
            self._owe(ticket)

    def begins_anew(self, ticket: Ticket) -> None:
        """The request goes to a backend once more: what was known of the first time counts no more."""
        self._drop_cut(ticket, release=True)
        self.dropped(ticket)
        ticket.own_evidence = None
        ticket.registered = False

    def registered(self, ticket: Ticket) -> None:
        """The backend was sent the request."""
        ticket.registered = True
        if ticket.owed:
            self.on_askable(ticket.backend)

    def finished(self, ticket: Ticket, evidence: CutEvidence) -> None:
        """Its generation is complete. While closed this is its cut, which replaces any other."""
        if problem := check_evidence(CutDisposition.FINISHED, evidence):
            log.warning("coordinates of call %s of %s are not used: %s", ticket.call_id, ticket.episode, problem)
            return
        ticket.own_evidence = evidence
        if ticket.id in self._calls:
            self._cut_by_own(ticket, evidence)

    def generation_failed(self, ticket: Ticket) -> None:
        """Its reply will be an error: no backend has anything of it to cut."""
        if ticket.owed:
            ticket.disposition = CutDisposition.FAILED
            self._settle(ticket)

    def dropped(self, ticket: Ticket) -> None:
        """The call is delivered, retired or has ended."""
        self._skipped.discard(ticket.id)
        self._forget(ticket)

    # ---- for sweeps

    def inventory(self, backend: str) -> list[tuple[CallIdentity, float]]:
        """The calls to ask a backend about now, with their ages in seconds, in the order of their admission."""
        now = self._clock()
        return [
            (ticket.identity(), max(0.0, now - ticket.admitted_at))
            for ticket in self._owed.values()
            if ticket.registered and ticket.backend == backend
        ]

    def accept(self, backend: str, header: SweepHeader, ack: CutAck) -> CutDisposition:
        """A valid acknowledgement that came in time; gives what it came to. What nobody wants any more is given up."""
        ticket = self._find(ack.call)
        if ticket is None or (ticket.cut is not None and ticket.cut.own):
            self.unwanted(backend, ack)
        elif ack.disposition in DURABLE and ack.evidence is not None:
            cut = Cut(backend, header.incarnation_id, header.snapshot_id, ack.evidence)
            return self._cut_by_backend(ticket, cut, ack)
        elif ack.disposition is CutDisposition.FAILED:
            self.failed(ack.call, ack.reason)
        elif ticket.owed:
            ticket.disposition = ack.disposition
            if ack.disposition is CutDisposition.UNCUTTABLE:
                log.info("call %s of %s cannot be cut: %s", ticket.call_id, ticket.episode, ack.reason)
                self._settle(ticket)
        return ack.disposition

    def failed(self, call: CallIdentity, why: str, *, for_good: bool = False) -> None:
        """A try to cut a call failed, or what it gave was taken back. It is asked again while tries are left, unless
        `for_good`."""
        ticket = self._find(call)
        if ticket is None or not (ticket.owed or (ticket.cut is not None and not ticket.cut.own)):
            return  # it is settled already
        self._drop_cut(ticket, release=True)
        ticket.tries += 1
        ticket.disposition = CutDisposition.FAILED
        if for_good or ticket.tries >= self._tries:
            log.warning("call %s of %s has no cut: %s", ticket.call_id, ticket.episode, why)
            self._settle(ticket)
        else:
            log.info("cutting call %s of %s failed, it is asked again: %s", ticket.call_id, ticket.episode, why)
            self._owe(ticket)

    def unwanted(self, backend: str, ack: CutAck) -> None:
        """An acknowledgement that came late or does not stand: its cut, if it made one, is given up."""
        if ack.evidence is not None and ack.evidence.cut_id and (backend, ack.evidence.cut_id) not in self._held:
            self._hooks.release(backend, [ack.evidence.cut_id])

    # ---- inside

    def _find(self, call: CallIdentity) -> Ticket | None:
        """The call, if it is still undelivered and was not begun anew."""
        ticket = self._calls.get(call.ticket_id)
        return ticket if ticket is not None and ticket.call_id == call.model_call_id else None

    def _owe(self, ticket: Ticket) -> None:
        if not self._asking:
            return
        ticket.owed = True
        self._owed[ticket.id] = ticket
        self._blocking.set(ticket.number, BlockerReason.RUNNING, ticket.episode, PLACE)
        self._changed()

    def _settle(self, ticket: Ticket) -> None:
        """The call is owed nothing any more."""
        if self._owed.pop(ticket.id, None) is None:
            return
        ticket.owed = False
        self._blocking.clear(ticket.number)
        self._changed()

    def _cut_by_backend(self, ticket: Ticket, cut: Cut, ack: CutAck) -> CutDisposition:
        named = (cut.backend, cut.evidence.cut_id)
        if self._held.get(named, ticket.id) != ticket.id:
            self.failed(ack.call, "the backend gave it the cut of another call")
            return CutDisposition.FAILED
        if not self._hooks.cut_made(cut.backend, cut.evidence.cut_id, ticket.call_id):
            self.failed(ack.call, "the backend gave it a cut that is being given up")
            return CutDisposition.FAILED
        self._take(ticket, cut, ack.disposition)
        self._held[named] = ticket.id
        return ack.disposition

    def _cut_by_own(self, ticket: Ticket, evidence: CutEvidence) -> None:
        self._take(ticket, Cut(ticket.backend, "", "", evidence, own=True), CutDisposition.FINISHED)

    def _take(self, ticket: Ticket, cut: Cut, disposition: CutDisposition) -> None:
        self._drop_cut(ticket, release=ticket.cut is not None and ticket.cut.evidence.cut_id != cut.evidence.cut_id)
        ticket.cut = cut
        ticket.disposition = disposition
        self._cut.add(ticket.id)
        self._settle(ticket)

    def _drop_cut(self, ticket: Ticket, *, release: bool) -> None:
        cut, ticket.cut = ticket.cut, None
        self._cut.discard(ticket.id)
        if cut is None or cut.own:
            return
        del self._held[cut.backend, cut.evidence.cut_id]
        if release:
            self._hooks.release(cut.backend, [cut.evidence.cut_id])

    def _forget(self, ticket: Ticket) -> None:
        """Take the call off the book. Its cut is not released: the owner knows whether a checkpoint names it."""
        if self._calls.pop(ticket.id, None) is None:
            return
        self._settle(ticket)
        self._drop_cut(ticket, release=False)
        ticket.tries = 0
        ticket.disposition = CutDisposition.UNSPECIFIED
