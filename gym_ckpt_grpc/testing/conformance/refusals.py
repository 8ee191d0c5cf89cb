"""The form of errors and identities on the wire, looked at in every answer of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gym_ckpt_grpc.protocol.errors import DOMAIN, ERRORS, ErrorCode
from gymckpt.v1 import errors_pb2
from gymckpt.v1 import participant_pb2 as pb

DETAILS_KEY = "grpc-status-details-bin"
MAX_DETAILS = 6 * 1024
MAX_REPLY = 1024 * 1024
MAX_PROBLEMS = 5
CREDENTIALS = (ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One failed call, taken apart. controls, infos: how many of each its details have, which should be one."""

    status: str
    text: str
    code: ErrorCode = ErrorCode.UNSPECIFIED
    control: errors_pb2.ControlError = field(default_factory=errors_pb2.ControlError)
    controls: int = 0
    infos: tuple[error_details_pb2.ErrorInfo, ...] = ()
    violations: tuple[error_details_pb2.BadRequest.FieldViolation, ...] = ()
    size: int = 0

    @property
    def fields(self) -> list[str]:
        """Paths of the bad fields."""
        return [violation.field for violation in self.violations]

    def __str__(self) -> str:
        name = self.code.name if self.code else f"{self.status} without a typed error"
        return f"{name} ({self.text[:160]})"


def read_refusal(failure: grpc.aio.AioRpcError) -> Refusal:
    """Take a failed call apart; what cannot be read counts as absent."""
    status, text = failure.code().name, failure.details() or ""
    raw = dict(failure.trailing_metadata() or ()).get(DETAILS_KEY)
    if not isinstance(raw, bytes):
        return Refusal(status, text)
    try:
        details = status_pb2.Status.FromString(raw).details
    except Exception:
        return Refusal(status, text)
    controls, infos, violations = [], [], []
    for detail in details:
        if detail.Is(errors_pb2.ControlError.DESCRIPTOR):
            controls.append(errors_pb2.ControlError.FromString(detail.value))
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            infos.append(error_details_pb2.ErrorInfo.FromString(detail.value))
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            violations += error_details_pb2.BadRequest.FromString(detail.value).field_violations
    control = controls[0] if controls else errors_pb2.ControlError()
    number = int(control.code)
    code = ErrorCode(number) if number in set(ErrorCode) else ErrorCode.UNSPECIFIED
    return Refusal(status, text, code, control, len(controls), tuple(infos), tuple(violations), len(raw))


@dataclass(slots=True)
class Forms:
    """Problems of form in all answers of a run, by the behaviour that they break. incarnation: of the process."""

    incarnation: str
    identity: list[str] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)

    def reply(self, method: str, reply: Message) -> None:
        """Look at a reply."""
        holder: Any = getattr(reply, "status", reply)
        self._who(f"the reply of {method}", holder.participant if holder.HasField("participant") else None)
        if (size := reply.ByteSize()) > MAX_REPLY:
            self._note(self.sizes, f"the reply of {method} has {size} bytes")

    def refusal(self, method: str, refusal: Refusal) -> None:
        """Look at a refusal."""
        where = f"{refusal} of {method}"
        row = ERRORS.get(refusal.code)
        if row is None or refusal.controls != 1 or len(refusal.infos) != 1:
            self._note(self.forms, f"{where} has {refusal.controls} ControlError and {len(refusal.infos)} ErrorInfo")
            return
        info = refusal.infos[0]
        if info.reason != refusal.code.name or info.domain != DOMAIN:
            self._note(self.forms, f"{where} has ErrorInfo {info.reason!r} of {info.domain!r}")
        if refusal.status != row.grpc_status:
            self._note(self.statuses, f"{where} has gRPC status {refusal.status}, not {row.grpc_status}")
        if refusal.size > MAX_DETAILS:
            self._note(self.sizes, f"{where} has {refusal.size} bytes of details")
        if refusal.code not in CREDENTIALS:
            who = refusal.control.participant if refusal.control.HasField("participant") else None
            self._who(f"the error {where}", who)

    def _who(self, where: str, identity: pb.ParticipantIdentity | None) -> None:
        if identity is None or not identity.incarnation_id:
            self._note(self.identity, f"{where} has no identity")
        elif identity.incarnation_id != self.incarnation:
            self._note(self.identity, f"{where} is from process {identity.incarnation_id}, not {self.incarnation}")

    @staticmethod
    def _note(problems: list[str], problem: str) -> None:
        if len(problems) < MAX_PROBLEMS:
            problems.append(problem)
