"""How the framework names rollouts: held against the framework's own rules."""

from __future__ import annotations

from typing import Any

import pytest
from itsdangerous import URLSafeSerializer
from nemo_gym import mcp_auto_exposure, rollout_correlation
from nemo_gym.config_types import ROLLOUT_PATH_PREFIX
from nemo_gym.episode_types import EpisodeId as TypedEpisodeId

from gym_ckpt_grpc.integrations.nemo_gym import NAMES, NemoTokens, episode_of_body
from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gym_ckpt_grpc.protocol.ids import EpisodeId

SECRET = "Server___counter"


def test_the_prefix_and_the_session_header_are_the_frameworks() -> None:
    assert NAMES.rollout_prefix == f"/{ROLLOUT_PATH_PREFIX}"
    assert NAMES.session_header == mcp_auto_exposure.NEMO_GYM_MCP_SESSION_TOKEN_HEADER.lower()


@pytest.mark.parametrize(
    "row",
    [
        {"_ng_task_index": 3, "_ng_rollout_index": 0},
        {"_ng_task_index": "t", "_ng_rollout_index": 2, "_ng_attempt_index": 0},
        {"_ng_task_index": 3, "_ng_rollout_index": 0, "_ng_attempt_index": 2},
        {"_ng_task_index": 3, "_ng_rollout_index": 0, "_ng_attempt_index": "2"},
        {"_ng_rollout_id": "step3.7", "_ng_task_index": 1, "_ng_rollout_index": 1},
        {"_ng_rollout_id": "step3.7", "_ng_attempt_index": 1},
        {"_ng_rollout_id": "step3.7-a4"},
        {"_ng_task_index": 3},
        {"_ng_attempt_index": 3, "episode_id": "a column of the data set"},
        {},
    ],
)
def test_a_row_names_the_rollout_that_the_framework_derives_from_it(row: dict[str, Any]) -> None:
    key = rollout_correlation.maybe_rollout_id_from_run_body(row)
    episode = episode_of_body(row)
    assert (episode.capture_key if episode else None) == key


@pytest.mark.parametrize("attempt", [0, 3])
def test_a_typed_episode_goes_before_the_fields_of_the_row(attempt: int) -> None:
    typed = TypedEpisodeId(rollout_id="r-7", attempt=attempt)
    body = {"episode_id": typed.model_dump(mode="json"), "_ng_rollout_id": "other"}
    assert episode_of_body(body) == EpisodeId.from_capture_key(typed.capture_key) == EpisodeId("r-7", attempt)
    assert episode_of_body({"episode_id": {"rollout_id": "r"}}) == EpisodeId("r")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"episode_id": {}}, "episode_id.rollout_id"),
        ({"episode_id": {"rollout_id": 3}}, "episode_id.rollout_id"),
        ({"episode_id": {"rollout_id": "r", "attempt": "1"}}, "episode_id.attempt"),
        ({"episode_id": {"rollout_id": "r", "attempt": True}}, "episode_id.attempt"),
        ({"episode_id": {"rollout_id": "r", "attempt": -1}}, "episode_id"),
        ({"episode_id": {"rollout_id": "r-a1"}}, "episode_id"),
        ({"_ng_rollout_id": 3}, "_ng_rollout_id"),
        ({"_ng_rollout_id": "x" * 300}, "_ng_rollout_id"),
        ({"_ng_rollout_id": "../x"}, "_ng_rollout_id"),
        ({"_ng_rollout_id": "r-a1", "_ng_attempt_index": 2}, "_ng_rollout_id"),
        ({"_ng_task_index": "../x", "_ng_rollout_index": 1}, "_ng_task_index"),
        ({"_ng_rollout_id": "r", "_ng_attempt_index": "x"}, "_ng_attempt_index"),
        ({"_ng_rollout_id": "r", "_ng_attempt_index": [1]}, "_ng_attempt_index"),
        ({"_ng_rollout_id": "r", "_ng_attempt_index": True}, "_ng_attempt_index"),
        ({"_ng_rollout_id": "r", "_ng_attempt_index": float("inf")}, "_ng_attempt_index"),
        ({"_ng_rollout_id": "r", "_ng_attempt_index": float("nan")}, "_ng_attempt_index"),
    ],
)
def test_an_illegal_name_is_refused_and_the_field_is_said(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        episode_of_body(body)
    assert [each.field for each in refused.value.violations] == [field]


def test_a_token_of_the_framework_is_read_with_the_key_of_its_server_only() -> None:
    serializer = URLSafeSerializer(SECRET, salt=mcp_auto_exposure._MCP_TOKEN_SALT)
    token = serializer.dumps({"sid": "s1", "tools": ["add"] * 100})
    assert NemoTokens(SECRET).read(token) == "s1"
    assert NemoTokens("Server___other").read(token) is None


def test_what_is_no_token_of_a_session_gives_none() -> None:
    serializer = URLSafeSerializer(SECRET, salt=mcp_auto_exposure._MCP_TOKEN_SALT)
    other = URLSafeSerializer(SECRET, salt="another use of the key")
    bad = [None, "", "x", "a.b", other.dumps({"sid": "s1"}), serializer.dumps({"sid": "s1"})[:-1]]
    bad += [serializer.dumps(each) for each in (["sid"], "s1", {}, {"sid": ""}, {"sid": 3})]
    assert [NemoTokens(SECRET).read(each) for each in bad] == [None] * len(bad)
