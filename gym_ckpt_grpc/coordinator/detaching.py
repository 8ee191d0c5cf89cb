"""Leaving a checkpoint or restore open for another process of the same controller, and going on with it there.

The lease at each participant bridges the two: it is renewed last before the one ends, and first when the next
begins. That a participant accepts that renewal proves that it has been closed without a break, since an id that was
resumed is never obeyed again. Nothing else about orders or outcomes is different. Source: issue 3 item 3.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fleet import Endpoint, Fleet, Server
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.coordinator.renewal import GONE
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.coordinator.session_state import PinnedMember, SessionState, Step
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import LeaseLost, StaleController, StateCorrupt
from gym_ckpt_grpc.storage import Claim
from gymckpt.v1 import participant_pb2

RENEW_LIMIT = 5.0
"""Seconds for the renewals between two processes; one that does not answer in time is asked again by the thread."""


def state_of(
    session: Session,
    fleet: Fleet,
    purpose: Literal["checkpoint", "restore"],
    checkpoint_id: str,
    *,
    step: Step,
    members: Sequence[Member],
    **known: Any,
) -> SessionState:
    """What another process needs to go on. known: fields that are of this purpose only."""
    holds = {hold.member.name: hold for hold in session.renewal.holds.of(checkpoint_id)}
    held = {name: hold for name, hold in holds.items() if hold.accepted and hold.lost is None}
    now = session.renewal.holds.clock()
    return SessionState(
        purpose=purpose,
        checkpoint_id=checkpoint_id,
        step=step,
        controller_id=session.controller_id,
        run_id=session.run_id,
        epoch=session.epoch,
        claim=session.claim.number if session.claim else 0,
        root=session.root.uri,
        lease_ttl=session.lease_ttl,
        fleet=fleet.to_mapping(),
        members=tuple(_pinned(member, member.name in held) for member in members),
        marks=dict(session.marks),
        source_checkpoint=session.source_checkpoint,
        lease_left=round(max(0.0, min((hold.expires - now for hold in held.values()), default=0.0)), 3),
        written_at=round(time.time(), 3),
        **known,
    )


def _pinned(member: Member, held: bool) -> PinnedMember:
    who = member.identity
    return PinnedMember(
        kind=who.kind,
        service=who.service,
        instance=who.instance,
        incarnation_id=who.incarnation_id,
        address=member.address,
        required=member.required,
        held=held,
    )


async def go_on(session: Session, state: SessionState, deadline: Deadline) -> None:
    """Take the epoch of a state as this process's own. Raises StaleController if the root has a higher one."""
    session.claim = Claim(state.epoch, state.claim)
    session.marks.update(state.marks)
    session.source_checkpoint = state.source_checkpoint
    try:
        highest, _ = await in_thread(session.root.sequence.epoch, "reading the sequence", deadline)
    except StateCorrupt as error:  # participants fence by themselves, and a publication reads it again
        session.events.add(EventKind.TAKE_OVER, f"the sequence could not be read: {error}")
        return
    if highest > state.epoch:
        session.note(StaleController(f"epoch {state.epoch} was replaced by {highest}"))
        session.check()


def members_of(session: Session, state: SessionState) -> list[Member]:
    """The members as they were pinned; nobody is looked at."""
    members = []
    for pinned in state.members:
        server = Server(kind=pinned.kind, service=pinned.service, address=pinned.address, required=pinned.required)
        members.append(session.connections.member(Endpoint(server, pinned.address), pinned.identity))
        session.know(pinned.identity)
    return members


async def take_up(session: Session, state: SessionState, members: Sequence[Member], deadline: Deadline) -> None:
    """Hold the leases of a state again. One that is gone is lost: whatever needs it then raises LeaseLost.

    Raises StaleController.
    """
    held = {str(pinned.identity) for pinned in state.members if pinned.held}
    holders = [member for member in members if member.name in held]
    for member in holders:
        session.renewal.begin(member, state.checkpoint_id, state.lease_ttl)
    await renew(session, state.checkpoint_id, holders, deadline)


async def renew(
    session: Session, checkpoint_id: str, members: Sequence[Member], deadline: Deadline
) -> list[Outcome[Any]]:
    """Renew at all at once, so that the whole lease is left. Raises StaleController; a loss is a lost hold."""
    holds = session.renewal.holds
    held = [member for member in members if (hold := holds.get(member, checkpoint_id)) and hold.lost is None]
    request = participant_pb2.RenewLeaseRequest(context=session.context(checkpoint_id))
    outcomes = await session.ask(
        held, "RenewLease", lambda member, seconds: request, deadline.within(RENEW_LIMIT), lease_of=checkpoint_id
    )
    for member, outcome in zip(held, outcomes, strict=True):
        hold = holds.get(member, checkpoint_id)
        if hold and outcome.error and not outcome.transport and outcome.error.code in GONE:
            holds.lose(hold, LeaseLost(f"a renewal was refused: {outcome.error.message}", participant=member.name))
    return outcomes
