"""Header names, the rollout prefix, and how refusals look over HTTP."""

from __future__ import annotations

import dataclasses

import orjson
import pytest

from gym_ckpt_grpc.participants import DataPlaneNames, raise_refusal, refusal_reply
from gym_ckpt_grpc.protocol import ERRORS, ErrorCode, UsageError
from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation, error_for
from tests.participants.fakes import R1, R

OPTIONS = [each.name for each in dataclasses.fields(DataPlaneNames)]
HEADERS = [name for name in OPTIONS if name.endswith("_header")]


@pytest.mark.behaviour("P40")
@pytest.mark.parametrize("option", OPTIONS)
def test_every_name_can_be_configured_and_a_bad_one_stops_the_start(option: str) -> None:
    """An illegal name is refused, naming the option; a legal one is taken."""
    value = "/ng-rollout" if option == "rollout_prefix" else "x-other-name"
    assert getattr(DataPlaneNames(**{option: value}), option) == value
    for bad in ("", "has space", "new\nline", "trailing\n", "no-slash/" if option == "rollout_prefix" else "colon:"):
        with pytest.raises(UsageError, match=option):
            DataPlaneNames(**{option: bad})


@pytest.mark.behaviour("P40")
def test_a_name_that_stands_twice_stops_the_start_in_any_case() -> None:
    with pytest.raises(UsageError, match="restart_header"):
        DataPlaneNames(verify_header="X-Same", restart_header="x-same")


@pytest.mark.behaviour("P41")
@pytest.mark.parametrize(
    ("headers", "replay"),
    [
        ({"x-gymckpt-verify": "replay"}, True),
        ({"X-GymCkpt-Verify": "replay"}, True),
        ({"x-gymckpt-verify": "Replay"}, False),
        ({"x-gymckpt-verify": "replay "}, False),
        ({"x-gymckpt-verify": "wait"}, False),
        ({"x-gymckpt-verify": "null"}, False),
        ({"x-gymckpt-verify": ""}, False),
        ({}, False),
    ],
)
def test_verify_is_replayable_only_when_the_header_says_exactly_so(headers: dict[str, str], replay: bool) -> None:
    assert DataPlaneNames().is_replay(headers) is replay


@pytest.mark.behaviour("P42")
@pytest.mark.parametrize(
    ("value", "restart"), [("1", True), ("true", False), ("01", False), ("", False), (" 1", False)]
)
def test_a_restart_is_exactly_one(value: str, restart: bool) -> None:
    assert DataPlaneNames().is_restart({"X-Gymckpt-Restart": value}) is restart


def test_a_path_gives_back_the_episode_that_made_it() -> None:
    names = DataPlaneNames(rollout_prefix="/a/b")
    assert names.split(names.path_of(R1, "/v1/responses")) == (R1, "/v1/responses")
    assert names.split("/a/b/r") == (R, "/")
    assert names.split("/a/bc/r/x") == (None, "/a/bc/r/x")


@pytest.mark.parametrize("path", ["/rollout", "/rollout/", "/rollout//x", "/rollout/.x/run", "/rollout/a%20b/run"])
def test_a_malformed_capture_key_is_an_invalid_argument(path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        DataPlaneNames().split(path)
    assert caught.value.violations[0].field == "path"


@pytest.mark.behaviour("P43", "C40")
@pytest.mark.parametrize("code", list(ERRORS))
def test_each_refusal_has_its_status_and_names_its_code(code: ErrorCode) -> None:
    """400, 401, 403 and 404 for their own codes, 503 with Retry-After for the two that pass, 409 for the rest."""
    expected = {
        ErrorCode.INVALID_ARGUMENT: 400,
        ErrorCode.ROLLOUT_ID_REQUIRED: 400,
        ErrorCode.UNAUTHENTICATED: 401,
        ErrorCode.PERMISSION_DENIED: 403,
        ErrorCode.STATE_NOT_FOUND: 404,
        ErrorCode.ADMISSION_CLOSED: 503,
        ErrorCode.WORKER_UNAVAILABLE: 503,
    }.get(code, 409)
    status, headers, body = refusal_reply(error_for(code, "why", retry_after=1.2))
    assert status == expected
    assert ("retry-after" in headers) == (expected == 503)
    assert orjson.loads(body)["error"]["code"] == code.name
    with pytest.raises(ERRORS[code].exception, match="why"):
        raise_refusal(status, orjson.loads(body), headers)


def test_what_is_no_refusal_raises_nothing() -> None:
    for status, body in [
        (200, {"error": {"code": "STALE_ATTEMPT"}}),
        (500, "x"),
        (409, {"error": {"code": "OTHER"}}),
        (409, {"error": {"code": ["STALE_ATTEMPT"]}}),
        (409, {}),
    ]:
        raise_refusal(status, body)


def test_a_refusal_tells_retry_after_and_fields() -> None:
    _, headers, _ = refusal_reply(error_for(ErrorCode.ADMISSION_CLOSED, "full"))
    assert headers["retry-after"] == "1"
    _, _, body = refusal_reply(InvalidArgument("bad", episodes=[R], violations=[Violation("task.x", "differs")]))
    assert orjson.loads(body)["error"] == {
        "code": "INVALID_ARGUMENT",
        "detail": "bad",
        "episodes": ["r"],
        "violations": [{"field": "task.x", "description": "differs"}],
    }
