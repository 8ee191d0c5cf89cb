"""Typed errors <-> gRPC status with `google.rpc.Status` details.

Over about 8 KiB of trailers the real error turns into RESOURCE_EXHAUSTED, so text is cut to 1 KiB and details to
6 KiB; counts stay exact.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.protocol.errors import (
    DOMAIN,
    ERRORS,
    ControlError,
    ErrorCode,
    InternalError,
    Violation,
    error_for,
)
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gymckpt.v1 import errors_pb2

MAX_TEXT = 1024
MAX_DETAILS = 6 * 1024
DETAILS_KEY = "grpc-status-details-bin"
log = logging.getLogger("gym_ckpt_grpc.control")


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """The text in at most `limit` bytes of UTF-8; what has no UTF-8 form (an odd file name) becomes `?`."""
    raw = text.encode("utf-8", "replace")
    return raw.decode() if len(raw) <= limit else raw[: limit - 4].decode("utf-8", "ignore") + " ..."


def grpc_status(code: ErrorCode) -> grpc.StatusCode:
    """The gRPC status of a code, by the error table."""
    row = ERRORS.get(code) or ERRORS[ErrorCode.INTERNAL]
    status: grpc.StatusCode = getattr(grpc.StatusCode, row.grpc_status)
    return status


def unexpected(error: BaseException, doing: str) -> InternalError:
    """Log an unexpected exception under an opaque id, and give an error that has only the id in it."""
    incident = secrets.token_hex(6)
    log.error("incident %s while %s", incident, doing, exc_info=error)
    return InternalError(f"unexpected failure while {doing}; incident {incident}")


def status_of(error: ControlError, identity: ParticipantIdentity | None) -> status_pb2.Status:
    """The `google.rpc.Status` of an error, cut to what fits."""
    limit_episodes, limit_violations = len(error.episodes), len(error.violations)
    while True:
        status = _status(error, identity, limit_episodes, limit_violations)
        if status.ByteSize() <= MAX_DETAILS or not (limit_episodes or limit_violations):
            return status
        limit_episodes, limit_violations = limit_episodes // 2, limit_violations // 2


def _status(
    error: ControlError, identity: ParticipantIdentity | None, episodes: int, violations: int
) -> status_pb2.Status:
    text = cut(error.message)
    control = errors_pb2.ControlError(
        code=errors_pb2.ErrorCode.ValueType(int(error.code)),
        message=text,
        participant=wire.identity_to(identity) if identity else None,
        phase=wire.phase_to(Phase[error.phase]) if error.phase else wire.phase_to(Phase.UNSPECIFIED),
        active_checkpoint_id=error.active_checkpoint_id,
        episodes=wire.episode_list(error.episodes, episodes) if error.episodes else None,
        episode_count=error.episode_count,
        retry_after=None if error.retry_after is None else wire.duration(error.retry_after),
    )
    info = error_details_pb2.ErrorInfo(reason=error.code.name, domain=DOMAIN)
    details: list[Any] = [control, info]
    if error.violations:
        fields = [
            error_details_pb2.BadRequest.FieldViolation(field=cut(v.field, 200), description=cut(v.description, 200))
            for v in error.violations[: max(violations, 1)]
        ]
        details.append(error_details_pb2.BadRequest(field_violations=fields))
    packed = [any_pb2.Any() for _ in details]
    for slot, message in zip(packed, details, strict=True):
        slot.Pack(message)
    return status_pb2.Status(code=grpc_status(error.code).value[0], message=text, details=packed)


def error_from(failure: grpc.aio.AioRpcError) -> ControlError | None:
    """The typed error in a failed call, or None if it carries none (a transport failure, the core's own refusal)."""
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                return _from_status(status_pb2.Status.FromString(value if isinstance(value, bytes) else b""))
            except Exception:  # a foreign or damaged trailer is no typed error
                return None
    return None


def _from_status(status: status_pb2.Status) -> ControlError | None:
    control, violations = None, list[Violation]()
    for detail in status.details:
        if detail.Is(errors_pb2.ControlError.DESCRIPTOR):
            control = errors_pb2.ControlError()
            detail.Unpack(control)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations += [Violation(v.field, v.description) for v in bad.field_violations]
    return None if control is None else from_message(control, violations)


def from_message(control: errors_pb2.ControlError, violations: Iterable[Violation] = ()) -> ControlError:
    """The exception of a ControlError message; a code of a newer version becomes InternalError."""
    number = int(control.code)
    code = ErrorCode(number) if number in set(ErrorCode) else ErrorCode.UNSPECIFIED
    return error_for(
        code,
        control.message,
        participant=_who(control) if control.HasField("participant") else "",
        phase=wire.phase_from(control.phase).name if control.phase else "",
        active_checkpoint_id=control.active_checkpoint_id,
        episodes=_episodes(control),
        episode_count=control.episode_count,
        retry_after=wire.seconds(control.retry_after) if control.HasField("retry_after") else None,
        violations=violations,
    )


def _who(control: errors_pb2.ControlError) -> str:
    """`kind/service/instance`; a kind of a newer version is named by its number, so that no error is lost."""
    who = control.participant
    try:
        return str(wire.identity_from(who))
    except ValueError:
        return f"{who.kind}/{who.service}/{who.instance}"


def _episodes(control: errors_pb2.ControlError) -> tuple[EpisodeId, ...]:
    try:
        return wire.episodes_from(control.episodes)
    except ValueError:  # ids of another version: the count beside them still tells
        return ()


def to_message(error: ControlError) -> errors_pb2.ControlError:
    """The ControlError message of an error that is reported inside a reply (an outcome)."""
    status = status_of(error, None)
    message = errors_pb2.ControlError()
    status.details[0].Unpack(message)
    return message
