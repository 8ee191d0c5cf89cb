"""Prepare and Resume over the fleet: order, budgets, blockers, restarts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator import (
    CheckpointState,
    EventKind,
    NotPrepared,
    PrepareFailed,
    RetireFailed,
)
from gym_ckpt_grpc.coordinator.fanout import stage_part
from gym_ckpt_grpc.protocol.errors import ExportFailed, InternalError, InvalidPhase, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.coordinator.fleet_of_nodes import Gate, Nodes, broken, edit, episodes, refuse


def order(nodes: Nodes, method: str) -> list[tuple[str, str]]:
    return [(e.node, e.what) for e in nodes.journal if e.method == method]


@pytest.mark.behaviour("C201")
async def test_stages_close_callers_first_and_open_callees_first(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        assert nodes.all["env"].phase == "PREPARED"
    expected = [(name, what) for name in ("env", "model", "agent", "res") for what in ("begin", "end")]
    assert order(nodes, "Prepare") == expected
    resumes = order(nodes, "Resume")
    assert {name for name, _ in resumes[:4]} == {"model", "res"}
    assert resumes[4:] == [("agent", "begin"), ("agent", "end"), ("env", "begin"), ("env", "end")]


async def test_resume_is_a_head_start_not_a_gate(nodes: Nodes) -> None:
    """A callee that does not answer delays nobody for longer than the grace."""
    gate = Gate()
    nodes["model"].script["Resume"] = [gate.hold()]
    async with nodes.coordinator(stage_grace=0.05) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            leaving = asyncio.get_running_loop().call_later(0.6, gate.open.set)
        leaving.cancel()
    begins = {e.node: e.at for e in nodes.journal if (e.method, e.what) == ("Resume", "begin")}
    assert begins["env"] - begins["model"] < 0.5
    assert nodes.all_open()


@pytest.mark.behaviour("C202")
async def test_an_unready_agent_stops_the_prepare_before_resources(nodes: Nodes) -> None:
    (blocked,) = nodes.add(*episodes(1))
    nodes["agent"].owner.running.add(blocked)
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        with pytest.raises(NotPrepared) as raised:
            await checkpoint.prepare(ready_within=0.5)
        assert nodes["res"].phase == "IDLE"
    assert nodes.journal.begun("Prepare") == ["env", "model", "agent"]
    assert [(name, b.episode, b.place) for name, b in raised.value.report.blockers] == [
        ("agent/agent/0", blocked, "step")
    ]
    assert raised.value.report.blocker_count == 1
    assert checkpoint.report is raised.value.report
    assert "r0 RUNNING in step" in str(raised.value)
    assert nodes.all_open()
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.ABORTED


@pytest.mark.behaviour("C203")
async def test_a_stage_that_used_its_own_part_leaves_the_next_ones_theirs(nodes: Nodes) -> None:
    """2:2:1:1 over the stages, and what a stage does not use flows on."""
    (parking,) = nodes.add(*episodes(1))
    nodes["env"].owner.running.add(parking)

    async def park_late(inner: Any, request: Any, context: Any) -> Any:
        asyncio.get_running_loop().call_later(
            wire.seconds(request.ready_within) * 0.9, nodes["env"].owner.park, parking
        )
        return await inner(request, context)

    nodes["env"].script["Prepare"] = [park_late]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=3)
    asked = {n: wire.seconds(nodes[n].calls["Prepare"][0].ready_within) for n in ("env", "model", "agent", "res")}
    assert 0.8 < asked["env"] <= 1.0
    assert 0.7 < asked["model"] <= 1.05  # half of what the first stage left
    assert 0.7 < asked["agent"] <= 1.05  # half of that, which the model did not use
    assert asked["res"] > 1.4


def test_parts_are_divided_by_weight_over_the_stages_that_have_members() -> None:
    class FakeMember:
        def __init__(self, kind: str) -> None:
            self.kind = kind

    def stages(*kinds: str) -> Any:
        return [[FakeMember(kind)] for kind in kinds]

    assert stage_part(stages("environment", "policy_model", "agent", "resources"), 6.0) == 2.0
    assert stage_part(stages("policy_model", "agent"), 6.0) == 4.0
    assert stage_part(stages("resources"), 6.0) == 6.0


@pytest.mark.behaviour("C208")
async def test_restarts_of_all_are_united_and_the_order_of_the_rest_is_kept(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(5))[::-1]
    nodes["agent"].owner.restarts.add(in_flight[1])
    nodes["res"].owner.restarts.add(in_flight[3])
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        assert set(report.restarts) == {in_flight[1], in_flight[3]}
        scope = report.continued(in_flight)
        assert scope == [in_flight[0], in_flight[2], in_flight[4]]
        await checkpoint.commit(scope)
    assert checkpoint.restarts == {in_flight[1]: "restart", in_flight[3]: "restart"}


@pytest.mark.behaviour("C208")
async def test_restarts_beyond_what_a_reply_lists_are_fetched(nodes: Nodes) -> None:
    many = [EpisodeId(f"x{i}") for i in range(1500)]
    nodes["agent"].owner.restarts.update(many)
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
    assert set(report.restarts) == set(many)


@pytest.mark.behaviour("C209")
async def test_a_retired_straggler_lets_the_same_checkpoint_go_on(nodes: Nodes) -> None:
    straggler, other = nodes.add(*episodes(2))
    nodes["env"].owner.running.add(straggler)
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        with pytest.raises(NotPrepared):
            await checkpoint.prepare(ready_within=0.3)
        await coordinator.retire([straggler])
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued([other]))
        await checkpoint.publish()
    assert checkpoint.continued == (other,)
    assert all(node.episodes == {other} for node in nodes)


@pytest.mark.behaviour("C210")
async def test_a_retire_in_a_phase_that_refuses_it_fails_with_the_typed_code(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        with pytest.raises(RetireFailed) as raised:
            await coordinator.retire(in_flight)
    assert all(isinstance(outcome.error, InvalidPhase) for outcome in raised.value.outcomes)
    assert {outcome.error.participant for outcome in raised.value.outcomes if outcome.error} == {
        node.place for node in nodes
    }
    assert set(raised.value.result.incomplete) == set(in_flight)


@pytest.mark.behaviour("C211")
async def test_resume_retire_and_a_new_id_succeed(nodes: Nodes) -> None:
    straggler, other = nodes.add(*episodes(2))
    nodes["agent"].owner.running.add(straggler)
    async with nodes.coordinator() as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            with pytest.raises(NotPrepared):
                await checkpoint.prepare(ready_within=0.3)
        await coordinator.retire([straggler])
        async with coordinator.checkpoint() as second:
            await second.prepare(ready_within=5)
            await second.commit([other])
            await second.publish()
    assert second.continued == (other,)


async def test_a_failed_prepare_call_has_all_outcomes_of_its_stage(nodes: Nodes) -> None:
    await nodes.start("agent-2", service="agent", instance="1")
    nodes["agent"].always["Prepare"] = refuse(InternalError("incident 1"))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        with pytest.raises(PrepareFailed, match="incident 1") as raised:
            await checkpoint.prepare(ready_within=5)
    assert [(o.name, o.ok) for o in raised.value.outcomes] == [
        ("environment/env/0", True),
        ("policy_model/model/0", True),
        ("agent/agent/0", False),
        ("agent/agent/1", True),
    ]
    assert nodes["res"].calls["Prepare"] == []
    assert nodes.all_open()


async def test_an_optional_server_that_cannot_prepare_is_excluded(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    nodes["res"].declared = {"required": False}
    nodes["res"].always["Prepare"] = refuse(InternalError("incident 2"))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        assert "incident 2" in report.excluded["resources/res/0"]
        assert report.continued(in_flight) == []
    assert nodes.all_open()


async def test_a_prepare_that_was_resumed_meanwhile_is_a_failure(nodes: Nodes) -> None:
    nodes["agent"].script["Prepare"] = [edit(lambda reply: setattr(reply, "phase", 1))]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        with pytest.raises(PrepareFailed, match="was resumed while it prepared"):
            await checkpoint.prepare(ready_within=5)


@pytest.mark.behaviour("C216")
async def test_every_fan_out_gives_one_outcome_each_and_leaves_no_sibling_running(nodes: Nodes) -> None:
    """A failure does not end the siblings: the caller has the answer when all have theirs."""
    in_flight = nodes.add(*episodes(1))
    gates = {name: Gate() for name in ("env", "model", "res")}
    for name, gate in gates.items():
        nodes[name].script["Capture"] = [gate.hold()]
    refused = asyncio.Event()

    async def refusing(inner: Any, request: Any, context: Any) -> Any:
        refused.set()
        raise InternalError("incident 3")

    nodes["agent"].script["Capture"] = [refusing]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        capturing = asyncio.create_task(checkpoint.capture(in_flight))
        await asyncio.gather(refused.wait(), *(gate.entered.wait() for gate in gates.values()))
        for name in ("env", "model"):
            gates[name].open.set()
        await asyncio.wait({capturing}, timeout=0.1)
        assert not capturing.done()
        gates["res"].open.set()
        with pytest.raises(Exception, match="incident 3") as raised:
            await capturing
        assert not [e for e in nodes.journal.under_way() if e.method == "Capture"]
    assert [(o.name, o.ok) for o in raised.value.outcomes] == [  # type: ignore[attr-defined]
        ("environment/env/0", True),
        ("policy_model/model/0", True),
        ("agent/agent/0", False),
        ("resources/res/0", True),
    ]
    assert [o.ok for o in checkpoint.outcomes["Capture"]].count(True) == 3


@pytest.mark.behaviour("C218")
async def test_a_lost_reply_of_a_prepare_is_asked_again(nodes: Nodes) -> None:
    nodes["agent"].script["Prepare"] = [broken(after=True)]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
    (outcome,) = [o for o in checkpoint.outcomes["Prepare"] if o.name == "agent/agent/0"]
    assert outcome.tries == 2
    assert outcome.answer.replayed


async def test_a_stage_is_an_event(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
    stages = [e.message for e in coordinator.events if e.kind is EventKind.STAGE]
    assert stages.pop().startswith("prepared: every participant is at its cut after ")
    assert stages == [f"{kind}: 1 of 1 prepared" for kind in ("environment", "policy_model", "agent", "resources")]
    assert [e.number for e in coordinator.events] == list(range(1, len(coordinator.events) + 1))


async def test_calls_out_of_order_send_nothing(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator:
        checkpoint = coordinator.checkpoint()
        with pytest.raises(UsageError):
            await checkpoint.prepare()
        async with checkpoint:
            for early in (checkpoint.capture([]), checkpoint.commit([]), checkpoint.reopen(), checkpoint.publish()):
                with pytest.raises(UsageError):
                    await early
            with pytest.raises(UsageError):
                async with coordinator.checkpoint():
                    pytest.fail("two were open at once")
            with pytest.raises(UsageError):
                await checkpoint.prepare(ready_within=float("nan"))
        with pytest.raises(UsageError):
            async with checkpoint:
                pytest.fail("entered twice")
        with pytest.raises(UsageError):
            coordinator.checkpoint(deadline=0)
        with pytest.raises(UsageError):
            coordinator.checkpoint(checkpoint_id="../x")
    assert {entry.method for entry in nodes.journal} == {"GetStatus"}
    with pytest.raises(UsageError):
        coordinator.checkpoint()


async def test_the_deadline_bounds_everything(nodes: Nodes) -> None:
    nodes["env"].always["Prepare"] = broken()
    begun = time.monotonic()
    async with nodes.coordinator() as coordinator, coordinator.checkpoint(deadline=0.8) as checkpoint:
        with pytest.raises(PrepareFailed):
            await checkpoint.prepare(ready_within=30)
    assert time.monotonic() - begun < 3


async def test_a_failing_export_hook_is_a_typed_failure(nodes: Nodes) -> None:
    nodes["agent"].always["Prepare"] = refuse(ExportFailed("hook"))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint(deadline=1) as checkpoint:
        with pytest.raises(PrepareFailed) as raised:
            await checkpoint.prepare(ready_within=0.5)
    assert isinstance(raised.value.cause, ExportFailed)
