"""Where a checkpoint is written to, and on top of which: settled once, before the first Commit of it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gym_ckpt_grpc.coordinator import ledger
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import CommitFailed
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.incremental import Base, find_base
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.ids import EpisodeId


@dataclass(frozen=True, slots=True)
class Destination:
    """What every Commit of a checkpoint names, repeated ones too. base_uri: empty for none."""

    storage_uri: str
    base_uri: str


async def take_destination(
    session: Session,
    checkpoint_id: str,
    members: Sequence[Member],
    scope: Sequence[EpisodeId],
    deadline: Deadline,
    *,
    base_uri: str | None,
) -> Destination:
    """Write the intent, which takes the directory. base_uri: the one to use, or None to choose it here.

    Raises CommitFailed.
    """

    def take() -> tuple[str, Base | None]:
        uri = ledger.write_intent(
            session.root,
            checkpoint_id,
            run_id=session.run_id,
            controller_id=session.controller_id,
            epoch=session.epoch,
            members=members,
            scope=scope,
        )
        return uri, find_base(session.root, session.settings.max_chain) if base_uri is None else None

    try:
        storage_uri, chosen = await in_thread(take, "writing the intent", deadline)
    except ControlError as error:
        raise CommitFailed(f"the intent was not written: {error}") from error
    if chosen is None:
        return Destination(storage_uri, base_uri or "")
    session.events.add(EventKind.COMMIT, chosen.reason, checkpoint_id=checkpoint_id)
    return Destination(storage_uri, chosen.uri)
