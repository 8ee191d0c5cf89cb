"""Between release and durability: the fleet works on, its frozen records are in memory, and no lease covers them.

Whatever goes wrong there takes nothing from anybody but this checkpoint: the newest published one stands, and that
is said. Source: coordination sections 4 and 7.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from gym_ckpt_grpc.coordinator import ledger
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import CommitFailed, FleetError
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.reopening import Reopening
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import ControlError, GymCkptError, LeaseLost
from gymckpt.v1 import participant_pb2

RELEASE_SHARE = 1 / 3
"""Of `lease_ttl`, how long a Resume that keeps records is waited for: the Commit has to be sent in the rest of it."""
DROP_LIMIT = 2.0
"""Seconds in which participants are told that what they kept is not needed any more."""
READ_LIMIT = 5.0
"""Seconds for reading which checkpoint is the newest; it is told, never decided by."""


def release_limit(session: Session) -> float:
    """Seconds to wait for the Resumes that keep records; one that does not answer goes on in the background."""
    return min(session.settings.exit_timeout, session.lease_ttl * RELEASE_SHARE)


def require_kept(session: Session, reopening: Reopening) -> None:
    """Raise LeaseLost if the records may be dropped already, by the count of this side."""
    kept = session.renewal.holds.clock() - (reopening.begun or 0.0)
    if reopening.begun is not None and kept >= session.lease_ttl:
        raise LeaseLost(
            f"the fleet was released {kept:.1f} s ago, and its records are kept for {session.lease_ttl:.1f} s: "
            "no Commit was sent in that time"
        )


async def drop_kept(session: Session, checkpoint_id: str, members: Iterable[Member]) -> None:
    """Free the memory of records that are published; one that does not hear of it drops them after `lease_ttl`."""
    request = participant_pb2.ResumeRequest(context=session.context(checkpoint_id))
    with contextlib.suppress(ControlError):
        await session.ask(members, "Resume", lambda member, seconds: request, Deadline(DROP_LIMIT), pin=False)


async def newest(session: Session) -> str:
    """Which checkpoint is the newest published one, for people."""
    try:
        return await in_thread(
            lambda: ledger.newest_text(session.root), "reading the newest publication", Deadline(READ_LIMIT)
        )
    except ControlError as error:
        return f"the newest published checkpoint could not be read: {error.message}"


async def write_failed(session: Session, checkpoint_id: str, error: GymCkptError) -> tuple[GymCkptError, str]:
    """The error to be raised for a Commit that failed after the release, and its text; an event says so too."""
    text = f"released, but not durable: {error}; {await newest(session)}"
    session.events.add(EventKind.COMMIT, text, checkpoint_id=checkpoint_id)
    if isinstance(error, FleetError):
        return CommitFailed(text, error.outcomes), text
    error.add_note(text)
    return error, text
