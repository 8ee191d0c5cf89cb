"""The steps of a checkpoint over the wire: the same as in process, and repeatable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator import FleetError, Outcome
from gym_ckpt_grpc.coordinator.served.wire import outcomes_to
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    ControlError,
    ErrorCode,
    InvalidPhase,
    PermissionDenied,
    StaleCheckpoint,
    StaleController,
    StateCorrupt,
    StateNotFound,
    WorkerUnavailable,
)
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.storage import CheckpointRoot
from gymckpt.v1 import coordinator_pb2 as pb
from tests.coordinator.fleet_of_nodes import Gate, Node, Nodes, broken, episodes, refuse
from tests.coordinator.served.conftest import Served, serving

PREPARED, COMMITTED = pb.CHECKPOINT_STATE_PREPARED, pb.CHECKPOINT_STATE_COMMITTED
PUBLISHED, ABORTED = pb.CHECKPOINT_STATE_PUBLISHED, pb.CHECKPOINT_STATE_ABORTED


def codes(outcomes: Any) -> dict[tuple[str, str], str]:
    """(operation, participant) -> code of its error, or ok; for outcomes of either side."""
    told = {}
    for outcome in outcomes:
        if isinstance(outcome, pb.ParticipantOutcome):
            code = ErrorCode(outcome.error.code).name if outcome.HasField("error") else "ok"
            told[(outcome.operation, str(wire.identity_from(outcome.participant)))] = code
        else:
            told[(outcome.operation, outcome.name)] = outcome.error.code.name if outcome.error else "ok"
    return told


async def test_a_whole_checkpoint_step_by_step(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(3))
    prepared = await served.prepared("ck-1")
    assert served.nodes.phases() == {"PREPARED"}
    assert [o.operation for o in prepared.outcomes] == ["Prepare"] * 4
    committed = await served.send(
        "CommitCheckpoint", checkpoint_id="ck-1", scope=wire.episode_list(in_flight), trainer_state=b"step 7"
    )
    assert committed.state == COMMITTED
    commits = [o for o in committed.outcomes if o.operation == "Commit"]
    assert [(o.record_count, len(o.manifest_digest)) for o in commits] == [(3, 64)] * 4
    published = await served.send("PublishCheckpoint", checkpoint_id="ck-1")
    resumed = await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
    assert (resumed.state, resumed.HasField("error")) == (PUBLISHED, False)
    assert served.nodes.all_open()
    found = CheckpointRoot(str(served.nodes.root)).find("ck-1")
    assert found.publication is not None
    assert (found.publication.number, found.manifest_digest) == (published.sequence_number, published.manifest_digest)
    told = (await served.send("GetCheckpoint", checkpoint_id="latest")).checkpoint
    assert (told.checkpoint_id, told.state, told.record_count, told.continued_count) == ("ck-1", PUBLISHED, 12, 3)


Script = Callable[[Node], None]


def failing(method: str, error: ControlError) -> Script:
    def script(node: Node) -> None:
        node.always[method] = refuse(error)

    return script


async def in_process(nodes: Nodes, in_flight: list[Any]) -> tuple[dict[tuple[str, str], str], str]:
    """The outcomes of one checkpoint by the Python class, and the code of its failure."""
    async with nodes.coordinator() as coordinator:
        checkpoint = coordinator.checkpoint(deadline=15)
        code = ""
        try:
            async with checkpoint:
                report = await checkpoint.prepare(ready_within=0.3)
                await checkpoint.commit(report.continued(in_flight))
                await checkpoint.publish()
        except FleetError as failure:
            code = failure.cause.code.name if failure.cause else type(failure).__name__
        return codes(
            o for of in ("Prepare", "Capture", "Commit", "Resume") for o in checkpoint.outcomes.get(of, ())
        ), code


async def over_the_wire(nodes: Nodes, in_flight: list[Any]) -> tuple[dict[tuple[str, str], str], str]:
    """The same by calls of the service."""
    async with serving(nodes) as served:
        outcomes: list[Any] = []
        steps: tuple[tuple[str, dict[str, Any], Any], ...] = (
            ("PrepareCheckpoint", {"ready_within": wire.duration(0.3)}, PREPARED),
            ("CommitCheckpoint", {"scope": wire.episode_list(in_flight)}, COMMITTED),
            ("PublishCheckpoint", {}, None),
        )
        code = ""
        for method, fields, wanted in steps:
            reply = await served.send(method, checkpoint_id="ck-1", **fields)
            outcomes += getattr(reply, "outcomes", ())
            if reply.HasField("error"):
                code = ErrorCode(reply.error.code).name
            elif wanted not in (None, getattr(reply, "state", None)):
                code = "NotPrepared"
            if code:
                break
        outcomes += (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).outcomes
        return codes(outcomes), code


@pytest.mark.behaviour("C256")
@pytest.mark.parametrize(
    "script",
    [
        lambda node: None,
        failing("Prepare", PermissionDenied("not you")),
        failing("Capture", StateCorrupt("what was frozen is odd")),
        failing("Commit", PermissionDenied("no room for you")),
        lambda node: node.always.update(Commit=broken(grpc.StatusCode.FAILED_PRECONDITION)),
        lambda node: node.owner.running.update(episodes(1)),
    ],
    ids=["good", "prepare", "capture", "commit", "transport", "not-ready"],
)
async def test_outcomes_and_codes_are_those_in_process(nodes: Nodes, script: Script) -> None:
    """Failures of participants are in the reply, beside the successes."""
    in_flight = nodes.add(*episodes(2))
    script(nodes["agent"])
    first = await in_process(nodes, in_flight)
    assert nodes.all_open()
    second = await over_the_wire(nodes, in_flight)
    assert first == second
    assert nodes.all_open()
    assert len(CheckpointRoot(str(nodes.root)).sequence.publications()) == (2 if not first[1] else 0)


async def test_not_ready_is_a_reply_with_blockers(served: Served) -> None:
    served.nodes["env"].owner.running.update(episodes(2))
    reply = await served.send("PrepareCheckpoint", checkpoint_id="ck-1", ready_within=wire.duration(0.2))
    assert reply.state == pb.CHECKPOINT_STATE_PREPARING
    assert not reply.HasField("error")
    (outcome,) = reply.outcomes
    assert [b.episode.rollout_id for b in outcome.report.blockers] == ["r0", "r1"]
    served.nodes["env"].owner.park(*episodes(2))
    await served.prepared("ck-1")


async def test_restarts_are_taken_out_of_the_scope_and_listed(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(3))
    served.nodes["res"].owner.restarts.add(in_flight[1])
    prepared = await served.prepared("ck-1")
    assert list(prepared.restarts.rollout_ids) == ["r1"]
    committed = await served.send("CommitCheckpoint", checkpoint_id="ck-1", scope=wire.episode_list(in_flight))
    assert (list(committed.restarts.rollout_ids), committed.restart_count) == (["r1"], 1)
    await served.send("PublishCheckpoint", checkpoint_id="ck-1")
    lists = {
        kind: await served.stream("ListCheckpointEpisodes", checkpoint_id="ck-1", kind=kind)
        for kind in (pb.CHECKPOINT_EPISODE_KIND_CONTINUED, pb.CHECKPOINT_EPISODE_KIND_RESTART)
    }
    (continued,), (restarts,) = lists.values()
    assert list(continued.episodes.rollout_ids) == ["r0", "r2"]
    assert (list(restarts.episodes.rollout_ids), list(restarts.reasons)) == (["r1"], ["restart"])


async def test_repeated_calls_join_or_get_the_same_reply(served: Served) -> None:
    """A lost reply costs nothing: the work is done once."""
    in_flight = served.nodes.add(*episodes(1))
    gate = Gate()
    served.nodes["agent"].script["Prepare"] = [gate.hold()]
    first = asyncio.create_task(served.prepared("ck-1"))
    await gate.entered.wait()
    second = asyncio.create_task(served.prepared("ck-1"))
    busy = await served.refusal("CommitCheckpoint", checkpoint_id="ck-1", scope=wire.episode_list(in_flight))
    assert isinstance(busy, CheckpointConflict)
    first.cancel()  # its client is gone; the operation is not
    gate.open.set()
    reply = await second
    assert reply == await served.prepared("ck-1")
    committed = await served.committed(in_flight)
    assert committed == await served.committed(in_flight)
    published = await served.send("PublishCheckpoint", checkpoint_id="ck-1")
    for _ in range(2):
        assert published == await served.send("PublishCheckpoint", checkpoint_id="ck-1")
        resumed = await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
        assert resumed == await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
    assert {
        method: len(served.nodes["agent"].calls[method]) for method in ("Prepare", "Capture", "Commit", "Resume")
    } == {
        "Prepare": 1,
        "Capture": 1,
        "Commit": 1,
        "Resume": 1,
    }


async def test_other_arguments_are_a_conflict(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(2))
    await served.committed(in_flight)
    other = await served.refusal("CommitCheckpoint", checkpoint_id="ck-1", scope=wire.episode_list(in_flight[:1]))
    assert isinstance(other, CheckpointConflict)
    lease = await served.refusal("PrepareCheckpoint", checkpoint_id="ck-1", lease_ttl=wire.duration(9))
    assert isinstance(lease, CheckpointConflict)


async def test_what_is_refused_as_a_call(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    scope = wire.episode_list(in_flight)
    assert isinstance(await served.refusal("CommitCheckpoint", checkpoint_id="ck-1", scope=scope), StateNotFound)
    assert isinstance(await served.refusal("PublishCheckpoint", checkpoint_id="ck-1"), StateNotFound)
    assert isinstance(await served.refusal("RenewCheckpoint", checkpoint_id="ck-1"), StateNotFound)
    assert isinstance(await served.refusal("GetCheckpoint", checkpoint_id="ck-1"), StateNotFound)
    await served.prepared("ck-1")
    assert isinstance(await served.refusal("PublishCheckpoint", checkpoint_id="ck-1"), InvalidPhase)
    other = await served.refusal("PrepareCheckpoint", checkpoint_id="ck-2")
    assert isinstance(other, CheckpointConflict)
    assert other.active_checkpoint_id == "ck-1"
    aborted = await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
    assert aborted.state == ABORTED
    assert served.nodes.all_open()
    for method, fields in (
        ("PrepareCheckpoint", {}),
        ("CommitCheckpoint", {"scope": scope}),
        ("PublishCheckpoint", {}),
    ):
        assert isinstance(await served.refusal(method, checkpoint_id="ck-1", **fields), StaleCheckpoint), method


async def test_resume_of_an_unknown_id_fences_it(served: Served) -> None:
    reply = await served.send("ResumeCheckpoint", checkpoint_id="late")
    assert reply.state == ABORTED
    assert isinstance(await served.refusal("PrepareCheckpoint", checkpoint_id="late"), StaleCheckpoint)


async def test_resume_pre_empts_what_runs(served: Served) -> None:
    """The waiting call is told so; the fleet is open when Resume replies."""
    in_flight = served.nodes.add(*episodes(1))
    await served.prepared("ck-1")
    gate = Gate()
    served.nodes["agent"].script["Capture"] = [gate.hold()]
    commit = asyncio.create_task(
        served.refusal("CommitCheckpoint", checkpoint_id="ck-1", scope=wire.episode_list(in_flight))
    )
    await gate.entered.wait()
    reply = await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
    assert reply.state == ABORTED
    assert served.nodes.all_open()
    assert isinstance(await commit, StaleCheckpoint)
    assert CheckpointRoot(str(served.nodes.root)).sequence.publications() == ()


async def test_after_a_restart_of_the_service_results_come_from_the_root(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with serving(nodes) as served:
        published = await served.taken(in_flight)
    before = len(nodes.journal)
    async with serving(nodes) as served:
        assert isinstance(await served.refusal("PrepareCheckpoint", checkpoint_id="ck-1"), StaleCheckpoint)
        assert await served.send("PublishCheckpoint", checkpoint_id="ck-1") == published
        assert (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).state == PUBLISHED
        (run,) = await served.stream("RunCheckpoint", checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight))
        assert run.result.checkpoint.sequence_number == published.sequence_number
    assert "Prepare" not in [entry.method for entry in nodes.journal[before:]]


async def test_a_replaced_coordinator_refuses_the_call(served: Served) -> None:
    await served.prepared("ck-1")
    async with served.nodes.coordinator(controller_id="second"):
        error = await served.refusal("CommitCheckpoint", checkpoint_id="ck-1", scope=wire.episode_list([]))
        assert isinstance(error, StaleController)
        assert isinstance(await served.refusal("DeleteCheckpoint", checkpoint_id="any"), StaleController)


async def test_retire_and_forget(served: Served) -> None:
    one, two = served.nodes.add(*episodes(2))
    served.nodes["agent"].owner.stuck.add(two)
    reply = await served.send("RetireEpisodes", episodes=wire.episode_list([one, two]))
    assert ErrorCode(reply.error.code) is ErrorCode.RETIRE_INCOMPLETE
    assert list(reply.incomplete.rollout_ids) == ["r1"]
    assert codes(reply.outcomes) == {("Retire", node.place): "ok" for node in served.nodes}
    await served.nodes["res"].stop()
    reply = await served.send("RetireEpisodes", episodes=wire.episode_list([one]))
    assert ErrorCode(reply.error.code) is ErrorCode.RETIRE_INCOMPLETE
    assert codes(reply.outcomes)[("Retire", "resources/res/0")] == WorkerUnavailable.code.name
    assert codes(reply.outcomes)[("Retire", "agent/agent/0")] == "ok"
    await served.nodes["res"].start()
    reply = await served.send("ForgetRollouts", rollouts=[{"rollout_id": "r0", "through_attempt": 0}])
    assert codes(reply.outcomes) == {("Forget", node.place): "ok" for node in served.nodes}
    assert not reply.HasField("error")


async def test_stop_leaves_the_fleet_closed(served: Served) -> None:
    """A launcher ends the servers; the state says so, also to a repeated call."""
    in_flight = served.nodes.add(*episodes(1))
    await served.committed(in_flight, stop=True)
    await served.send("PublishCheckpoint", checkpoint_id="ck-1")
    for _ in range(2):
        assert (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).state == pb.CHECKPOINT_STATE_STOPPED
    assert served.nodes.phases() == {"COMMITTED"}
    assert all(node.calls["Commit"][0].stop for node in served.nodes)


async def test_reopen_when_captured_opens_before_the_write(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    gate = Gate()
    for node in served.nodes:
        node.script["Commit"] = [gate.hold()]
    await served.prepared("ck-1")
    commit = asyncio.create_task(served.committed(in_flight, reopen_when_captured=True))
    await gate.entered.wait()
    assert served.nodes.all_open()
    gate.open.set()
    await commit
    await served.send("PublishCheckpoint", checkpoint_id="ck-1")
    assert (await served.send("ResumeCheckpoint", checkpoint_id="ck-1")).state == PUBLISHED


def test_several_calls_to_one_participant_are_one_outcome() -> None:
    """Their time is added up, and a failure of any of them stands."""
    who = ParticipantIdentity(ParticipantKind.AGENT, "agent")
    good: Outcome[Any] = Outcome("Retire", who, duration=1.0)
    bad: Outcome[Any] = Outcome("Retire", who, None, StateNotFound("gone"), duration=0.5)
    for order in ([good, bad, good], [bad, good]):
        (told,) = outcomes_to(order)
        assert ErrorCode(told.error.code) is ErrorCode.STATE_NOT_FOUND
        assert wire.seconds(told.duration) == sum(outcome.duration for outcome in order)
    assert len(outcomes_to([good, Outcome("Forget", who)])) == 2


async def test_a_restore_and_its_two_ends(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(2))
    served.nodes["res"].owner.live.pop(in_flight[1])
    await served.taken(in_flight, trainer_state=b"step 7")
    for node in served.nodes:
        await node.restart()
    for discard, state in ((True, ABORTED), (False, pb.CHECKPOINT_STATE_RESTORED)):
        restore_id = f"re-{discard}"
        reply = await served.send("RestoreCheckpoint", checkpoint_id="latest", restore_id=restore_id)
        assert (reply.checkpoint_id, reply.source_checkpoint_id) == (restore_id, "ck-1")
        assert (reply.trainer_state, reply.trainer_state_type) == (b"step 7", "application/octet-stream")
        assert codes(reply.outcomes) == {("Restore", node.place): "ok" for node in served.nodes}
        assert served.nodes.phases() == {"RESTORED"}
        assert "resources/res/0" in reply.holders[0].participants
        assert "resources/res/0" not in reply.holders[1].participants
        (batch,) = await served.stream(
            "ListCheckpointEpisodes", checkpoint_id=restore_id, kind=pb.CHECKPOINT_EPISODE_KIND_CONTINUED
        )
        assert (batch.episodes, list(batch.holders)) == (reply.continued, list(reply.holders))
        again = await served.send("RestoreCheckpoint", checkpoint_id="latest", restore_id=restore_id)
        assert again == reply
        ended = await served.send("ResumeCheckpoint", checkpoint_id=restore_id, discard=discard)
        assert (ended.state, ended.HasField("error")) == (state, False)
        assert served.nodes.all_open()
        assert (served.nodes["agent"].episodes == set()) is discard


async def test_a_failed_restore_is_a_reply_and_is_undone(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    await served.taken(in_flight)
    for node in served.nodes:
        await node.restart()
    served.nodes["agent"].always["Restore"] = refuse(PermissionDenied("not today"))
    reply = await served.send("RestoreCheckpoint", checkpoint_id="ck-1", restore_id="re-1")
    assert ErrorCode(reply.error.code) is ErrorCode.PERMISSION_DENIED
    assert codes(reply.outcomes)[("Restore", "environment/env/0")] == "ok"
    assert served.nodes.all_open()
    assert isinstance(
        await served.refusal("RestoreCheckpoint", checkpoint_id="ck-1", restore_id="re-1"), StaleCheckpoint
    )
    served.nodes["agent"].always.clear()
    unknown = await served.refusal(
        "RestoreCheckpoint", checkpoint_id="ck-1", scope={"episodes": {"rollout_ids": ["zz"], "attempts": [0]}}
    )
    assert [v.field for v in unknown.violations] == ["scope"]
    assert isinstance(await served.refusal("RestoreCheckpoint", checkpoint_id="none"), StateNotFound)
    reply = await served.send("RestoreCheckpoint", checkpoint_id="ck-1")
    assert reply.continued_count == 1
    await served.send("ResumeCheckpoint", checkpoint_id=reply.checkpoint_id)
