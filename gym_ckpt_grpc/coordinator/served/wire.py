"""What a coordinator knows, as the messages of CoordinatorService."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.control.error_details import cut, to_message
from gym_ckpt_grpc.coordinator.events import Event
from gym_ckpt_grpc.coordinator.looking import Sighting
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.coordinator.result import CheckpointState
from gym_ckpt_grpc.coordinator.timing import Timing
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import MAX_LISTED
from gym_ckpt_grpc.storage import AggregateManifest, Codec, Found, IdentityBlock, Listed, OpaqueBlock
from gymckpt.v1 import coordinator_pb2 as pb
from gymckpt.v1 import errors_pb2, participant_pb2

TYPE_OF_BYTES = "application/octet-stream"
"""Content type of a trainer's block that came over the wire."""
LISTED_IN_ALL = 1000
"""Blockers, and restarts, that the outcomes of one reply list together."""


def error_of(error: ControlError | None) -> errors_pb2.ControlError | None:
    """The message of an error inside a reply, or None."""
    return None if error is None else to_message(error)


def outcomes_to(outcomes: Iterable[Outcome[Any]]) -> list[pb.ParticipantOutcome]:
    """One message per participant and operation; several calls to one (batches) are one."""
    chosen = list(outcomes)
    limit = max(10, LISTED_IN_ALL // max(1, len(chosen)))
    made: dict[tuple[str, str], pb.ParticipantOutcome] = {}
    for outcome in chosen:
        message, key = _outcome(outcome, limit), (outcome.operation, outcome.name)
        if (known := made.get(key)) is None:
            made[key] = message
            continue
        message.duration.CopyFrom(wire.duration(wire.seconds(known.duration) + outcome.duration))
        if known.HasField("error"):
            message.error.CopyFrom(known.error)
        made[key] = message
    return list(made.values())


def _outcome(outcome: Outcome[Any], limit: int) -> pb.ParticipantOutcome:
    reply = outcome.reply
    message = pb.ParticipantOutcome(
        participant=wire.identity_to(outcome.identity),
        operation=outcome.operation,
        error=error_of(outcome.error),
        duration=wire.duration(outcome.duration),
    )
    for field in ("phase", "record_count", "bytes", "manifest_digest"):
        if hasattr(reply, field):
            setattr(message, field, getattr(reply, field))
    if reply is not None and hasattr(reply, "report"):
        message.report.CopyFrom(_short(reply.report, limit))
    return message


def _short(report: participant_pb2.PrepareReport, limit: int) -> participant_pb2.PrepareReport:
    """The report with shorter lists; its counts stay exact."""
    short = participant_pb2.PrepareReport()
    short.CopyFrom(report)
    del short.blockers[limit:]
    del short.restarts.rollout_ids[limit:], short.restarts.attempts[limit:]
    return short


def server_status(sighting: Sighting) -> pb.ServerStatus:
    """What looking at one server found."""
    return pb.ServerStatus(
        address=sighting.address,
        finding=pb.ServerFinding.ValueType(int(sighting.finding)),
        status=sighting.status,
        message=cut(sighting.message),
    )


def event_to(event: Event, epoch: int) -> pb.CoordinatorEvent:
    """An event, its time as an age."""
    return pb.CoordinatorEvent(
        number=event.number,
        kind=pb.EventKind.ValueType(int(event.kind)),
        checkpoint_id=event.checkpoint_id,
        message=cut(event.message),
        participant=_named(event.participant),
        age=wire.duration(max(0.0, time.monotonic() - event.at)),
        epoch=epoch,
        state=state_to(event.state),
    )


def _named(name: str) -> participant_pb2.ParticipantIdentity | None:
    """The identity of `kind/service/instance`, as far as a name tells it."""
    parts = name.split("/")
    if len(parts) != 3 or parts[0] not in set(ParticipantKind):
        return None
    return wire.identity_to(ParticipantIdentity(ParticipantKind(parts[0]), parts[1], parts[2].partition("#")[0], ""))


def timing_to(timing: Timing) -> pb.CheckpointTiming:
    """How long it took so far; a moment that has not come is absent."""
    message = pb.CheckpointTiming()
    for operation in ("prepare", "capture", "commit", "publish", "resume"):
        getattr(message, operation).CopyFrom(wire.duration(getattr(timing, operation)))
    for moment in ("prepared_after", "released_after", "durable_after", "published_after"):
        if (seconds := getattr(timing, moment)) is not None:
            getattr(message, moment).CopyFrom(wire.duration(seconds))
    return message


def state_to(state: CheckpointState) -> pb.CheckpointState.ValueType:
    """The number of a state."""
    return pb.CheckpointState.ValueType(int(state))


def listed(episodes: Iterable[EpisodeId]) -> Any:
    """The first 1,000 as columns."""
    return wire.episode_list(episodes, MAX_LISTED)


def holders(places: Sequence[tuple[str, ...]]) -> list[pb.EpisodeHolders]:
    """Who holds each."""
    return [pb.EpisodeHolders(participants=names) for names in places]


def summary_of(found: Found) -> pb.CheckpointSummary:
    """A complete checkpoint of the root."""
    publication = found.publication
    state = CheckpointState.PUBLISHED if publication else CheckpointState.COMMITTED
    message = _manifest(found.manifest)
    message.state = state_to(state)
    message.sequence_number = publication.number if publication else 0
    message.manifest_digest = found.manifest_digest
    return message


def summary_of_listed(entry: Listed) -> pb.CheckpointSummary:
    """A published checkpoint of a list, readable or not."""
    message = _manifest(entry.manifest) if entry.manifest else pb.CheckpointSummary(problem=cut(entry.problem))
    message.checkpoint_id = cut(entry.publication.checkpoint_id, 128)
    message.epoch = entry.publication.epoch
    message.state = state_to(CheckpointState.PUBLISHED)
    message.sequence_number = entry.publication.number
    message.manifest_digest = entry.publication.manifest_digest
    return message


def _manifest(manifest: AggregateManifest) -> pb.CheckpointSummary:
    lists = manifest.episodes
    return pb.CheckpointSummary(
        checkpoint_id=manifest.checkpoint_id,
        epoch=manifest.epoch,
        record_count=sum(member.records for member in manifest.members),
        bytes=sum(member.bytes for member in manifest.members),
        state_bytes=sum(member.state_bytes for member in manifest.members),
        chain=max((member.chain for member in manifest.members), default=0),
        continued_count=lists.continued if lists else 0,
        restart_count=lists.restarts if lists else 0,
        participants=[wire.identity_to(_identity(member.participant)) for member in manifest.members],
    )


def _identity(block: IdentityBlock) -> ParticipantIdentity:
    kind, service, instance = block.place
    return ParticipantIdentity(kind, service, instance, block.incarnation_id)


def trainer_block(block: OpaqueBlock | None) -> Mapping[str, Any]:
    """Fields of a Restore's reply for the trainer's own block."""
    if block is None:
        return {}
    codec = Codec(block.codec)
    kind = block.content_type if codec is Codec.RAW else codec.name.lower()
    return {"trainer_state": block.data, "trainer_state_type": kind}
