"""Records of every kind: strict both ways, migrated step by step, without a wall-clock instant."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gym_ckpt_grpc
from gym_ckpt_grpc.control import HookFailed, InvalidState
from gym_ckpt_grpc.participants.records import AgentRecord, EnvironmentRecord, ResourcesRecord
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import R

PACKAGE = Path(gym_ckpt_grpc.__file__).parent
AnyRecord = type[EnvironmentRecord] | type[AgentRecord] | type[ResourcesRecord]


def made(kind: AnyRecord, state: Any) -> Record:
    """A record whose author's state is `state`."""
    if kind is EnvironmentRecord:
        return EnvironmentRecord(R, "digest", {"a": "digest"}, state).to_record()
    if kind is AgentRecord:
        return AgentRecord(R, "key", state, {"turn": 1}).to_record()
    return ResourcesRecord(R, "session", state).to_record()


def state_of(kind: AnyRecord, record: Record) -> Any:
    found = kind.from_record(record)
    if isinstance(found, EnvironmentRecord):
        return found.boundary
    return found.session if isinstance(found, AgentRecord) else found.state


@pytest.mark.behaviour("P18")
@pytest.mark.parametrize("kind", [EnvironmentRecord, AgentRecord, ResourcesRecord])
class TestPayloads:
    def test_what_survives_a_round_trip(self, kind: AnyRecord) -> None:
        state = {"z": 2**200, "a": [-(2**64), 1.5, None, True], "m": {"y": 1, "b": 2}}
        back = state_of(kind, made(kind, state))
        assert back == state
        assert (list(back), list(back["m"]), type(back["z"])) == (["z", "a", "m"], ["y", "b"], int)

    @pytest.mark.parametrize(
        ("state", "path"),
        [
            ({"a": [{"b": {1: 2}}]}, "a[0].b"),
            ({"a": {"b": object()}}, "a.b"),
            ({"a": [b"bytes"]}, "a[0]"),
            ({"a": {"b": {3}}}, "a.b"),
        ],
        ids=["key", "object", "bytes", "set"],
    )
    def test_what_is_no_json_is_refused_naming_its_path(self, kind: AnyRecord, state: Any, path: str) -> None:
        with pytest.raises(HookFailed, match=re.escape(path)) as caught:
            made(kind, state)
        assert caught.value.episode == R
