"""Requests that can be neither cut nor continued, and what makes two requests the same."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.participants.constrained import restart_reason
from gym_ckpt_grpc.participants.request_digest import NOT_IN_DIGEST, request_digest

TEXT = {"type": "text"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.behaviour("P135")
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("tool_choice", "required", "tool_choice:required"),
        ("tool_choice", "any", "tool_choice:any"),
        ("tool_choice", FUNCTION, "tool_choice:constrained"),
        ("tool_choice", [], "tool_choice:constrained"),
        ("tool_choice", False, "tool_choice:constrained"),
        ("response_format", SCHEMA, "response_format:json_schema"),
        ("response_format", {"type": "json_object"}, "response_format:json_object"),
        ("response_format", {"type": "TEXT"}, "response_format:TEXT"),
        ("response_format", {}, "response_format:unknown"),
        ("response_format", "text", "response_format:unknown"),
        ("guided_choice", ["a"], "guided_choice"),
        ("guided_grammar", "g", "guided_grammar"),
        ("guided_json", {}, "guided_json"),
        ("guided_regex", "", "guided_regex"),
        ("guided_whitespace_pattern", " ", "guided_whitespace_pattern"),
        ("structural_tag", {}, "structural_tag"),
        ("structured_outputs", {}, "structured_outputs"),
        ("n", 2, "choices:2"),
        ("best_of", 3, "choices:3"),
    ],
)
def test_each_constrained_field_gives_exactly_its_restart_reason(field: str, value: Any, reason: str) -> None:
    """Among fields that constrain nothing."""
    free = {"messages": [], "model": "m", "tool_choice": "auto", "response_format": TEXT, "n": 1, "tools": [FUNCTION]}
    assert restart_reason({**free, field: value}) == reason


@pytest.mark.behaviour("P135")
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": None},
        {"response_format": TEXT},
        {"response_format": None},
        {"guided_json": None, "structured_outputs": None, "structural_tag": None},
        {"n": 1, "best_of": 1},
        {"n": None, "best_of": None},
        {"n": True},
    ],
)
def test_auto_none_text_null_and_absent_give_no_reason(body: dict[str, Any]) -> None:
    assert restart_reason(body) == ""


def test_the_first_reason_of_the_table_is_given() -> None:
    body = {
        "best_of": 4,
        "n": 2,
        "guided_regex": "x",
        "guided_json": {},
        "response_format": SCHEMA,
        "tool_choice": "any",
    }
    reasons = []
    for field in ("tool_choice", "response_format", "guided_json", "guided_regex", "n", "best_of"):
        reasons.append(restart_reason(body))
        del body[field]
    assert reasons == [
        "tool_choice:any",
        "response_format:json_schema",
        "guided_json",
        "guided_regex",
        "choices:2",
        "choices:4",
    ]
    assert restart_reason(body) == ""


# ---- digests

BODY = {"messages": [{"role": "user", "content": "é"}], "model": "m", "temperature": 0.7, "max_tokens": 9, "tools": []}


def test_a_digest_changes_with_every_field_but_those_of_the_fixed_list() -> None:
    digest = request_digest(BODY)
    assert len(digest) == 64
    for field in BODY:
        assert request_digest({**BODY, field: None}) != digest
        assert request_digest({name: value for name, value in BODY.items() if name != field}) != digest
    for field in NOT_IN_DIGEST:
        assert request_digest({**BODY, field: {"any": 1}}) == digest
    assert {"stream", "stream_options", "user", "metadata", "request_id"} == NOT_IN_DIGEST


def test_a_field_of_the_list_counts_where_it_is_not_the_request_s_own() -> None:
    """A message or a tool may have a `user`, and that is content."""
    assert request_digest({"messages": [{"user": "a"}]}) != request_digest({"messages": [{"user": "b"}]})


def test_a_digest_knows_no_order_of_keys_and_no_spaces(rng: random.Random) -> None:
    fields = list(BODY.items())
    rng.shuffle(fields)
    assert request_digest(json.loads(json.dumps(dict(fields), indent=1))) == request_digest(BODY)


def test_a_digest_of_a_path_is_another_one() -> None:
    assert len({request_digest(BODY), request_digest(BODY, "/v1/responses"), request_digest(BODY, "/v1/messages")}) == 3


@pytest.mark.parametrize("text", ['{"seed": 123456789012345678901234567890}', '{"messages": ["\\ud800"]}'])
def test_what_json_can_say_has_a_digest_although_the_fast_encoder_refuses_it(text: str) -> None:
    body = json.loads(text)
    with pytest.raises(TypeError):
        orjson.dumps(body)
    assert request_digest(body) == request_digest(json.loads(text)) != request_digest({})


def test_what_is_no_json_has_none() -> None:
    with pytest.raises(TypeError):
        request_digest({"messages": {1, 2}})
