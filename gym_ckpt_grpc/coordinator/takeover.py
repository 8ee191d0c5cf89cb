"""What a coordinator does about checkpoints that it finds open. Source: coordination section 8.

It acts with its own, higher epoch and never prepares over them: one published in the sequence is resumed and
stands; any other is aborted, which on the wire is the same Resume. What a restore left pending is retired first,
since nobody here knows it.
"""

from __future__ import annotations

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.coordinator import ledger
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import RetireFailed
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.looking import Membership
from gym_ckpt_grpc.coordinator.reopening import Reopening
from gym_ckpt_grpc.coordinator.retiring import forget_everywhere, retire_everywhere
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase

RESTORES = frozenset({Phase.RESTORING, Phase.RESTORED})


async def settle_open(session: Session, found: Membership, deadline: Deadline) -> None:
    """End every checkpoint and restore found open, within one deadline. Raises StaleController."""
    for checkpoint_id in sorted(found.open_checkpoints()):
        phases = {
            wire.phase_from(s.status.phase)
            for s in found.sightings
            if s.status and s.status.active_checkpoint_id == checkpoint_id
        }
        pending: set[EpisodeId] = set()
        if phases & RESTORES:
            pending = await _retire_pending(session, found, checkpoint_id, deadline)
        verdict = await _verdict(session, checkpoint_id, deadline)
        text = f"found open in {', '.join(sorted(phase.name for phase in phases))}: {verdict}"
        session.events.add(EventKind.TAKE_OVER, text, checkpoint_id=checkpoint_id)
        await Reopening(session, checkpoint_id, found.members).run(deadline)
        session.check()
        if pending:
            rollouts = {episode.rollout_id: episode.attempt for episode in pending}
            await forget_everywhere(session, found.members, rollouts, deadline)


async def _verdict(session: Session, checkpoint_id: str, deadline: Deadline) -> str:
    try:
        number = await in_thread(
            lambda: ledger.publication_number(session.root, checkpoint_id), "reading the sequence", deadline
        )
    except StateCorrupt as error:
        return f"whether it is published cannot be read ({error.message}); reopened"
    return "not published, aborted" if number is None else f"published as number {number}, it stands"


async def _retire_pending(
    session: Session, found: Membership, checkpoint_id: str, deadline: Deadline
) -> set[EpisodeId]:
    """Free what an unknown restore installed; it is forgotten again once all is open."""
    pending: set[EpisodeId] = set()
    for member in found.members:
        listed = await session.list_episodes(member, EpisodeListKind.RESTORED_PENDING, deadline)
        pending.update(listed.reply or ())
    try:
        await retire_everywhere(session, found.members, pending, deadline, checkpoint_id=checkpoint_id)
    except RetireFailed as error:
        session.events.add(EventKind.TAKE_OVER, str(error), checkpoint_id=checkpoint_id)
    return pending
