"""Which servers a topology has, and which of them take part in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.deployment import Deployment
from gym_ckpt_grpc.minigym.serve import BUILDERS
from gym_ckpt_grpc.minigym.topology import Role, Topology
from gym_ckpt_grpc.protocol.identity import ParticipantKind


def participants(topology: Topology) -> list[str]:
    """Names of those that have a kind."""
    return [server.name for server in topology.servers() if server.kind is not None]


def test_a_native_minigym_has_four_kinds_and_a_worker_that_is_none() -> None:
    assert participants(Topology()) == ["environment", "agent", "policy_model", "counter", "blackjack"]
    assert [server.name for server in Topology().servers()][-1] == "inference"


@pytest.mark.behaviour("P93")
def test_the_relay_of_a_legacy_minigym_is_no_participant(tmp_path: Path) -> None:
    """The agent owns its episodes; a coordinator is told so by the fleet."""
    plan = Deployment.create(tmp_path / "gym", topology=Topology(protocol="legacy", resources=("counter",)))
    assert participants(plan.topology) == ["agent", "policy_model", "counter"]
    taking_part = {server.service: server.participant for server in plan.fleet().servers}
    assert taking_part == {
        "environment": False,
        "agent": True,
        "policy_model": True,
        "counter": True,
        "inference": False,
    }


def test_several_workers_are_numbered(tmp_path: Path) -> None:
    plan = Deployment.create(tmp_path / "gym", topology=Topology(inference_workers=2, judge=True))
    assert [worker.name for worker in plan.workers()] == ["inference-0", "inference-1"]
    ports = [port for server in plan.servers for port in (server.port, server.control_port) if port]
    assert len(set(ports)) == len(ports)
    assert plan.server("judge").participant_kind is None
    assert plan.server("counter").participant_kind is ParticipantKind.RESOURCES
    assert Deployment.load(plan.file) == plan


def test_an_impossible_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="inference_workers"):
        Topology(inference_workers=0)
    with pytest.raises(ValueError, match="cuts"):
        Topology(capture=False)


def test_every_role_has_a_builder() -> None:
    assert set(BUILDERS) == set(Role.__args__)  # type: ignore[attr-defined]
