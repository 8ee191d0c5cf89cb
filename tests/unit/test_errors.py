"""The one error tree, its table, and the mirrors of the contract's enums."""

from __future__ import annotations

import copy
import enum
import pickle
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.control.ports import EpisodeListKind
from gym_ckpt_grpc.protocol.errors import (
    ERRORS,
    ErrorCode,
    InternalError,
    InvalidArgument,
    Violation,
    error_for,
)
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.protocol.report import BlockerReason
from gymckpt.v1 import errors_pb2, participant_pb2

CODES = [code for code in ErrorCode if code is not ErrorCode.UNSPECIFIED]
PROTO = Path(__file__).resolve().parents[2] / "protos" / "gymckpt" / "v1" / "errors.proto"


@pytest.mark.parametrize(
    ("mirror", "enumeration", "prefix"),
    [
        (ErrorCode, errors_pb2.ErrorCode, "ERROR_CODE_"),
        (Phase, participant_pb2.Phase, "PHASE_"),
        (BlockerReason, participant_pb2.BlockerReason, "BLOCKER_REASON_"),
        (EpisodeListKind, participant_pb2.EpisodeListKind, "EPISODE_LIST_KIND_"),
    ],
)
def test_mirrors_equal_the_contract(mirror: type[enum.IntEnum], enumeration: Any, prefix: str) -> None:
    """Names and numbers of the Python enums are those of the proto."""
    assert {prefix + member.name: int(member) for member in mirror} == dict(enumeration.items())


def test_kinds_equal_the_contract() -> None:
    """Every kind of participant but the unspecified one."""
    names = {"PARTICIPANT_KIND_" + kind.name for kind in ParticipantKind}
    assert names == set(participant_pb2.ParticipantKind.keys()) - {"PARTICIPANT_KIND_UNSPECIFIED"}


@pytest.mark.behaviour("C37")
def test_each_code_has_one_row() -> None:
    """Every code has a row, a class of its own with that code, a real gRPC status, and a recovery."""
    assert set(ERRORS) == set(CODES)
    assert len({row.exception for row in ERRORS.values()}) == len(CODES)
    for code, row in ERRORS.items():
        assert row.exception.code is code
        assert hasattr(grpc.StatusCode, row.grpc_status)
        assert row.recovery.endswith(".")
        assert type(error_for(code, "x")) is row.exception


@pytest.mark.behaviour("C37")
def test_rows_agree_with_the_contract() -> None:
    """The gRPC status of each row is the one that the proto's comment names first."""
    text = PROTO.read_text(encoding="utf-8")
    row = r"  // ([A-Z_]+)\. (?:[^\n]*\n  //)*[^\n]*\n  ERROR_CODE_([A-Z_]+) ="
    pairs = {code: status for status, code in re.findall(row, text)}
    assert pairs == {code.name: row.grpc_status for code, row in ERRORS.items()}


def test_http_statuses() -> None:
    """400, 401, 403, 404 and 503 where the design says so, 409 for every other refusal."""
    special = {
        ErrorCode.INVALID_ARGUMENT: 400,
        ErrorCode.ROLLOUT_ID_REQUIRED: 400,
        ErrorCode.UNAUTHENTICATED: 401,
        ErrorCode.PERMISSION_DENIED: 403,
        ErrorCode.STATE_NOT_FOUND: 404,
        ErrorCode.ADMISSION_CLOSED: 503,
        ErrorCode.WORKER_UNAVAILABLE: 503,
    }
    assert {code: ERRORS[code].http_status for code in CODES} == {code: special.get(code, 409) for code in CODES}


def test_refusals_that_will_stay_are_not_retried() -> None:
    """A retry can never mend a fence, a conflict or a bad field."""
    retryable = {code.name for code in CODES if ERRORS[code].retryable}
    assert retryable == {
        "DEADLINE_EXCEEDED",
        "RETIRE_INCOMPLETE",
        "ADMISSION_CLOSED",
        "STATE_UNWRITABLE",
        "EXPORT_FAILED",
        "INSTALL_FAILED",
        "WORKER_UNAVAILABLE",
        "PUBLISH_UNKNOWN",
    }


@pytest.mark.parametrize("code", [ErrorCode.UNSPECIFIED, 999])
def test_unknown_codes_become_internal(code: Any) -> None:
    """A code of a newer version is an error all the same."""
    assert type(error_for(code, "x")) is InternalError


@pytest.mark.behaviour("C38")
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_errors_survive_pickle_and_deepcopy(code: ErrorCode) -> None:
    """With every field, also what was changed after it was made."""
    error = error_for(
        code,
        "what went wrong",
        participant="agent/office/0",
        phase="PREPARED",
        active_checkpoint_id="c1",
        episodes=[EpisodeId("a", 2)],
        episode_count=5000,
        retry_after=1.5,
        violations=[Violation("context", "is required")],
    )
    error.participant = "agent/office/1"
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error), copy.copy(error)):
        assert type(twin) is type(error)
        assert twin.__dict__ == error.__dict__
        assert str(twin) == f"{code.name}: what went wrong [agent/office/1]"
        assert twin.code is code


def test_counts_default_to_the_list() -> None:
    """An error that lists all its episodes need not count them."""
    assert InvalidArgument("x", episodes=[EpisodeId("a")]).episode_count == 1
    assert str(InvalidArgument("x")) == "INVALID_ARGUMENT: x"
