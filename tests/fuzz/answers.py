"""What a server may answer to a request of the fuzzer."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from gym_ckpt_grpc.protocol.errors import DOMAIN, ERRORS, ErrorCode
from gymckpt.v1 import errors_pb2
from gymckpt.v1 import participant_pb2 as pb
from tests.fuzz.requests import READS, Request

MAX_TEXT, MAX_DETAILS = 1024, 6 * 1024
MAX_REPLY = 1 << 20
DETAILS_KEY = "grpc-status-details-bin"
STRANGERS = (ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED)
LEAKS = ("Traceback", 'File "', ", line ", "<class")


def check_reply(request: Request, body: bytes, incarnation: str) -> None:
    """A success must be that of a legal request, and name the process."""
    assert request.valid, f"{request.method} was obeyed without credentials"
    assert len(body) <= MAX_REPLY, f"{request.method}: a reply of {len(body)} bytes"
    reply = getattr(pb, f"{request.method}Response").FromString(body)
    told = reply.status.participant if hasattr(reply, "status") else reply.participant
    assert told.incarnation_id == incarnation
    sent = getattr(pb, f"{request.method}Request").FromString(request.body)
    if request.method not in READS:
        assert request.timeout is not None, f"{request.method} was obeyed without a deadline"
        assert sent.context.controller_id, f"{request.method} was obeyed without a controller"
    for name in ("storage_uri", "base_checkpoint_uri"):
        uri = getattr(sent, name, "")
        assert ".." not in uri, f"{request.method} obeyed {name} {uri!r}"
    for columns in (getattr(sent, "episodes", None), getattr(sent, "scope", None)):
        inner: Any = getattr(columns, "episodes", columns)
        if hasattr(inner, "rollout_ids"):
            assert len(inner.rollout_ids) == len(inner.attempts), f"{request.method}: columns of two lengths"


def check_failure(request: Request, failure: grpc.aio.AioRpcError, incarnation: str) -> str:
    """A typed refusal whose parts agree; the core's own statuses only where nothing of ours was asked. Its code."""
    said = f"{request.method}: {failure.code()}: {failure.details()!r:.300}"
    text = failure.details() or ""
    assert not any(leak in text for leak in LEAKS), said
    details = [value for key, value in failure.trailing_metadata() or () if key == DETAILS_KEY]
    if not details:
        assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED, f"untyped: {said}"
        assert request.timeout is not None, said
        return "late"
    assert len(details) == 1, said
    assert isinstance(details[0], bytes), said
    assert len(details[0]) <= MAX_DETAILS, f"{len(details[0])} bytes of details: {said}"
    assert len(text.encode()) <= MAX_TEXT, said
    control = _check_status(status_pb2.Status.FromString(details[0]), failure, said)
    code = ErrorCode(control.code)
    assert code is not ErrorCode.INTERNAL, said
    assert request.valid or code is ErrorCode.UNAUTHENTICATED, said
    known = control.participant.incarnation_id
    assert known == ("" if code in STRANGERS else incarnation), said
    return code.name


def _check_status(status: status_pb2.Status, failure: grpc.aio.AioRpcError, said: str) -> errors_pb2.ControlError:
    controls, infos, bad = [], [], []
    for detail in status.details:
        if detail.Is(errors_pb2.ControlError.DESCRIPTOR):
            controls.append(errors_pb2.ControlError.FromString(detail.value))
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            infos.append(error_details_pb2.ErrorInfo.FromString(detail.value))
        else:
            assert detail.Is(error_details_pb2.BadRequest.DESCRIPTOR), said
            bad.append(error_details_pb2.BadRequest.FromString(detail.value))
    assert (len(controls), len(infos)) == (1, 1), said
    code = ErrorCode(controls[0].code)
    assert (infos[0].reason, infos[0].domain) == (code.name, DOMAIN), said
    assert ERRORS[code].grpc_status == failure.code().name, said
    assert status.code == failure.code().value[0], said
    assert controls[0].message == failure.details() == status.message, said
    if bad:
        assert code is ErrorCode.INVALID_ARGUMENT, said
        assert bad[0].field_violations, said
    return controls[0]
