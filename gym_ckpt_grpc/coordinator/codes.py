"""One code for a failure that many participants may have part in: for replies, spans and metrics."""

from __future__ import annotations

from typing import Any

from gym_ckpt_grpc.coordinator.errors import (
    CaptureFailed,
    CommitFailed,
    DiscoveryFailed,
    FleetError,
    ForgetFailed,
    NotPrepared,
    PrepareFailed,
    PublishFailed,
    RestoreFailed,
    RetireFailed,
)
from gym_ckpt_grpc.coordinator.looking import Finding
from gym_ckpt_grpc.coordinator.outcomes import Outcome, in_listing_order
from gym_ckpt_grpc.protocol.errors import ControlError, ErrorCode, UsageError
from gym_ckpt_grpc.telemetry.spans import NOT_READY, OK, outcome_of

CODES: tuple[tuple[type[FleetError], ErrorCode], ...] = (
    (DiscoveryFailed, ErrorCode.WORKER_UNAVAILABLE),
    (PrepareFailed, ErrorCode.WORKER_UNAVAILABLE),
    (NotPrepared, ErrorCode.DEADLINE_EXCEEDED),
    (CaptureFailed, ErrorCode.EXPORT_FAILED),
    (CommitFailed, ErrorCode.EXPORT_FAILED),
    (PublishFailed, ErrorCode.STATE_UNWRITABLE),
    (RestoreFailed, ErrorCode.INSTALL_FAILED),
    (RetireFailed, ErrorCode.RETIRE_INCOMPLETE),
    (ForgetFailed, ErrorCode.RETIRE_INCOMPLETE),
)
"""Code of a failure that is no participant's own refusal."""


def code_of_kind(failure: FleetError) -> ErrorCode:
    """The code of a failure by its kind alone."""
    return next((code for kind, code in CODES if isinstance(failure, kind)), ErrorCode.INTERNAL)


def most_telling(outcomes: list[Outcome[Any]]) -> ControlError | None:
    """The failure that explains most: STALE_CONTROLLER, which all others follow from; else the first one, in listing
    order, that a participant gave itself; else the first of those that did not answer."""
    failed = [outcome for outcome in in_listing_order(outcomes) if outcome.error]
    stale = [o for o in failed if o.error and o.error.code is ErrorCode.STALE_CONTROLLER]
    said = [o for o in failed if o.error and not o.transport and o.error.code is not ErrorCode.DEADLINE_EXCEEDED]
    return next((outcome.error for outcome in (*stale, *said, *failed)), None)


def outcome_of_failure(error: BaseException | None) -> str:
    """What a span and a metric say of an operation over the fleet: `ok`, `not_ready`, `CANCELLED`, or a code's name."""
    if isinstance(error, NotPrepared):
        return NOT_READY
    if isinstance(error, DiscoveryFailed):
        refused = any(sighting.finding is Finding.REFUSED for sighting in error.sightings)
        return (ErrorCode.UNAUTHENTICATED if refused else ErrorCode.WORKER_UNAVAILABLE).name
    if isinstance(error, FleetError):
        cause = most_telling(list(error.outcomes))
        if cause is None and isinstance(error.__cause__, ControlError):
            cause = error.__cause__
        return cause.code.name if cause is not None else code_of_kind(error).name
    if isinstance(error, UsageError):
        return ErrorCode.INVALID_ARGUMENT.name
    return outcome_of(error)


def outcome_of_all(outcomes: list[Outcome[Any]]) -> str:
    """The same for calls whose failures are not raised."""
    cause = most_telling(outcomes)
    return OK if cause is None else cause.code.name
