"""Failed operations as typed errors of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_ckpt_grpc.coordinator.codes import code_of_kind
from gym_ckpt_grpc.coordinator.errors import DiscoveryFailed, FleetError, RetireFailed
from gym_ckpt_grpc.coordinator.looking import Finding, Sighting
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    StateCorrupt,
    StateNotFound,
    Unauthenticated,
    WorkerUnavailable,
    error_for,
)
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity

REFUSALS_OF_READING = (StateNotFound, StateCorrupt)
"""Of the checkpoint that a Restore names: the call itself is refused."""


def control_error(failure: FleetError) -> ControlError:
    """The failure with the code and the details of its cause, and its own text, which names all participants."""
    cause = failure.cause
    if cause is None and isinstance(failure.__cause__, ControlError):
        cause = failure.__cause__
    if cause is None or isinstance(failure, RetireFailed):
        return error_for(code_of_kind(failure), str(failure))
    return error_for(
        cause.code,
        str(failure),
        phase=cause.phase,
        active_checkpoint_id=cause.active_checkpoint_id,
        episodes=cause.episodes,
        episode_count=cause.episode_count,
        retry_after=cause.retry_after,
    )


def outcomes_of(failure: FleetError) -> Sequence[Outcome[Any]]:
    """One per participant; where looking failed, one per server that was found wrong."""
    if isinstance(failure, DiscoveryFailed):
        return [_looked(sighting) for sighting in failure.sightings if not sighting.ok]
    return failure.outcomes


def _looked(sighting: Sighting) -> Outcome[Any]:
    server = sighting.server
    declared = ParticipantIdentity(server.state_kind, server.service, server.instance or "0", "")
    kind = Unauthenticated if sighting.finding is Finding.REFUSED else WorkerUnavailable
    error = kind(f"{sighting.address}: {sighting.finding.name} {sighting.message}")
    return Outcome("GetStatus", sighting.identity or declared, error=error, duration=sighting.seconds)
