"""Admissions, continuations and coordinates as JSON: whole round trips, and every bad field by its name."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from gym_ckpt_grpc.capture import (
    CaptureAdmission,
    Coordinates,
    admission_from_json,
    admission_to_json,
    continuation_from_json,
    continuation_to_json,
    coordinates_from_json,
    coordinates_to_json,
)
from gym_ckpt_grpc.control import Continuation
from gym_ckpt_grpc.protocol.errors import InvalidArgument

HASH = "0123456789abcdef" * 4
CONTINUED = Continuation("r1", "c1", ("cuts/r1/c1/k1", "cuts/r1/c1/k2"), 3, HASH, 20, 0)
FINISHED = replace(CONTINUED, finish_reason="stop", stop_reason="</s>")
ROOT = CaptureAdmission("r1-a2", "c2", "text", 1)
CHILD = CaptureAdmission("r1", "c2", "token_in", 2, "c1", 3, HASH, (1, 2, 2**32 - 1), ("r1/c0", "r1/c1"))
STAGED = Coordinates(
    *("r1", "c2", "token_in", "r1/c2", ("r1/c1", "r1/c2"), 0, 3, 4, 7),
    *(HASH, HASH, HASH, HASH, 2, HASH, 20, "length", "max"),
)
FAILED = replace(
    STAGED,
    staging_key="",
    staging_chain=(),
    added_length=0,
    total_length=3,
    staging_digest="",
    extras_digest="",
    chain_hash="",
    cumulative_hash="",
    finish_reason="",
    stop_reason="",
    capture_failed="the disk is full",
)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def fields(caught: pytest.ExceptionInfo[InvalidArgument]) -> list[str]:
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(
    "admission",
    [
        ROOT,
        CHILD,
        replace(CHILD, prefix_ids=None),
        replace(CHILD, staging_chain=()),
        replace(ROOT, continuation=CONTINUED),
        replace(CHILD, continuation=FINISHED),
    ],
)
def test_admissions_survive_json(admission: CaptureAdmission) -> None:
    assert admission_from_json(through_json(admission_to_json(admission))) == admission
    assert admission.fresh() == replace(admission, continuation=None)


@pytest.mark.parametrize("continuation", [CONTINUED, FINISHED])
def test_continuations_survive_json(continuation: Continuation) -> None:
    assert continuation_from_json(through_json(continuation_to_json(continuation))) == continuation


@pytest.mark.parametrize("coordinates", [STAGED, FAILED, replace(STAGED, stop_reason="")])
def test_coordinates_survive_json(coordinates: Coordinates) -> None:
    assert coordinates_from_json(through_json(coordinates_to_json(coordinates))) == coordinates


BAD_ADMISSIONS: list[tuple[CaptureAdmission, dict[str, Any], list[str]]] = [
    (ROOT, {"capture_key": "../x", "call_id": "a/b"}, ["capture_key", "call_id"]),
    (ROOT, {"capture_key": None}, ["capture_key"]),
    (ROOT, {"mode": "both"}, ["mode"]),
    (ROOT, {"number": 0}, ["number"]),
    (ROOT, {"number": True}, ["number"]),
    (ROOT, {"number": 1.0, "extra": 1}, ["number", "extra"]),
    (ROOT, {"parent_id": "c1"}, ["parent_id"]),
    (ROOT, {"prefix_ids": []}, ["prefix_ids"]),
    (ROOT, {"continuation": 5}, ["continuation"]),
    (ROOT, {"continuation": {"schema_version": 2}}, ["continuation.schema_version", "continuation.source_capture_key"]),
    (CHILD, {"parent_id": None, "parent_chain_hash": None}, ["parent_id", "parent_chain_hash"]),
    (CHILD, {"parent_chain_hash": HASH[1:]}, ["parent_chain_hash"]),
    (CHILD, {"prefix_ids": [1, -1, 2**32]}, ["prefix_ids[1]"]),
    (CHILD, {"prefix_ids": "123"}, ["prefix_ids"]),
    (CHILD, {"prefix_ids": [1, 2]}, ["prefix_ids"]),
    (CHILD, {"prefix_ids": None, "staging_chain": None}, ["staging_chain"]),
    (CHILD, {"staging_chain": ["a", "", "a", 5]}, ["staging_chain[1]", "staging_chain[2]", "staging_chain[3]"]),
    (CHILD, {"previous_length": 0}, ["previous_length", "prefix_ids"]),
]


@pytest.mark.behaviour("P258")
@pytest.mark.parametrize(("good", "changes", "expected"), BAD_ADMISSIONS)
def test_bad_fields_of_an_admission(good: CaptureAdmission, changes: dict[str, Any], expected: list[str]) -> None:
    value = {name: one for name, one in (admission_to_json(good) | changes).items() if one is not None}
    with pytest.raises(InvalidArgument) as caught:
        admission_from_json(value)
    assert fields(caught)[: len(expected)] == [f"admission.{name}" for name in expected]
    if "continuation" not in changes:
        assert len(fields(caught)) == len(expected)


@pytest.mark.behaviour("P260")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"staging_keys": []}, ["staging_keys"]),
        ({"staging_keys": ["a", "a"]}, ["staging_keys[1]"]),
        ({"staging_keys": "abc"}, ["staging_keys"]),
        ({"prefix_tokens": -1, "prefix_digest": "x"}, ["prefix_tokens", "prefix_digest"]),
        ({"prefix_tokens": 21}, ["prefix_tokens"]),
        ({"output_limit": 0, "weight_version": 2**64}, ["output_limit", "weight_version"]),
        ({"finish_reason": "abort"}, ["finish_reason"]),
        ({"stop_reason": "</s>"}, ["stop_reason"]),
        ({"source_call_id": "", "source_capture_key": "r-a01-a1x/"}, ["source_capture_key", "source_call_id"]),
        ({"schema_version": None}, ["schema_version"]),
        ({"what": 1}, ["what"]),
    ],
)
def test_bad_fields_of_a_continuation(changes: dict[str, Any], expected: list[str]) -> None:
    value = continuation_to_json(CONTINUED) | changes
    with pytest.raises(InvalidArgument) as caught:
        continuation_from_json(value)
    assert sorted(set(fields(caught))) == sorted(f"continuation.{name}" for name in expected)


@pytest.mark.parametrize(
    ("good", "changes", "expected"),
    [
        (STAGED, {"staging_key": ""}, ["staging_key"]),
        (STAGED, {"staging_key": "r1/c3"}, ["staging_chain"]),
        (STAGED, {"total_length": 8}, ["total_length"]),
        (STAGED, {"prefix_tokens": 5}, ["prefix_tokens"]),
        (STAGED, {"finish_reason": ""}, ["finish_reason"]),
        (STAGED, {"finish_reason": "tool_calls"}, ["finish_reason"]),
        (STAGED, {"chain_hash": "", "cumulative_hash": "x"}, ["chain_hash", "cumulative_hash"]),
        (STAGED, {"mode": 3, "staging_chain": 7}, ["mode", "staging_chain"]),
        (FAILED, {"output_limit": 0, "new": 1}, ["output_limit", "new"]),
    ],
)
def test_bad_fields_of_coordinates(good: Coordinates, changes: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        coordinates_from_json(coordinates_to_json(good) | changes)
    assert fields(caught) == [f"coordinates.{name}" for name in expected]


@pytest.mark.parametrize("value", [None, [], "text", 5])
def test_what_is_no_object_is_named(value: Any) -> None:
    for read, path in ((admission_from_json, "admission"), (coordinates_from_json, "x"), (continuation_from_json, "y")):
        with pytest.raises(InvalidArgument) as caught:
            read(value, path)
        assert fields(caught)[0] == path


def test_random_values_are_refused_or_whole(rng: random.Random) -> None:
    """Nothing but InvalidArgument leaves, and what passes makes the same JSON again."""
    odd: list[Any] = [None, True, 0, -1, 2**64, 1.5, "", "x", "a\ud800", HASH, [], [1], ["k"], {}, {"a": 1}, "x" * 5000]
    passed = 0
    for _ in range(3000):
        value = admission_to_json(rng.choice([ROOT, CHILD, replace(CHILD, continuation=FINISHED)]))
        for _ in range(rng.randrange(3)):
            inner = value.get("continuation")
            target = inner if isinstance(inner, dict) and rng.random() < 0.5 else value
            target[rng.choice([*target, "odd"])] = rng.choice(odd)
        admission = None
        with suppress(InvalidArgument):
            admission = admission_from_json(value)
        if admission is not None:
            passed += 1
            assert admission_from_json(admission_to_json(admission)) == admission
    assert passed > 500
