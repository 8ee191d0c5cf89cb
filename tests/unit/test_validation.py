"""The table of field rules: complete, all violations at once, each with its path."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gym_ckpt_grpc.auth import ROLES
from gym_ckpt_grpc.protocol import generation_validation, rules
from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import MAX_ATTEMPT
from gym_ckpt_grpc.protocol.phases import Operation
from gym_ckpt_grpc.protocol.validation import MAX_RETIRE, MAX_VIOLATIONS, RULES, validate
from gymckpt.v1 import coordinator_pb2, episode_pb2, generation_pb2, participant_pb2
from gymckpt.v1 import participant_pb2 as pb

SERVICE = participant_pb2.DESCRIPTOR.services_by_name["ParticipantService"]
MUTATING = [name for name in RULES if name not in ("GetStatus", "WatchStatus", "ListEpisodes")]


def context(checkpoint_id: str = "c1", controller_id: str = "me") -> pb.ControlContext:
    return pb.ControlContext(checkpoint_id=checkpoint_id, controller_id=controller_id, epoch=1)


def episodes(*ids: str, attempts: list[int] | None = None) -> episode_pb2.EpisodeList:
    return episode_pb2.EpisodeList(rollout_ids=ids, attempts=[0] * len(ids) if attempts is None else attempts)


def scope(*ids: str) -> episode_pb2.EpisodeScope:
    return episode_pb2.EpisodeScope(episodes=episodes(*ids))


def legal(method: str) -> Any:
    """The smallest legal request of each RPC."""
    made: dict[str, Message] = {
        "GetStatus": pb.GetStatusRequest(),
        "WatchStatus": pb.WatchStatusRequest(),
        "Prepare": pb.PrepareRequest(context=context()),
        "Capture": pb.CaptureRequest(context=context(), scope=scope("a")),
        "Commit": pb.CommitRequest(context=context(), scope=scope("a"), storage_uri="file:///r/checkpoints/c1"),
        "Resume": pb.ResumeRequest(context=context()),
        "Restore": pb.RestoreRequest(
            context=context(), storage_uri="file:///r/checkpoints/c1", source_checkpoint_id="c1", scope=episodes("a")
        ),
        "Retire": pb.RetireRequest(context=context(), episodes=episodes("a")),
        "Forget": pb.ForgetRequest(context=context(), rollouts=[pb.ForgetRollout(rollout_id="a")]),
        "RenewLease": pb.RenewLeaseRequest(context=context()),
        "ListEpisodes": pb.ListEpisodesRequest(kind=pb.EPISODE_LIST_KIND_RETIRED),
    }
    return made[method]


def faults(method: str, request: Any) -> list[str]:
    """The paths that are complained of; none if the request passes."""
    try:
        validate(method, request)
    except InvalidArgument as error:
        return [violation.field for violation in error.violations]
    return []


@pytest.mark.behaviour("C9")
def test_the_tables_have_exactly_the_rpcs_of_the_contract() -> None:
    """Validation, roles and legality list every RPC; a new one fails here until it is in each."""
    rpcs = {method.name for method in SERVICE.methods}
    assert set(RULES) == rpcs
    generation = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    assert set(generation_validation.RULES) == {method.name for method in generation.methods}
    served = [SERVICE, coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"], generation]
    ours = {f"/{service.full_name}/{method.name}" for service in served for method in service.methods}
    assert {method for method in ROLES if method.startswith("/gymckpt.")} == ours
    words = {"".join(part.title() for part in operation.value.split("_")) for operation in Operation}
    assert words == set(MUTATING)
    for method in SERVICE.methods:
        level = method.GetOptions().idempotency_level
        assert level == (2 if method.name in MUTATING else 1), method.name


@pytest.mark.parametrize("method", RULES)
def test_legal_requests_pass(method: str) -> None:
    """The smallest legal request of each RPC has no violation."""
    assert faults(method, legal(method)) == []


@pytest.mark.behaviour("C5")
@pytest.mark.parametrize("method", MUTATING)
def test_contexts(method: str) -> None:
    """A missing or unsafe id is refused; Retire and Forget alone may leave out the checkpoint."""
    request = legal(method)
    request.ClearField("context")
    assert faults(method, request) == ["context"]
    for checkpoint, controller in itertools.product(["c1", "", "a/b", "x" * 129, "a\n"], ["me", "", "../x"]):
        request.context.CopyFrom(context(checkpoint, controller))
        bad = []
        if checkpoint not in ("c1", "") or (checkpoint == "" and method not in ("Retire", "Forget")):
            bad.append("context.checkpoint_id")
        if controller != "me":
            bad.append("context.controller_id")
        assert faults(method, request) == bad, (checkpoint, controller)


def changed(method: str, **fields: Any) -> Any:
    request = legal(method)
    for name, value in fields.items():
        if value is None:
            request.ClearField(name)
        elif isinstance(value, Message):
            getattr(request, name).CopyFrom(value)
        elif isinstance(value, list):
            request.ClearField(name)
            getattr(request, name).extend(value)
        else:
            setattr(request, name, value)
    return request


LONG = Duration(seconds=400 * 24 * 3600)
BOTH_SIGNS = Duration(seconds=1, nanos=-1)
NANOS = Duration(nanos=1_000_000_000)
BAD = [
    ("Prepare", {"ready_within": Duration(seconds=-1)}, ["ready_within"]),
    ("Prepare", {"ready_within": LONG}, ["ready_within"]),
    ("Prepare", {"ready_within": BOTH_SIGNS}, ["ready_within"]),
    ("Prepare", {"ready_within": NANOS}, ["ready_within"]),
    ("Prepare", {"ready_within": Duration()}, []),
    ("Prepare", {"lease_ttl": Duration()}, ["lease_ttl"]),
    ("Prepare", {"lease_ttl": Duration(seconds=-3)}, ["lease_ttl"]),
    ("Prepare", {"lease_ttl": Duration(seconds=100_000)}, []),
    ("Capture", {"scope": None}, ["scope"]),
    ("Capture", {"scope": episode_pb2.EpisodeScope()}, ["scope"]),
    ("Capture", {"scope": episode_pb2.EpisodeScope(all=False)}, ["scope.all"]),
    ("Capture", {"scope": episode_pb2.EpisodeScope(all=True)}, []),
    ("Capture", {"scope": scope()}, []),
    ("Capture", {"scope": scope("a", "b/c")}, ["scope.episodes.rollout_ids[1]"]),
    ("Capture", {"scope": scope("a", "a")}, ["scope.episodes.rollout_ids[1]"]),
    ("Capture", {"expected_incarnation_id": "a b"}, ["expected_incarnation_id"]),
    ("Commit", {"storage_uri": ""}, ["storage_uri"]),
    ("Commit", {"storage_uri": "file:///a\nb"}, ["storage_uri"]),
    ("Commit", {"storage_uri": "x" * 4097}, ["storage_uri"]),
    ("Commit", {"base_checkpoint_uri": "a\x00"}, ["base_checkpoint_uri"]),
    ("Restore", {"storage_uri": ""}, ["storage_uri"]),
    ("Restore", {"source_checkpoint_id": ""}, ["source_checkpoint_id"]),
    ("Restore", {"expected_manifest_digest": "ab"}, ["expected_manifest_digest"]),
    ("Restore", {"expected_manifest_digest": "G" * 64}, ["expected_manifest_digest"]),
    ("Restore", {"expected_manifest_digest": "a" * 64}, []),
    ("Restore", {"scope": None}, ["scope"]),
    ("Restore", {"scope": episodes()}, []),
    ("Restore", {"scope": episodes("a", attempts=[])}, ["scope"]),
    ("Restore", {"scope": episodes("a", attempts=[MAX_ATTEMPT])}, ["scope.attempts[0]"]),
    ("Restore", {"install_as": [0]}, ["install_as[0]"]),
    ("Restore", {"install_as": [1, 2]}, ["install_as"]),
    ("Restore", {"install_as": [2**32 - 1]}, ["install_as[0]"]),
    ("Restore", {"install_as": [7]}, []),
    ("Retire", {"episodes": None}, ["episodes"]),
    ("Retire", {"episodes": episodes(*(f"r{i}" for i in range(MAX_RETIRE + 1)))}, ["episodes"]),
    ("Retire", {"episodes": episodes("r-a1")}, ["episodes.rollout_ids[0]"]),
    ("Retire", {"episodes": episodes("r", attempts=[2**32 - 1])}, ["episodes.attempts[0]"]),
    ("Forget", {"rollouts": None}, ["rollouts"]),
    ("Forget", {"rollouts": [pb.ForgetRollout(rollout_id="a")] * 2}, ["rollouts[1].rollout_id"]),
    ("Forget", {"rollouts": [pb.ForgetRollout()]}, ["rollouts[0].rollout_id"]),
    ("ListEpisodes", {"kind": 0}, ["kind"]),
    ("ListEpisodes", {"kind": 77}, ["kind"]),
    ("ListEpisodes", {"kind": 1}, ["checkpoint_id"]),
    ("ListEpisodes", {"kind": 1, "checkpoint_id": "c1"}, []),
    ("ListEpisodes", {"kind": 2, "checkpoint_id": "a b"}, []),
]


@pytest.mark.behaviour("C5")
@pytest.mark.parametrize(("method", "fields", "paths"), BAD)
def test_each_rule(method: str, fields: dict[str, Any], paths: list[str]) -> None:
    """Each bad value is refused under its path, and its legal neighbour passes."""
    assert faults(method, changed(method, **fields)) == paths


@pytest.mark.behaviour("C6")
def test_all_violations_are_told_at_once() -> None:
    """A request with every field wrong is told all of it, and the text names the first of them."""
    request = pb.RestoreRequest(
        context=context("", "a b"),
        lease_ttl=Duration(),
        expected_manifest_digest="zz",
        scope=episodes("ok", "b/d"),
    )
    with pytest.raises(InvalidArgument, match=r"context\.checkpoint_id is empty") as caught:
        validate("Restore", request)
    assert [violation.field for violation in caught.value.violations] == [
        "context.checkpoint_id",
        "context.controller_id",
        "lease_ttl",
        "storage_uri",
        "source_checkpoint_id",
        "expected_manifest_digest",
        "scope.rollout_ids[1]",
    ]


def test_a_list_of_bad_ids_is_told_in_part() -> None:
    """Collecting stops at a limit, also for the rules after the one that reached it."""
    bad = [f"bad id {i}" for i in range(1000)]
    request = pb.CommitRequest(context=context("c 1"), scope=scope(*bad), storage_uri="")
    assert len(faults("Commit", request)) == MAX_VIOLATIONS


@pytest.mark.parametrize("method", ["Capture", "Restore"])
def test_collecting_stops_for_every_rule(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the limit is reached no rule walks on through its million bad entries, nor does a later rule."""
    looked_at: list[str] = []

    def refuse(text: str) -> str:
        looked_at.append(text)
        return "is bad"

    monkeypatch.setattr(rules, "rollout_id_problem", refuse)
    bad = [f"r {i}" for i in range(10_000)]
    request = legal(method)
    request.context.checkpoint_id = ""
    request.scope.CopyFrom(episodes(*bad) if method == "Restore" else scope(*bad))
    assert len(faults(method, request)) == MAX_VIOLATIONS
    assert len(looked_at) == MAX_VIOLATIONS - 1


def test_rules_after_the_limit_are_hardly_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules without an end: collecting ends all the same."""

    def endless(request: Any) -> Iterator[Violation]:
        return (Violation("field", "is bad") for _ in itertools.count())

    monkeypatch.setitem(RULES, "Resume", (endless, endless))
    assert len(faults("Resume", legal("Resume"))) == MAX_VIOLATIONS
