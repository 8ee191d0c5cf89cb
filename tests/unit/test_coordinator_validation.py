"""The table of field rules of CoordinatorService: complete, all violations at once, each with its path."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from gym_ckpt_grpc.auth import ROLES, Role
from gym_ckpt_grpc.protocol.coordinator_validation import MAX_TRAINER_STATE, RULES, validate_coordinator
from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gymckpt.v1 import coordinator_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["CoordinatorService"]
ONE = {"rollout_ids": ["a"], "attempts": [0]}
LEGAL: dict[str, dict[str, Any]] = {
    "ListParticipants": {},
    "PrepareCheckpoint": {},
    "CommitCheckpoint": {"checkpoint_id": "c", "scope": {}},
    "PublishCheckpoint": {"checkpoint_id": "c"},
    "ResumeCheckpoint": {"checkpoint_id": "c"},
    "RestoreCheckpoint": {"checkpoint_id": "latest"},
    "RenewCheckpoint": {"checkpoint_id": "c"},
    "RetireEpisodes": {"episodes": ONE},
    "ForgetRollouts": {"rollouts": [{"rollout_id": "a"}]},
    "GetCheckpoint": {"checkpoint_id": "latest"},
    "ListCheckpoints": {},
    "ListCheckpointEpisodes": {"checkpoint_id": "latest", "kind": 1},
    "VerifyCheckpoint": {"checkpoint_id": "latest"},
    "DeleteCheckpoint": {"checkpoint_id": "c"},
    "WatchEvents": {},
    "RunCheckpoint": {"in_flight": {}},
}
TWICE = {"rollout_ids": ["a", "a"], "attempts": [0, 1]}
BAD: list[tuple[str, dict[str, Any], list[str]]] = [
    *((method, {"checkpoint_id": "a/b"}, ["checkpoint_id"]) for method in LEGAL if "checkpoint_id" in LEGAL[method]),
    *((method, {"checkpoint_id": ""}, ["checkpoint_id"]) for method in LEGAL if "checkpoint_id" in LEGAL[method]),
    ("PrepareCheckpoint", {"checkpoint_id": "a b", "lease_ttl": Duration()}, ["checkpoint_id", "lease_ttl"]),
    ("PrepareCheckpoint", {"ready_within": Duration(seconds=-1)}, ["ready_within"]),
    ("CommitCheckpoint", {"scope": None}, ["scope"]),
    ("CommitCheckpoint", {"scope": TWICE}, ["scope.rollout_ids[1]"]),
    ("CommitCheckpoint", {"trainer_state": b"x" * (MAX_TRAINER_STATE + 1)}, ["trainer_state"]),
    ("RunCheckpoint", {"in_flight": None, "checkpoint_id": "-"}, ["checkpoint_id", "in_flight"]),
    ("RunCheckpoint", {"in_flight": {"rollout_ids": ["a"]}}, ["in_flight"]),
    ("RestoreCheckpoint", {"scope": {}, "restore_id": "/"}, ["scope", "restore_id"]),
    ("RestoreCheckpoint", {"scope": {"episodes": TWICE}}, ["scope.episodes.rollout_ids[1]"]),
    ("RetireEpisodes", {"episodes": {}}, ["episodes"]),
    ("RetireEpisodes", {"episodes": None}, ["episodes"]),
    ("ForgetRollouts", {"rollouts": []}, ["rollouts"]),
    ("ListCheckpoints", {"page_size": 1001, "page_token": "next"}, ["page_size", "page_token"]),
    ("ListCheckpointEpisodes", {"kind": 0}, ["kind"]),
    ("ListCheckpointEpisodes", {"kind": 9}, ["kind"]),
    ("DeleteCheckpoint", {"checkpoint_id": "latest"}, ["checkpoint_id"]),
]


def request(method: str, **changes: Any) -> Any:
    fields = {name: value for name, value in {**LEGAL[method], **changes}.items() if value is not None}
    return getattr(pb, f"{method}Request")(**fields)


def test_the_tables_have_exactly_the_rpcs_of_the_contract() -> None:
    """Validation and roles list every RPC; a mutating one is no observer's."""
    assert set(RULES) == set(LEGAL) == {method.name for method in SERVICE.methods}
    for method in SERVICE.methods:
        level = method.GetOptions().idempotency_level
        assert (Role.OBSERVER in ROLES[f"/{SERVICE.full_name}/{method.name}"]) is (level == 1), method.name


@pytest.mark.parametrize("method", LEGAL)
def test_legal_requests_pass(method: str) -> None:
    validate_coordinator(method, request(method))


@pytest.mark.parametrize(("method", "changes", "fields"), BAD)
def test_bad_fields_are_all_told(method: str, changes: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate_coordinator(method, request(method, **changes))
    assert [violation.field for violation in caught.value.violations] == fields
