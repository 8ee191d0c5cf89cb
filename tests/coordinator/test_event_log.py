"""What the coordinator keeps of how a checkpoint went: who took how long for what, and nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import Checkpoint, Coordinator, NotPrepared, SessionState
from gym_ckpt_grpc.protocol.errors import PermissionDenied, StateUnwritable
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles, Retention
from gym_ckpt_grpc.storage.event_log import EventLog, read_event_log
from tests.control.scripted import eventually
from tests.coordinator.fleet_of_nodes import Nodes, broken, episodes, refuse

PLACES = ["agent/agent/0", "environment/env/0", "policy_model/model/0", "resources/res/0"]


def log_of(nodes: Nodes, checkpoint_id: str) -> EventLog | None:
    root = CheckpointRoot(str(nodes.root))
    return read_event_log(root.files, root.location(checkpoint_id))


async def take(coordinator: Coordinator, in_flight: list[Any], **options: Any) -> Checkpoint:
    async with coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight, **options)
        await checkpoint.publish()
    return checkpoint


def told(log: EventLog, step: str) -> dict[str, str]:
    """Participant -> outcome, of one step; the last time."""
    return {each.participant: each.outcome for each in log.steps if each.step == step}


@pytest.mark.parametrize("reopen", [False, True])
async def test_each_participants_part_of_each_step(nodes: Nodes, reopen: bool) -> None:
    """With the moments: in order, and no step is over before it began."""
    in_flight = nodes.add(*episodes(3))
    nodes["env"].script["Capture"] = [broken()]
    before = time.time()
    async with nodes.coordinator() as coordinator:
        checkpoint = await take(coordinator, in_flight, reopen_when_captured=reopen)
    log = log_of(nodes, checkpoint.id)
    assert log is not None
    assert before - 1 < log.began < time.time() + 1
    for step in ("Prepare", "Capture", "Commit", "Resume"):
        assert told(log, step) == dict.fromkeys(PLACES, "ok"), step
    assert all(0 <= each.start <= each.end for each in log.steps)
    assert {e.participant: e.tries for e in log.steps if e.step == "Capture"}["environment/env/0"] == 2
    commits = [each for each in log.steps if each.step == "Commit"]
    assert {each.records for each in commits} == {3}
    assert all(each.bytes > 0 for each in commits)
    moments = log.moments
    order = ["prepared", "released", "durable"] if reopen else ["prepared", "durable", "published"]
    assert [moments[name] for name in order] == sorted(moments[name] for name in order)
    assert set(moments) == {"prepared", "released", "durable", "published"}
    timing = checkpoint.timing
    assert moments["published"] == pytest.approx(timing.published_after, abs=0.1)
    assert moments["released"] == pytest.approx(timing.released_after, abs=0.1)


async def test_a_step_that_was_repeated_is_told_each_time(nodes: Nodes) -> None:
    """Not ready is told as that; a code stands without its text."""
    (episode,) = nodes.add(*episodes(1))
    nodes["agent"].owner.running.add(episode)
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        with pytest.raises(NotPrepared):
            await checkpoint.prepare(ready_within=0.2)
        nodes["agent"].owner.park(episode)
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit([episode])
        await checkpoint.publish()
        nodes["res"].always["Resume"] = refuse(PermissionDenied("the secret of the day"))
    nodes["res"].always.clear()
    log = log_of(nodes, checkpoint.id)
    assert log is not None
    assert [e.outcome for e in log.steps if e.participant == "agent/agent/0" and e.step == "Prepare"] == [
        "not_ready",
        "ok",
    ]
    assert told(log, "Resume")["resources/res/0"] == "PERMISSION_DENIED"
    assert "secret" not in str(log)


async def test_what_is_not_published_has_none(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(nodes.add(*episodes(1)))
    assert log_of(nodes, checkpoint.id) is None


async def test_processes_that_take_turns_write_one_log(nodes: Nodes) -> None:
    """A process that publishes and ends has written it; whoever resumes replaces it with all of it."""
    in_flight = nodes.add(*episodes(1))

    def passed_on(state: SessionState) -> Coordinator:
        return Coordinator.attach(SessionState.from_json(state.to_json()), exit_timeout=10.0)

    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        state = await checkpoint.detach()
    for step in ("commit", "publish"):
        async with passed_on(state) as coordinator:
            block = coordinator.attached(deadline=20)
            assert isinstance(block, Checkpoint)
            async with block as checkpoint:
                await (checkpoint.commit(in_flight) if step == "commit" else checkpoint.publish())
                state = await checkpoint.detach()
    log = log_of(nodes, checkpoint.id)
    assert log is not None
    assert (told(log, "Prepare"), told(log, "Resume")) == (dict.fromkeys(PLACES, "ok"), {})
    async with passed_on(state) as coordinator, coordinator.attached(deadline=20):
        pass
    log = log_of(nodes, checkpoint.id)
    assert log is not None
    for step in ("Prepare", "Capture", "Commit", "Resume"):
        assert told(log, step) == dict.fromkeys(PLACES, "ok"), step
    assert set(log.moments) == {"prepared", "released", "durable", "published"}
    assert log.moments["prepared"] <= log.moments["durable"] <= log.moments["published"]


async def test_retention_removes_it_with_its_checkpoint(nodes: Nodes) -> None:
    """With the whole directory, and nothing of it is left."""
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(retention=Retention(keep_last=1)) as coordinator:
        first = await take(coordinator, in_flight)
        await eventually(lambda: log_of(nodes, first.id) is not None)
        second = await take(coordinator, in_flight)
        assert second.result is not None
        assert second.result.retention is not None
        outcome = await second.result.retention
        assert [decision.name for decision in outcome.removed] == [first.id]
        await eventually(lambda: log_of(nodes, second.id) is not None)
    assert [path.name for path in (nodes.root / "checkpoints").iterdir()] == [second.id]


class LogFiles(LocalFiles):
    """A storage that does something of its own with the event log."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self._act = act

    def replace(self, temporary: str, path: str) -> None:
        if path.endswith("/events.jsonl"):
            self._act()
        super().replace(temporary, path)


async def test_a_log_that_cannot_be_written_costs_nothing(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint is published, the fleet is open, the result is as ever; this process's log says so."""

    def refuse() -> None:
        raise StateUnwritable("no place for logs")

    async with nodes.coordinator(files=LogFiles(refuse)) as coordinator:
        checkpoint = await take(coordinator, nodes.add(*episodes(1)))
        assert nodes.all_open()
    assert checkpoint.result is not None
    assert (checkpoint.result.sequence_number > 0, checkpoint.result.notes) == (True, ())
    assert log_of(nodes, checkpoint.id) is None
    assert "no place for logs" in caplog.text


async def test_nobody_waits_for_a_log_that_hangs(nodes: Nodes) -> None:
    """Not the block, not the next checkpoint; the coordinator is left after a moment."""
    release, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(60)

    in_flight = nodes.add(*episodes(1))
    try:
        async with asyncio.timeout(30), nodes.coordinator(files=LogFiles(hang)) as coordinator:
            await take(coordinator, in_flight)
            assert await asyncio.to_thread(hangs.wait, 10)
            assert nodes.all_open()
            second = await take(coordinator, in_flight)
            assert await coordinator.reopened(timeout=0) is True
        assert second.result is not None
        assert second.result.sequence_number > 0
    finally:
        release.set()
