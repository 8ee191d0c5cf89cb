"""The coordinator's spans and metrics: one trace for one checkpoint, each thing counted once, each failure an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from gym_ckpt_grpc.coordinator import (
    CommitFailed,
    Coordinator,
    DiscoveryFailed,
    NotPrepared,
    PrepareFailed,
    Restoration,
    RestoreFailed,
    SessionState,
)
from gym_ckpt_grpc.protocol.errors import (
    PermissionDenied,
)
from gym_ckpt_grpc.storage import CheckpointRoot
from gym_ckpt_grpc.telemetry import catalogue
from tests.coordinator.fleet_of_nodes import Gate, Nodes, broken, episodes, refuse
from tests.coordinator.spans import ended, name, take, trace_of
from tests.telemetry.kept import Kept, short

STAGES = ["environment", "policy_model", "agent", "resources"]


@pytest_asyncio.fixture
async def told(tmp_path: Path, kept: Kept) -> AsyncIterator[Nodes]:
    """A fleet whose participants tell the same telemetry as the coordinator."""
    fleet = await Nodes(tmp_path / "root").start(telemetry=kept.telemetry)
    yield fleet
    await fleet.stop()


def stages_of(kept: Kept) -> list[tuple[object, object, str]]:
    """(kind, participants, outcome) of each stage's span, by its beginning."""
    spans = [s for s in kept.spans if s.name.startswith(name("prepare."))]
    assert {kept.parent(span) for span in spans} == {name("prepare")}
    spans.sort(key=lambda span: span.start_time or 0)
    return [(short(s.attributes)["stage"], short(s.attributes)["participants"], ended(s)) for s in spans]


# ---- prepare and its stages


@pytest.mark.behaviour("C303")
async def test_a_prepare_has_one_child_per_stage(nodes: Nodes, kept: Kept) -> None:
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
    assert stages_of(kept) == [(kind, 1, "ok") for kind in STAGES]
    prepare = kept.only(name("prepare"))
    facts = short(prepare.attributes)
    assert (facts["participants"], facts["stopped_at"], ended(prepare)) == (4, "", "ok")
    assert kept.parent(prepare) == name("checkpoint")
    kept.all_ended()


@pytest.mark.behaviour("C303")
async def test_a_stage_without_members_has_a_span_too(tmp_path: Path, kept: Kept) -> None:
    nodes = await Nodes(tmp_path / "root").start("agent", "res")
    try:
        options: dict[str, Any] = {"fleet": nodes.fleet(require_kinds=[]), "telemetry": kept.telemetry}
        async with nodes.coordinator(**options) as coordinator, coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
    finally:
        await nodes.stop()
    assert stages_of(kept) == [(kind, int(kind in ("agent", "resources")), "ok") for kind in STAGES]


@pytest.mark.behaviour("C303", "C306")
async def test_where_a_prepare_stopped_and_what_it_did_not_reach(nodes: Nodes, kept: Kept) -> None:
    """Not ready in time is no error and not ok; the stages after it were not begun. Ready the second time."""
    (episode,) = nodes.add(*episodes(1))
    nodes["agent"].owner.running.add(episode)
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator, coordinator.checkpoint() as checkpoint:
        with pytest.raises(NotPrepared):
            await checkpoint.prepare(ready_within=0.2)
        first = kept.only(name("prepare"))
        assert stages_of(kept) == list(zip(STAGES, [1, 1, 1, 0], ["ok", "ok", "not_ready", "not_reached"], strict=True))
        assert (short(first.attributes)["stopped_at"], ended(first)) == ("agent", "not_ready")
        nodes["agent"].owner.park(episode)
        await checkpoint.prepare(ready_within=5)
    assert [ended(span) for span in kept.of(name("prepare"))] == ["not_ready", "ok"]
    root = kept.only(name("checkpoint"))
    assert (short(root.attributes)["result"], ended(root)) == ("aborted", "ok")
    done = catalogue.OPERATION_DURATION
    assert kept.value(done, operation="prepare", outcome="not_ready", participant_kind="coordinator") == 1
    assert kept.value(done, operation="prepare", outcome="ok", participant_kind="coordinator") == 1


@pytest.mark.behaviour("C303", "C305")
async def test_a_stage_that_fails_is_where_it_stopped(nodes: Nodes, kept: Kept) -> None:
    nodes["model"].script["Prepare"] = [refuse(PermissionDenied("scripted"))]
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        with pytest.raises(PrepareFailed):
            async with coordinator.checkpoint() as checkpoint:
                await checkpoint.prepare(ready_within=5)
    outcomes = ["ok", "PERMISSION_DENIED", "not_reached", "not_reached"]
    assert stages_of(kept) == list(zip(STAGES, [1, 1, 0, 0], outcomes, strict=True))
    prepare, root = kept.only(name("prepare")), kept.only(name("checkpoint"))
    assert (short(prepare.attributes)["stopped_at"], ended(prepare)) == ("policy_model", "PERMISSION_DENIED")
    assert (short(root.attributes)["result"], ended(root)) == ("error", "PERMISSION_DENIED")


async def test_a_fleet_that_is_not_there_reaches_no_stage(nodes: Nodes, kept: Kept) -> None:
    async with nodes.coordinator(telemetry=kept.telemetry, discovery_timeout=1.0) as coordinator:
        await nodes["res"].stop()
        with pytest.raises(DiscoveryFailed):
            async with coordinator.checkpoint() as checkpoint:
                await checkpoint.prepare(ready_within=5)
    assert [outcome for _, _, outcome in stages_of(kept)] == ["not_reached"] * 4
    assert ended(kept.only(name("prepare"))) == "WORKER_UNAVAILABLE"
    kept.all_ended()


# ---- one trace


def in_one_trace(kept: Kept, root: str = name("checkpoint")) -> list[ReadableSpan]:
    """The spans of the root's trace; every other span belongs to the entering, and none is an orphan."""
    (first,) = kept.of(root)
    mine = [span for span in kept.spans if trace_of(span) == trace_of(first)]
    (entering,) = kept.of(catalogue.COORDINATE_ENTERING)
    others = [span for span in kept.spans if trace_of(span) not in (trace_of(first), trace_of(entering))]
    assert [span.name for span in others] == []
    roots = [span.name for span in kept.spans if span.parent is None]
    assert sorted(roots) == sorted([root, catalogue.COORDINATE_ENTERING.name])
    assert [span.name for span in kept.spans if kept.parent(span) == "?"] == []
    kept.all_ended()
    return mine


@pytest.mark.parametrize("reopen", [False, True])
async def test_a_checkpoint_is_one_trace(told: Nodes, kept: Kept, reopen: bool) -> None:
    """Case 149: every call of it, also retries, lists, renewals of the lease, and what drops the kept records."""
    in_flight = told.add(*episodes(2))
    renewed = Gate()
    told["env"].script["Prepare"] = [broken()]
    told["agent"].script["RenewLease"] = [renewed.hold()]
    renewed.open.set()
    async with told.coordinator(telemetry=kept.telemetry, lease_ttl=1.5) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await renewed.entered.wait()
            await checkpoint.commit(in_flight, reopen_when_captured=reopen)
            await checkpoint.publish()
        assert await coordinator.reopened(timeout=10)
    mine = in_one_trace(kept)
    calls = [span.name.rpartition("/")[2] for span in mine if span.name.startswith("gymckpt.v1.")]
    assert {"GetStatus", "Prepare", "RenewLease", "Capture", "Commit", "ListEpisodes", "Resume"} <= set(calls)
    operations = ["capture", "commit", "prepare", "publish", "resume"]
    assert sorted(s.name for s in mine if kept.parent(s) == name("checkpoint") and "coordinate" in s.name) == [
        name(operation) for operation in operations
    ]
    renewals = [s for s in mine if s.name.endswith("/RenewLease") and kept.parent(s) == name("checkpoint")]
    assert renewals, "renewals are children of the checkpoint, not of an operation that has ended"
    assert (short(kept.only(name("checkpoint")).attributes)["result"]) == "published"


async def test_a_restore_is_one_trace_and_is_linked_to_the_checkpoints(told: Nodes, kept: Kept) -> None:
    """Case 149: a restore links to the trace of what it restores, by the manifest alone."""
    first = Kept()
    for node in told:
        node.telemetry = first.telemetry
        await node.restart()
    in_flight = told.add(*episodes(2))
    async with told.coordinator(telemetry=first.telemetry) as coordinator:
        await take(coordinator, in_flight)
    for node in told:
        node.telemetry = kept.telemetry
        await node.restart()
    async with told.coordinator(telemetry=kept.telemetry) as coordinator, coordinator.restoring() as restored:
        pass
    in_one_trace(kept, name("restoring"))
    root, origin = kept.only(name("restoring")), first.only(name("checkpoint"))
    assert [link.context.trace_id for link in root.links] == [trace_of(origin)]
    facts = short(root.attributes)
    assert (facts["source"], facts["result"], ended(root)) == (restored.source_checkpoint_id, "restored", "ok")
    assert short(kept.only(name("restore")).attributes)["participants"] == 4


async def test_a_checkpoint_is_a_child_of_its_callers_span(nodes: Nodes, kept: Kept) -> None:
    """Operations that another task calls, with a span of another trace, are linked to that and stay below the block."""
    in_flight = nodes.add(*episodes(1))
    tracer = TracerProvider().get_tracer("the trainer's")
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        with tracer.start_as_current_span("step") as step:
            checkpoint = await coordinator.checkpoint().__aenter__()

        async def prepare() -> int:
            with tracer.start_as_current_span("elsewhere") as elsewhere:
                await checkpoint.prepare(ready_within=5)
            return elsewhere.get_span_context().trace_id

        elsewhere = await asyncio.get_running_loop().create_task(prepare())
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
        await asyncio.get_running_loop().create_task(checkpoint.__aexit__(None, None, None))
    root, prepared, committed = (kept.only(name(each)) for each in ("checkpoint", "prepare", "commit"))
    assert root.parent == step.get_span_context()
    assert {kept.parent(kept.only(name(each))) for each in ("prepare", "commit", "publish", "resume")} == {root.name}
    assert [link.context.trace_id for link in prepared.links] == [elsewhere]
    assert list(committed.links) == []


async def test_marks_set_while_a_checkpoint_is_open_belong_to_it(nodes: Nodes, kept: Kept) -> None:
    """Outside of one they are traces of their own. Counts of episodes and rollouts are on the spans."""
    in_flight = nodes.add(*episodes(3))
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await coordinator.retire(in_flight[:2])
        await coordinator.forget(in_flight[:2])
    retire, forget = kept.only(name("retire")), kept.only(name("forget"))
    assert (kept.parent(retire), short(retire.attributes)["episodes"], ended(retire)) == (name("checkpoint"), 2, "ok")
    assert (kept.parent(forget), short(forget.attributes)["rollouts"], ended(forget)) == ("", 2, "ok")
    assert [span.name for span in kept.spans if span.parent is None and span.name.startswith("gymckpt")] == []


# ---- failures are errors


@pytest.mark.parametrize("published", [False, True])
async def test_a_resume_that_left_one_closed_is_an_error(nodes: Nodes, kept: Kept, published: bool) -> None:
    """Also though the checkpoint's block ends well: seen in such telemetry was a failed resume recorded as ok."""
    in_flight = nodes.add(*episodes(1))
    nodes["agent"].always["Resume"] = refuse(PermissionDenied("scripted"))
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            if published:
                await checkpoint.commit(in_flight)
                await checkpoint.publish()
        nodes["agent"].always.clear()
    resume, root = kept.only(name("resume")), kept.only(name("checkpoint"))
    assert ended(resume) == ended(root) == "PERMISSION_DENIED"
    assert short(root.attributes)["result"] == ("published" if published else "error")
    done = catalogue.OPERATION_DURATION
    assert kept.value(done, operation="resume", participant_kind="coordinator", outcome="PERMISSION_DENIED") == 1
    assert kept.value(done, operation="resume", participant_kind="coordinator", outcome="ok") == 0


async def test_a_restore_that_one_participant_refuses_restores_nothing(nodes: Nodes, kept: Kept) -> None:
    """Case 44: no success, nothing continued; the clean-up's own operations ended well."""
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator() as coordinator:
        await take(coordinator, in_flight)
    for node in nodes:
        await node.restart()
    nodes["agent"].owner.install_error = ValueError("a broken codec")
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        with pytest.raises(RestoreFailed):
            async with coordinator.restoring(deadline=2):
                pass
    assert ended(kept.only(name("restore"))) == ended(kept.only(name("restoring"))) == "INSTALL_FAILED"
    assert short(kept.only(name("restoring")).attributes)["result"] == "error"
    assert ended(kept.only(name("resume"))) == ended(kept.only(name("retire"))) == "ok"
    assert kept.points(catalogue.WORK_TOTAL) == []
    kept.all_ended()


async def test_a_restore_whose_resume_fails_is_an_error(nodes: Nodes, kept: Kept) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        await take(coordinator, in_flight)
    for node in nodes:
        await node.restart()
    nodes["res"].script["Resume"] = [refuse(PermissionDenied("scripted"))]
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        with pytest.raises(RestoreFailed):
            async with coordinator.restoring():
                pass
    assert [ended(span) for span in kept.of(name("resume"))] == ["PERMISSION_DENIED", "ok"]
    assert ended(kept.only(name("restoring"))) == "PERMISSION_DENIED"
    assert kept.points(catalogue.WORK_TOTAL) == []


async def test_a_write_that_fails_after_the_release_is_an_error_of_the_commit(nodes: Nodes, kept: Kept) -> None:
    """And a second commit that goes well clears it: only the last time counts for the block."""
    in_flight = nodes.add(*episodes(1))
    nodes["agent"].script["Commit"] = [refuse(PermissionDenied("of the disk"))]
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        with pytest.raises(CommitFailed):
            await checkpoint.commit(in_flight, reopen_when_captured=True)
        await checkpoint.commit(in_flight, reopen_when_captured=True)
        await checkpoint.publish()
    assert [ended(span) for span in kept.of(name("commit"))] == ["PERMISSION_DENIED", "ok"]
    assert (len(kept.of(name("resume"))), len(kept.of(name("capture")))) == (1, 1)
    root = kept.only(name("checkpoint"))
    assert (short(root.attributes)["result"], ended(root)) == ("published", "ok")
    kept.all_ended()


async def test_the_bodys_own_error_ends_the_blocks_span(nodes: Nodes, kept: Kept) -> None:

    async def body(coordinator: Coordinator) -> None:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            raise ValueError("the body's own")

    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        with pytest.raises(ValueError, match="own"):
            await body(coordinator)
    root = kept.only(name("checkpoint"))
    assert (short(root.attributes)["result"], ended(root)) == ("error", "INTERNAL")


CALLS = ("GetStatus", "Prepare", "Capture", "Commit", "ListEpisodes", "Resume")


@pytest.mark.parametrize("reopen", [False, True])
@pytest.mark.parametrize("method", CALLS)
async def test_no_span_is_left_open_by_a_cancellation(nodes: Nodes, kept: Kept, method: str, reopen: bool) -> None:
    """Cancelled while a participant holds this call up: every span ends, the operation under way as cancelled."""
    in_flight, gate = nodes.add(*episodes(1)), Gate()
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        nodes["res"].script[method] = [gate.hold()]
        task = asyncio.create_task(take(coordinator, in_flight, reopen_when_captured=reopen))
        await gate.entered.wait()
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    kept.all_ended()
    stopped = {"GetStatus": "prepare", "ListEpisodes": "commit"}.get(method, method.lower())
    first, root = kept.of(name(stopped))[0], kept.only(name("checkpoint"))
    # A cancellation does not cut an exit short: its Resume, and so the block, ends well.
    exiting = method == "Resume" and not reopen
    assert {ended(first), ended(root)} == {"ok" if exiting else "CANCELLED"}


@pytest.mark.parametrize("method", ["GetStatus", "ListEpisodes", "Restore", "Resume"])
async def test_no_span_of_a_restore_is_left_open_by_a_cancellation(nodes: Nodes, kept: Kept, method: str) -> None:
    in_flight, gate = nodes.add(*episodes(1)), Gate()
    async with nodes.coordinator() as coordinator:
        await take(coordinator, in_flight)
    for node in nodes:
        await node.restart()

    async def restore(coordinator: Coordinator) -> None:
        async with coordinator.restoring():
            pass

    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        nodes["res"].script[method] = [gate.hold()]
        task = asyncio.create_task(restore(coordinator))
        await gate.entered.wait()
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    kept.all_ended()
    assert ended(kept.only(name("restoring"))) == "CANCELLED"
    assert kept.points(catalogue.WORK_TOTAL) == [] or method == "Resume"


async def test_a_coordinator_that_is_left_ends_the_open_blocks_span(nodes: Nodes, kept: Kept) -> None:
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        checkpoint = await coordinator.checkpoint().__aenter__()
        await checkpoint.prepare(ready_within=5)
    root = kept.only(name("checkpoint"))
    assert (short(root.attributes)["result"], ended(root)) == ("error", "INVALID_ARGUMENT")
    kept.all_ended()


# ---- from process to process


def passed_on(state: SessionState, kept: Kept) -> Coordinator:
    return Coordinator.attach(SessionState.from_json(state.to_json()), telemetry=kept.telemetry, exit_timeout=10.0)


def block_of(coordinator: Coordinator) -> Any:
    return coordinator.attached(deadline=20)


async def test_a_checkpoint_by_four_processes_is_one_trace(nodes: Nodes) -> None:
    """Each process's spans are below the first one's; the manifest names the first, also with spans off in between."""
    in_flight = nodes.add(*episodes(1))
    kept = [Kept(), Kept(), Kept("none"), Kept()]
    async with nodes.coordinator(telemetry=kept[0].telemetry) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        state = await checkpoint.detach()
    async with passed_on(state, kept[1]) as coordinator, block_of(coordinator) as checkpoint:
        await checkpoint.commit(in_flight)
        state = await checkpoint.detach()
    async with passed_on(state, kept[2]) as coordinator, block_of(coordinator) as checkpoint:
        await checkpoint.publish()
        state = await checkpoint.detach()
    async with passed_on(state, kept[3]) as coordinator, block_of(coordinator):
        pass
    first = kept[0].only(name("checkpoint"))
    for later in (kept[1], kept[3]):
        root = later.only(name("checkpoint"))
        assert root.parent is not None
        assert root.parent.span_id == first.get_span_context().span_id  # type: ignore[union-attr]
        assert {trace_of(span) for span in later.spans} == {trace_of(first)}
    results = [short(each.only(name("checkpoint")).attributes)["result"] for each in (kept[0], kept[1], kept[3])]
    assert results == ["detached", "detached", "published"]
    manifest = CheckpointRoot(str(nodes.root)).find().manifest
    assert manifest.traceparent == state.traceparent
    assert format(trace_of(first), "032x") in state.traceparent
    assert sum(each.value(catalogue.OPERATION_DURATION, operation="capture") for each in kept) == 1


async def test_a_restore_by_two_processes_is_one_trace(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    nodes["env"].owner.restarts.add(in_flight[0])
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued(in_flight))
        await checkpoint.publish()
    for node in nodes:
        await node.restart()
    first, second = Kept(), Kept()
    async with nodes.coordinator(telemetry=first.telemetry) as coordinator, coordinator.restoring() as restored:
        state = await restored.detach()
    async with passed_on(state, second) as coordinator, block_of(coordinator) as restored:
        assert isinstance(restored, Restoration)
    assert trace_of(second.only(name("restoring"))) == trace_of(first.only(name("restoring")))
    assert first.points(catalogue.WORK_TOTAL) == []
    fates = {labels["fate"]: value for labels, value in second.points(catalogue.WORK_TOTAL)}
    assert fates == {"continued": 1, "restarted": 1}


@pytest.mark.parametrize("traceparent", ["", "rubbish", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_session_without_a_usable_trace_goes_on_with_its_own(
    nodes: Nodes, kept: Kept, traceparent: str
) -> None:
    """Sessions of earlier versions have no such fields."""
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        state = await checkpoint.detach()
    text = state.to_json().decode()
    assert '"traceparent": ""' in text
    old = text.replace('"traceparent": ""', f'"traceparent": "{traceparent}"').encode()
    async with (
        Coordinator.attach(SessionState.from_json(old), telemetry=kept.telemetry, exit_timeout=10.0) as coordinator,
        block_of(coordinator),
    ):
        pass
    assert kept.only(name("checkpoint")).parent is None
