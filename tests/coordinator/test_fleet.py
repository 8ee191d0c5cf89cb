"""The declaration of a fleet, in Python and in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import Fleet, FleetInvalid, Server
from gym_ckpt_grpc.protocol.identity import ParticipantKind

MODEL = {"kind": "policy_model", "service": "policy", "address": "10.0.0.7:7000"}


def write(path: Path, text: str) -> Path:
    file = path / "fleet.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.behaviour("C187")
def test_servers_are_listed_by_kind_then_service_then_instance() -> None:
    """environment, policy_model, agent, resources; a server that is no participant is not called."""
    given = [
        Server(kind="resources", service="tools", address="h:5"),
        Server(kind="agent", service="a", address="h:4"),
        Server(service="judge", address="h:9", participant=False),
        Server(kind="policy_model", service="p", address="h:3", instance="1"),
        Server(kind="policy_model", service="p", address="h:2", instance="0"),
        Server(kind="environment", service="z", address="h:1"),
        Server(kind="environment", service="b", address="h:0"),
    ]
    assert [server.address for server in Fleet(given).participants] == [f"h:{i}" for i in range(6)]


@pytest.mark.behaviour("C188")
def test_a_fleet_without_a_policy_model_is_refused_unless_it_says_so() -> None:
    environment = Server(kind="environment", service="env", address="h:1")
    with pytest.raises(FleetInvalid, match="policy_model"):
        Fleet([environment])
    assert len(Fleet([environment], require_kinds=()).participants) == 1


def test_a_file_becomes_a_fleet(tmp_path: Path) -> None:
    fleet = Fleet.from_yaml(
        write(
            tmp_path,
            """
servers:
  - {kind: environment,  service: math-env, address: "dns:///math-env.pool:7000", instances: 4}
  - {kind: policy_model, service: policy,   address: "10.0.0.7:7000", instance: 0}
  - {kind: resources,    service: sandbox,  address: "unix:sandbox.sock", required: false, used_by: [math-env]}
  - {service: judge, address: "judge:7000", participant: false}
""",
        )
    )
    env, policy, sandbox, judge = fleet.servers
    assert (env.kind, env.instances) == (ParticipantKind.ENVIRONMENT, 4)
    assert policy.instance == "0"
    assert (sandbox.required, sandbox.used_by) == (False, ("math-env",))
    assert not judge.participant
    assert len(fleet.participants) == 3


@pytest.mark.behaviour("C200")
@pytest.mark.parametrize(
    ("loaded", "named"),
    [
        ({"servers": [{**MODEL, "adress": "x:1"}]}, "'adress' .*did you mean 'address'"),
        ({"servers": [{**MODEL, "requird": False}]}, "'requird' .*did you mean 'required'"),
        ({"servrs": [MODEL]}, "'servrs' .*did you mean 'servers'"),
        ({"servers": [{**MODEL, "kind": "policy-model"}]}, "'policy-model' .*did you mean 'policy_model'"),
        ({"servers": [MODEL], "require_kinds": ["policy_model", "agent"]}, "no server of kind agent"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(loaded: Any, named: str) -> None:
    with pytest.raises(FleetInvalid, match=named):
        Fleet.from_mapping(loaded)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({**MODEL, "instances": 0}, "instances is 0"),
        ({**MODEL, "instances": True}, "instances must be a whole number"),
        ({**MODEL, "required": "no"}, "required must be true or false"),
        ({**MODEL, "used_by": "math-env"}, "used_by must be a list"),
        ({**MODEL, "service": "-x"}, "service has characters"),
        ({"service": "policy", "address": "h:1"}, "kind is missing"),
        ({"kind": "policy_model", "service": "policy"}, "address is missing"),
        ({**MODEL, "address": ""}, "address is empty"),
        ("policy", "is no mapping"),
    ],
)
def test_a_half_given_server_is_refused_by_name(entry: Any, named: str) -> None:
    with pytest.raises(FleetInvalid, match=named):
        Fleet.from_mapping({"servers": [entry]})


def test_what_is_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetInvalid, match="cannot be read"):
        Fleet.from_yaml(write(tmp_path, "servers: ["))
    with pytest.raises(FleetInvalid, match="no mapping"):
        Fleet.from_yaml(write(tmp_path, "- a"))
