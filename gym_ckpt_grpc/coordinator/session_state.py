"""What one process of a controller hands to the next, so that an open checkpoint or restore goes on.

It is data only, with a strict JSON form. Nothing in it is secret, and nothing in it is trusted: participants and the
root decide whether it still stands. Source: issue 3 item 3; coordination sections 7 and 8.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec

from gym_ckpt_grpc.coordinator.ledger import Draft, Part
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import OpaqueBlock
from gym_ckpt_grpc.storage.event_log import LoggedStep
from gymckpt.v1 import participant_pb2

FORMAT = "gymckpt.session"
VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Step(enum.Enum):
    """How far a checkpoint or a restore has come."""

    NEW = "new"
    PREPARING = "preparing"
    PREPARED = "prepared"
    CAPTURED = "captured"
    RELEASED = "released"
    COMMITTED = "committed"
    PUBLISHED = "published"
    RESTORED = "restored"
    ABANDONED = "abandoned"
    """Its process ended before it said how far it had come: it can only be ended."""
    ENDED = "ended"


class PinnedMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A participant that takes part. held: whether a lease was held there when this was written."""

    kind: ParticipantKind
    service: str
    instance: str
    incarnation_id: str
    address: str
    required: bool
    held: bool

    @property
    def identity(self) -> ParticipantIdentity:
        """Who it is, as pinned."""
        return ParticipantIdentity(self.kind, self.service, self.instance, self.incarnation_id)


class PartState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one participant's Commit replied, as far as a manifest needs it."""

    kind: ParticipantKind
    service: str
    instance: str
    incarnation_id: str
    manifest_digest: str
    record_count: Count
    restart_count: Count


class DraftState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A committed checkpoint before its aggregate manifest. Episodes are capture keys."""

    parts: tuple[PartState, ...]
    continued: tuple[str, ...]
    restarts: dict[str, str]
    excluded: dict[str, str]
    trainer: OpaqueBlock | None
    source_checkpoint: str
    policy_versions: dict[str, str]

    @classmethod
    def of(cls, draft: Draft) -> DraftState:
        """The state of a draft."""
        return cls(
            parts=tuple(_part_state(part) for part in draft.parts),
            continued=keys(draft.continued),
            restarts={episode.capture_key: reason for episode, reason in draft.restarts.items()},
            excluded=dict(draft.excluded),
            trainer=OpaqueBlock.of(draft.trainer) if draft.trainer else None,
            source_checkpoint=draft.source_checkpoint,
            policy_versions=dict(draft.policy_versions),
        )

    def draft(self, checkpoint_id: str, *, run_id: str, controller_id: str, epoch: int) -> Draft:
        """The draft again, equal in all that a manifest says."""
        return Draft(
            checkpoint_id=checkpoint_id,
            run_id=run_id,
            controller_id=controller_id,
            epoch=epoch,
            parts=tuple(_part(state) for state in self.parts),
            continued=episodes(self.continued),
            restarts={EpisodeId.from_capture_key(key): reason for key, reason in self.restarts.items()},
            excluded=self.excluded,
            trainer=self.trainer.payload() if self.trainer else None,
            source_checkpoint=self.source_checkpoint,
            policy_versions=self.policy_versions,
        )


class SessionState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One open checkpoint or restore of one controller.

    checkpoint_id: of the checkpoint, or of the restore itself. claim: number of the epoch's entry in the root.
    fleet: as `Fleet.to_mapping`. scope: capture keys, once fixed by a Capture. restarts, excluded, set_aside: what
    Prepare learned. base: the `base_checkpoint_uri` of its Commits, empty for none, null while it is not chosen.
    draft: once committed. source: the checkpoint that is restored; targets: as what it is
    installed. marks: rollout -> highest attempt retired and not forgotten. lease_left, written_at: seconds that the
    holder counted, and the wall clock when it did; for people only, never decided by. traceparent: of the span that it
    began with, for the trace; empty for none. began, heard, moments: for its event log.
    """

    format: Literal["gymckpt.session"] = "gymckpt.session"
    schema_version: Literal[1] = 1
    purpose: Literal["checkpoint", "restore"]
    checkpoint_id: Annotated[str, msgspec.Meta(min_length=1)]
    step: Step
    controller_id: str
    run_id: str
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    claim: Count
    root: str
    lease_ttl: Annotated[float, msgspec.Meta(gt=0)]
    fleet: dict[str, Any]
    members: tuple[PinnedMember, ...] = ()
    scope: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    excluded: dict[str, str] = {}
    set_aside: dict[str, str] = {}
    stop: bool = False
    on_stop: Literal["close", "retire"] = "close"
    base: str | None = None
    draft: DraftState | None = None
    sequence_number: Count = 0
    source: str = ""
    targets: tuple[str, ...] = ()
    source_checkpoint: str = ""
    marks: dict[str, Count] = {}
    lease_left: Seconds = 0.0
    written_at: float = 0.0
    traceparent: str = ""
    began: Seconds = 0.0
    heard: tuple[LoggedStep, ...] = ()
    moments: dict[str, float] = {}

    def to_json(self) -> bytes:
        """Indented JSON, followed by a newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> SessionState:
        """Read it back. Raises UsageError for another format, version or field."""
        try:
            state = msgspec.json.decode(data, type=cls)
            episodes((*state.scope, *state.restarts, *state.set_aside, *state.targets))
        except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
            raise UsageError(f"this is no session of version {VERSION}: {error}") from error
        return state


def keys(chosen: tuple[EpisodeId, ...] | list[EpisodeId]) -> tuple[str, ...]:
    """Capture keys, order kept."""
    return tuple(episode.capture_key for episode in chosen)


def episodes(chosen: tuple[str, ...]) -> tuple[EpisodeId, ...]:
    """Episodes of capture keys, order kept. Raises ValueError."""
    return tuple(EpisodeId.from_capture_key(key) for key in chosen)


def _part_state(part: Part) -> PartState:
    who = part.identity
    return PartState(
        kind=who.kind,
        service=who.service,
        instance=who.instance,
        incarnation_id=who.incarnation_id,
        manifest_digest=part.reply.manifest_digest,
        record_count=part.reply.record_count,
        restart_count=part.reply.restart_count,
    )


def _part(state: PartState) -> Part:
    reply = participant_pb2.CommitResponse(
        manifest_digest=state.manifest_digest, record_count=state.record_count, restart_count=state.restart_count
    )
    return Part(ParticipantIdentity(state.kind, state.service, state.instance, state.incarnation_id), reply)
