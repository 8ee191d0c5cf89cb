"""The one error tree and the one error table.

    GymCkptError
    ├── UsageError                 calls of the Python API out of order; nothing was sent
    └── ControlError               a typed refusal or failure, with an ErrorCode
        ├── StaleCheckpoint  StaleController  CheckpointConflict  InvalidPhase  IncarnationChanged
        ├── OutOfTime  StaleAttempt  RestartInScope  RetireIncomplete
        ├── AdmissionClosed  RolloutIdRequired  InvalidArgument
        ├── StateNotFound  StateCorrupt  StateUnwritable  ExportFailed  InstallFailed
        ├── Unauthenticated  PermissionDenied  WorkerUnavailable
        └── LeaseLost  PublishUnknown  InternalError

The table `ERRORS` gives each code its gRPC status, HTTP status, whether the same call may be sent again, its
exception class, and what the caller does about it. Server mapping, client mapping and `docs/errors.md` read
that table and nothing else. Source: protocol section 8.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from gym_ckpt_grpc.protocol.ids import EpisodeId

DOMAIN = "gymckpt"
"""The `domain` of every `google.rpc.ErrorInfo` of this project."""


class ErrorCode(enum.IntEnum):
    """Mirror of `gymckpt.v1.ErrorCode`, without its prefix; a test keeps the two equal."""

    UNSPECIFIED = 0
    STALE_CHECKPOINT = 1
    STALE_CONTROLLER = 2
    CHECKPOINT_CONFLICT = 3
    INVALID_PHASE = 4
    INCARNATION_CHANGED = 5
    DEADLINE_EXCEEDED = 6
    STALE_ATTEMPT = 7
    RESTART_IN_SCOPE = 8
    RETIRE_INCOMPLETE = 9
    ADMISSION_CLOSED = 10
    ROLLOUT_ID_REQUIRED = 11
    INVALID_ARGUMENT = 12
    STATE_NOT_FOUND = 13
    STATE_CORRUPT = 14
    STATE_UNWRITABLE = 15
    EXPORT_FAILED = 16
    INSTALL_FAILED = 17
    UNAUTHENTICATED = 18
    PERMISSION_DENIED = 19
    WORKER_UNAVAILABLE = 20
    LEASE_LOST = 21
    PUBLISH_UNKNOWN = 22
    INTERNAL = 23


class GymCkptError(Exception):
    """Base of everything this project raises on purpose."""


class UsageError(GymCkptError):
    """The Python API was called out of order or with impossible arguments. Nothing was sent."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One bad field: its path in the request (`context.checkpoint_id`) and what is wrong with it."""

    field: str
    description: str


class ControlError(GymCkptError):
    """A typed refusal or failure of the control plane or of the coordinator.

    code: one of ErrorCode. message: for people, without secrets. participant: `kind/service/instance`, or
    empty. phase: phase name at the refusal, or empty. active_checkpoint_id: what is open there, or empty.
    episodes: the episodes it is about, cut at a limit; episode_count: how many there are in truth.
    retry_after: seconds to wait before the same call, or None. violations: bad fields of an
    INVALID_ARGUMENT. Pickles and copies whole.
    """

    code: ClassVar[ErrorCode] = ErrorCode.UNSPECIFIED

    def __init__(
        self,
        message: str,
        *,
        participant: str = "",
        phase: str = "",
        active_checkpoint_id: str = "",
        episodes: Iterable[EpisodeId] = (),
        episode_count: int | None = None,
        retry_after: float | None = None,
        violations: Iterable[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.participant = participant
        self.phase = phase
        self.active_checkpoint_id = active_checkpoint_id
        self.episodes = tuple(episodes)
        self.episode_count = len(self.episodes) if episode_count is None else episode_count
        self.retry_after = retry_after
        self.violations = tuple(violations)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, {k: v for k, v in self.__dict__.items() if k != "message"}))

    def __str__(self) -> str:
        where = f" [{self.participant}]" if self.participant else ""
        return f"{self.code.name}: {self.message}{where}"

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed if it is sent again (the table's column)."""
        return ERRORS[self.code].retryable


def _rebuild(kind: type[ControlError], message: str, state: dict[str, Any]) -> ControlError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class StaleCheckpoint(ControlError):
    code = ErrorCode.STALE_CHECKPOINT


class StaleController(ControlError):
    code = ErrorCode.STALE_CONTROLLER


class CheckpointConflict(ControlError):
    code = ErrorCode.CHECKPOINT_CONFLICT


class InvalidPhase(ControlError):
    code = ErrorCode.INVALID_PHASE


class IncarnationChanged(ControlError):
    code = ErrorCode.INCARNATION_CHANGED


class OutOfTime(ControlError):
    """A bounded step had no time left (DEADLINE_EXCEEDED); names the step."""

    code = ErrorCode.DEADLINE_EXCEEDED


class StaleAttempt(ControlError):
    code = ErrorCode.STALE_ATTEMPT


class RestartInScope(ControlError):
    code = ErrorCode.RESTART_IN_SCOPE


class RetireIncomplete(ControlError):
    code = ErrorCode.RETIRE_INCOMPLETE


class AdmissionClosed(ControlError):
    code = ErrorCode.ADMISSION_CLOSED


class RolloutIdRequired(ControlError):
    code = ErrorCode.ROLLOUT_ID_REQUIRED


class InvalidArgument(ControlError):
    code = ErrorCode.INVALID_ARGUMENT


class StateNotFound(ControlError):
    code = ErrorCode.STATE_NOT_FOUND


class StateCorrupt(ControlError):
    code = ErrorCode.STATE_CORRUPT


class StateUnwritable(ControlError):
    code = ErrorCode.STATE_UNWRITABLE


class ExportFailed(ControlError):
    code = ErrorCode.EXPORT_FAILED


class InstallFailed(ControlError):
    code = ErrorCode.INSTALL_FAILED


class Unauthenticated(ControlError):
    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(ControlError):
    code = ErrorCode.PERMISSION_DENIED


class WorkerUnavailable(ControlError):
    code = ErrorCode.WORKER_UNAVAILABLE


class LeaseLost(ControlError):
    code = ErrorCode.LEASE_LOST


class PublishUnknown(ControlError):
    code = ErrorCode.PUBLISH_UNKNOWN


class InternalError(ControlError):
    code = ErrorCode.INTERNAL


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row of the error table.

    grpc_status: name of the gRPC status. http_status: what the data plane answers. retryable: the same call
    may be sent again. exception: the class raised in Python. recovery: what the caller does.
    """

    grpc_status: str
    http_status: int
    retryable: bool
    exception: type[ControlError]
    recovery: str


def _row(status: str, http: int, retryable: bool, kind: type[ControlError], recovery: str) -> ErrorRow:
    return ErrorRow(status, http, retryable, kind, recovery)


_PRECONDITION = "FAILED_PRECONDITION"

ERRORS: dict[ErrorCode, ErrorRow] = {
    kind.code: _row(status, http, retryable, kind, recovery)
    for kind, status, http, retryable, recovery in (
        (StaleCheckpoint, _PRECONDITION, 409, False, "The id was resumed here. Prepare under a new id."),
        (StaleController, _PRECONDITION, 409, False, "A newer controller has taken over. Stop."),
        (CheckpointConflict, "ABORTED", 409, False, "Resume the active id first, or send the first arguments."),
        (InvalidPhase, _PRECONDITION, 409, False, "Look at phase and blockers; Prepare again or Resume."),
        (IncarnationChanged, "ABORTED", 409, False, "The process restarted. Abort and prepare anew."),
        (OutOfTime, "DEADLINE_EXCEEDED", 409, True, "The same call again joins the work under way."),
        (StaleAttempt, _PRECONDITION, 409, False, "The attempt was retired. Use a later attempt."),
        (RestartInScope, _PRECONDITION, 409, False, "Leave the listed episodes out of the scope."),
        (RetireIncomplete, _PRECONDITION, 409, True, "Retire again until it succeeds, then Forget."),
        (AdmissionClosed, "UNAVAILABLE", 503, True, "Wait retry_after, then send the same request."),
        (RolloutIdRequired, "INVALID_ARGUMENT", 400, False, "Send the request under its rollout's prefix."),
        (InvalidArgument, "INVALID_ARGUMENT", 400, False, "Mend the listed fields."),
        (StateNotFound, "NOT_FOUND", 404, False, "Name a checkpoint that exists and has this participant."),
        (StateCorrupt, "DATA_LOSS", 409, False, "Restore an earlier checkpoint; verify names the damage."),
        (StateUnwritable, "UNAVAILABLE", 409, True, "Make room or mend permissions, then Commit again."),
        (ExportFailed, "INTERNAL", 409, True, "Mend the server's export hook, or leave the episode out."),
        (InstallFailed, "INTERNAL", 409, True, "Nothing is installed. Mend the hook and restore again."),
        (Unauthenticated, "UNAUTHENTICATED", 401, False, "Send a valid bearer token."),
        (PermissionDenied, "PERMISSION_DENIED", 403, False, "Use a token whose role allows the call."),
        (WorkerUnavailable, "UNAVAILABLE", 503, True, "Wait for the worker, or retire what it held."),
        (LeaseLost, "ABORTED", 409, False, "The participant reopened by itself. Begin a new checkpoint."),
        (PublishUnknown, "UNAVAILABLE", 409, True, "Publish again: it ends in published or failed."),
        (InternalError, "INTERNAL", 409, False, "Look the incident id up in the server's log."),
    )
}
"""Code -> row, for every code but UNSPECIFIED."""


def error_for(code: ErrorCode, message: str, **details: Any) -> ControlError:
    """Build the exception of a code; an unknown or unspecified code becomes InternalError."""
    row = ERRORS.get(code)
    return (row.exception if row else InternalError)(message, **details)
