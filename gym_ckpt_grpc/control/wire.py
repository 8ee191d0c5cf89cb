"""Proto messages <-> domain values. Nothing else reads or builds these messages by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration

from gym_ckpt_grpc.control.ports import StagingKeys
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, episode_ids
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.protocol.report import MAX_BLOCKERS, MAX_LISTED, Blocker, BlockerReason, PrepareReport
from gymckpt.v1 import episode_pb2, participant_pb2

_KINDS = {
    ParticipantKind.ENVIRONMENT: participant_pb2.PARTICIPANT_KIND_ENVIRONMENT,
    ParticipantKind.POLICY_MODEL: participant_pb2.PARTICIPANT_KIND_POLICY_MODEL,
    ParticipantKind.AGENT: participant_pb2.PARTICIPANT_KIND_AGENT,
    ParticipantKind.RESOURCES: participant_pb2.PARTICIPANT_KIND_RESOURCES,
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}


def duration(seconds: float) -> Duration:
    """A Duration of this many seconds, whole microseconds, capped at a year where it is infinite."""
    capped = 365 * 24 * 3600.0 if math.isinf(seconds) else seconds
    micros = round(capped * 1e6)
    sign = -1 if micros < 0 else 1
    whole, rest = divmod(abs(micros), 1_000_000)
    return Duration(seconds=sign * whole, nanos=sign * rest * 1000)


def seconds(value: Duration) -> float:
    """Seconds of a Duration."""
    return value.seconds + value.nanos / 1e9


def identity_to(identity: ParticipantIdentity) -> participant_pb2.ParticipantIdentity:
    """The message of an identity."""
    return participant_pb2.ParticipantIdentity(
        kind=_KINDS[identity.kind],
        service=identity.service,
        instance=identity.instance,
        incarnation_id=identity.incarnation_id,
        protocol_minor=identity.protocol_minor,
        workers=identity.workers,
        capabilities=identity.capabilities,
    )


def identity_from(message: participant_pb2.ParticipantIdentity) -> ParticipantIdentity:
    """Raises ValueError for a kind that this package does not know."""
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise ValueError(f"unknown participant kind {message.kind} of {message.service or 'an unnamed server'}")
    return ParticipantIdentity(
        kind=kind,
        service=message.service,
        instance=message.instance,
        incarnation_id=message.incarnation_id,
        protocol_minor=message.protocol_minor,
        workers=message.workers,
        capabilities=tuple(message.capabilities),
    )


def phase_to(phase: Phase) -> participant_pb2.Phase.ValueType:
    """The number of a phase."""
    return participant_pb2.Phase.ValueType(int(phase))


def phase_from(value: int) -> Phase:
    """UNSPECIFIED for a number of a newer version."""
    try:
        return Phase(value)
    except ValueError:
        return Phase.UNSPECIFIED


def episode_to(episode: EpisodeId) -> episode_pb2.EpisodeId:
    """The message of an episode."""
    return episode_pb2.EpisodeId(rollout_id=episode.rollout_id, attempt=episode.attempt)


def episode_from(message: episode_pb2.EpisodeId) -> EpisodeId:
    """The episode of a message; raises ValueError for an illegal id."""
    return EpisodeId(message.rollout_id, message.attempt)


def episode_list(episodes: Iterable[EpisodeId], limit: int | None = None) -> episode_pb2.EpisodeList:
    """Columns of the first `limit` episodes (all if None)."""
    chosen = list(episodes)[:limit]
    return episode_pb2.EpisodeList(rollout_ids=[e.rollout_id for e in chosen], attempts=[e.attempt for e in chosen])


def episodes_from(message: episode_pb2.EpisodeList) -> tuple[EpisodeId, ...]:
    """The episodes of columns; raises ValueError for an illegal id or columns of two lengths."""
    return tuple(episode_ids(message.rollout_ids, message.attempts))


def scope_to(scope: EpisodeScope) -> episode_pb2.EpisodeScope:
    """The message of a scope."""
    if scope.is_all:
        return episode_pb2.EpisodeScope(all=True)
    return episode_pb2.EpisodeScope(episodes=episode_list(scope))


def scope_from(message: episode_pb2.EpisodeScope) -> EpisodeScope:
    """The scope of a validated message."""
    if message.WhichOneof("scope") == "all":
        return EpisodeScope.all()
    return EpisodeScope.of(episodes_from(message.episodes))


def _blocker_to(blocker: Blocker) -> participant_pb2.Blocker:
    return participant_pb2.Blocker(
        episode=episode_to(blocker.episode) if blocker.episode else None,
        worker=blocker.worker,
        reason=participant_pb2.BlockerReason.ValueType(int(blocker.reason)),
        age=duration(blocker.age),
        place=blocker.place,
    )


def _blocker_from(message: participant_pb2.Blocker) -> Blocker:
    number = int(message.reason)
    known = number in set(BlockerReason)
    return Blocker(
        reason=BlockerReason(number) if known else BlockerReason.UNSPECIFIED,
        age=seconds(message.age),
        episode=episode_from(message.episode) if message.HasField("episode") else None,
        worker=message.worker,
        place=message.place,
    )


def report_to(report: PrepareReport) -> participant_pb2.PrepareReport:
    """The message of a report; its counts are exact, its lists cut."""
    return participant_pb2.PrepareReport(
        blockers=[_blocker_to(blocker) for blocker in report.blockers[:MAX_BLOCKERS]],
        blocker_count=report.blocker_count,
        restarts=episode_list(report.restarts, MAX_LISTED),
        restart_count=report.restart_count,
        counts=dict(report.counts),
    )


def report_from(message: participant_pb2.PrepareReport) -> PrepareReport:
    """The report of a message, equal to the one it was made from."""
    return PrepareReport(
        blockers=tuple(_blocker_from(blocker) for blocker in message.blockers),
        blocker_count=message.blocker_count,
        restarts=episodes_from(message.restarts),
        restart_count=message.restart_count,
        counts=dict(message.counts),
    )


def staging_keys_to(keys: StagingKeys | None) -> participant_pb2.StagingKeys | None:
    """The message of a commit's staging keys; None if its kind has none."""
    if keys is None:
        return None
    return participant_pb2.StagingKeys(count=keys.count, digest=keys.digest, first=keys.first[:MAX_LISTED])
