"""Looking at the fleet: what each answer, and each silence, means."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue
from gym_ckpt_grpc.coordinator import (
    CheckpointState,
    Coordinator,
    DiscoveryFailed,
    EventKind,
    Finding,
    Fleet,
    Server,
    look_at,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import coordinator_pb2
from tests.coordinator.fleet_of_nodes import Gate, Nodes, edit, episodes


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def failure(coordinator: Coordinator) -> DiscoveryFailed:
    with pytest.raises(DiscoveryFailed) as raised:
        async with coordinator:
            pytest.fail("the fleet was accepted")
    return raised.value


def test_findings_are_those_of_the_protocol() -> None:
    theirs = {n.removeprefix("SERVER_FINDING_"): v for n, v in coordinator_pb2.ServerFinding.items()}
    assert {finding.name: finding.value for finding in Finding} == theirs


def test_states_and_events_are_those_of_the_protocol() -> None:
    states = {n.removeprefix("CHECKPOINT_STATE_"): v for n, v in coordinator_pb2.CheckpointState.items()}
    kinds = {n.removeprefix("EVENT_KIND_"): v for n, v in coordinator_pb2.EventKind.items()}
    assert {state.name: state.value for state in CheckpointState} == states
    assert {kind.name: kind.value for kind in EventKind} == kinds


@pytest.mark.behaviour("C189")
async def test_a_server_that_is_down_is_named_after_three_tries(nodes: Nodes) -> None:
    await nodes["agent"].stop()
    error = await failure(nodes.coordinator())
    assert nodes["agent"].address in str(error)
    assert "DOWN" in str(error)
    assert "3 tries" in str(error)


@pytest.mark.behaviour("C190")
async def test_a_silent_server_fails_after_the_timeout_and_is_named(nodes: Nodes) -> None:
    gate = Gate()
    nodes["res"].always["GetStatus"] = gate.hold()
    error = await failure(nodes.coordinator(discovery_timeout=0.5))
    assert "SILENT" in str(error)
    assert nodes["res"].address in str(error)
    assert re.search(r"no answer \(0\.\d s", str(error))  # what was left of the half second


@pytest.mark.behaviour("C191")
async def test_an_unknown_kind_fails_and_is_named(nodes: Nodes) -> None:
    nodes["res"].always["GetStatus"] = edit(lambda reply: _set_kind(reply, 17))
    error = await failure(nodes.coordinator())
    assert "WRONG_IDENTITY" in str(error)
    assert "unknown participant kind 17" in str(error)


def _set_kind(reply: Any, kind: int) -> None:
    reply.status.participant.kind = kind


@pytest.mark.behaviour("C192")
async def test_one_error_names_every_failing_server(nodes: Nodes) -> None:
    await nodes["env"].stop()
    await nodes["agent"].stop()
    nodes["res"].always["GetStatus"] = edit(lambda reply: _set_kind(reply, 17))
    error = await failure(nodes.coordinator())
    assert all(nodes[name].address in str(error) for name in ("env", "agent", "res"))
    assert [s.finding for s in error.sightings] == [
        Finding.DOWN,
        Finding.OK,
        Finding.DOWN,
        Finding.WRONG_IDENTITY,
    ]


@pytest.mark.behaviour("C193")
async def test_a_declared_participant_that_serves_none_fails(nodes: Nodes) -> None:
    bare = grpc.aio.server()
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    extra = Server(kind="agent", service="other", address=f"127.0.0.1:{port}")
    try:
        error = await failure(nodes.coordinator(fleet=Fleet([*nodes.fleet().servers, extra])))
    finally:
        await bare.stop(0)
    assert "NOT_A_PARTICIPANT" in str(error)
    assert extra.address in str(error)


@pytest.mark.behaviour("C194")
@pytest.mark.parametrize(
    ("declared", "finding", "named"),
    [
        ({"service": "other"}, Finding.WRONG_IDENTITY, ("agent/other/0", "agent/agent/0")),
        ({"kind": "resources"}, Finding.WRONG_IDENTITY, ("resources/agent/0", "agent/agent/0")),
        ({"instance": "3"}, Finding.WRONG_IDENTITY, ("agent/agent/3", "agent/agent/0")),
        ({"capabilities": ("fly",)}, Finding.INCOMPATIBLE, ("lacks fly", "has none")),
        ({"protocol_minor": 9}, Finding.INCOMPATIBLE, ("speaks minor 1", "9 is needed")),
    ],
)
async def test_identity_is_compared_with_the_declaration(
    nodes: Nodes, declared: dict[str, Any], finding: Finding, named: tuple[str, str]
) -> None:
    nodes["agent"].declared = declared
    error = await failure(nodes.coordinator())
    assert finding in {s.finding for s in error.sightings}
    assert all(name in str(error) for name in named)


async def test_refused_credentials_fail_even_where_the_server_is_optional(tmp_path: Path) -> None:
    guard = Authenticator({Role.CONTROLLER: TokenValue("secret-token")})
    nodes = await Nodes(tmp_path).start("model")
    await nodes.start("res", authenticator=guard, declared={"required": False})
    try:
        error = await failure(nodes.coordinator(token=TokenValue("another-token")))
        assert "REFUSED" in str(error)
        assert "another-token" not in str(error)
        async with nodes.coordinator(token=TokenValue("secret-token")) as coordinator:
            assert all(s.ok for s in await coordinator.status())
    finally:
        await nodes.stop()


@pytest.mark.behaviour("C195")
async def test_two_addresses_of_one_process_are_one_participant(nodes: Nodes) -> None:
    agent = nodes["agent"]
    again = Server(kind="agent", service="agent", address=agent.address.replace("127.0.0.1", "localhost"))
    fleet = Fleet([*nodes.fleet().servers, again])
    async with nodes.coordinator(fleet=fleet) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        assert len(checkpoint.members) == 4
    assert nodes.journal.begun("Prepare").count("agent") == 1


@pytest.mark.behaviour("C195")
async def test_two_processes_in_one_place_fail_even_where_optional(nodes: Nodes) -> None:
    await nodes.start("agent-2", service="agent", declared={"required": False})
    error = await failure(nodes.coordinator())
    assert "DUPLICATE" in str(error)
    assert nodes["agent"].address in str(error)
    assert nodes["agent-2"].address in str(error)


@pytest.mark.behaviour("C196")
async def test_an_optional_server_that_is_down_is_excluded_by_name(nodes: Nodes) -> None:
    """Its rollouts are restarts (all of them: which it holds is not known), and the checkpoint is published."""
    in_flight = nodes.add(*episodes(2))
    nodes["res"].declared = {"required": False}
    fleet = nodes.fleet()
    await nodes["res"].stop()
    async with nodes.coordinator(fleet=fleet) as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        assert list(report.excluded) == ["resources/res/0"]
        await checkpoint.commit(report.continued(in_flight))
        await checkpoint.publish()
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.PUBLISHED
    assert checkpoint.manifest is not None
    assert [(e.service, e.reason.split(":")[0]) for e in checkpoint.manifest.excluded] == [("res", "DOWN")]
    assert checkpoint.restarts == dict.fromkeys(in_flight, "excluded")


async def test_a_replaced_server_is_noticed_at_the_next_prepare(nodes: Nodes) -> None:
    nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        await nodes["agent"].restart()
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            found = next(m for m in checkpoint.members if m.identity.service == "agent")
            assert found.identity.incarnation_id == nodes["agent"].identity.incarnation_id
        replaced = [e for e in coordinator.events if e.kind is EventKind.FINDING]
    assert [event.participant for event in replaced if "replaced" in event.message] == ["agent/agent/0"]


@pytest.mark.behaviour("C199")
@pytest.mark.parametrize("before", ["Prepare", "Restore"])
async def test_marks_are_announced_again_to_a_new_process(nodes: Nodes, before: str) -> None:
    """Before it is prepared, and before it is restored into and reopened."""
    marked = [EpisodeId("gone-0"), EpisodeId("gone-1")]
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight)
            await checkpoint.publish()
        await coordinator.retire(marked)
        await coordinator.forget([marked[1]])
        await nodes["agent"].restart()
        nodes["agent"].calls.clear()
        nodes.journal.clear()
        if before == "Prepare":
            async with coordinator.checkpoint() as checkpoint:
                await checkpoint.prepare(ready_within=5)
        else:
            async with coordinator.restoring():
                pass
    calls = [e.method for e in nodes.journal if e.node == "agent" and e.what == "begin"]
    assert calls.index("Retire") < calls.index(before)
    assert list(nodes["agent"].calls["Retire"][0].episodes.rollout_ids) == ["gone-0"]


async def test_status_tells_of_every_server_and_fails_for_none(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator:
        await nodes["env"].stop()
        found = await coordinator.status(timeout=5)
    assert [s.finding for s in found] == [Finding.DOWN, Finding.OK, Finding.OK, Finding.OK]
    assert all(s.status is not None for s in found if s.ok)


async def test_a_fleet_can_be_looked_at_without_a_coordinator(nodes: Nodes) -> None:
    found = await look_at(nodes.fleet(), timeout=5)
    assert [s.identity and s.identity.service for s in found] == ["env", "model", "agent", "res"]
    assert {entry.method for entry in nodes.journal} == {"GetStatus"}
    assert not nodes.root.exists()


async def test_too_few_instances_are_counted(nodes: Nodes) -> None:
    nodes["env"].declared = {"instances": 2}
    error = await failure(nodes.coordinator())
    assert "1 of 2 of env" in str(error)


async def test_looking_leaves_no_call_behind(nodes: Nodes) -> None:
    gate = Gate()
    nodes["res"].always["GetStatus"] = gate.hold()
    task = asyncio.create_task(failure(nodes.coordinator(discovery_timeout=30)))
    await gate.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
