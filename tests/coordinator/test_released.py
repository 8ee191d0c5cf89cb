"""Released before durable: the fleet works on while records are written, and a write that fails takes nothing away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import (
    Checkpoint,
    CheckpointResult,
    CheckpointState,
    CommitFailed,
    Coordinator,
    Retries,
    Step,
)
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    InternalError,
    LeaseLost,
    PublishUnknown,
    StateCorrupt,
    StateUnwritable,
    UsageError,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles
from tests.coordinator.fleet_of_nodes import Gate, Nodes, episodes, refuse

QUICK = Retries(shortest=0.01, longest=0.02)


def published(nodes: Nodes) -> list[str]:
    """Newest first."""
    return [entry.checkpoint_id for entry in CheckpointRoot(str(nodes.root)).sequence.publications()]


def kept(nodes: Nodes) -> list[str]:
    """Checkpoints whose frozen records are in some participant's memory."""
    return sorted({checkpoint_id for node in nodes for checkpoint_id in node.plane._core.kept})


def result_of(checkpoint: Checkpoint) -> CheckpointResult:
    assert checkpoint.result is not None
    return checkpoint.result


async def take(coordinator: Coordinator, in_flight: list[EpisodeId], **options: Any) -> Checkpoint:
    """A published checkpoint."""
    async with coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight, **options)
        await checkpoint.publish()
    assert result_of(checkpoint).state is CheckpointState.PUBLISHED
    return checkpoint


async def released(checkpoint: Checkpoint, in_flight: list[EpisodeId]) -> None:
    """Prepared, frozen, and open again."""
    await checkpoint.prepare(ready_within=5)
    await checkpoint.capture(in_flight)
    await checkpoint.reopen()


# ---- a write that fails


Fault = Callable[[Nodes], Awaitable[None]]


async def _disk_full(nodes: Nodes) -> None:
    nodes["agent"].always["Commit"] = refuse(StateUnwritable("no space left on device"))


async def _broken(nodes: Nodes) -> None:
    nodes["agent"].always["Commit"] = refuse(InternalError("incident 7"))


async def _crashed(nodes: Nodes) -> None:
    await nodes["agent"].restart()


async def _dropped(nodes: Nodes) -> None:
    """As at the end of the time for which records are kept."""
    dropping = nodes["agent"].plane._reopening.drop(*kept(nodes))
    assert dropping is not None
    await dropping


async def _unplaceable(nodes: Nodes) -> None:
    """The directory cannot be taken: a file stands where it would be."""
    target = nodes.root / "checkpoints" / "ck-fails"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("")


FAULTS: dict[str, tuple[Fault, str]] = {
    "disk full": (_disk_full, "no space left"),
    "a server's fault": (_broken, "incident 7"),
    "a participant crashed": (_crashed, "expected process"),
    "records expired": (_dropped, "STALE_CHECKPOINT"),
    "no intent": (_unplaceable, "the intent was not written"),
}


@pytest.mark.behaviour("C217")
@pytest.mark.parametrize("fault", list(FAULTS))
async def test_a_write_that_fails_after_the_release_leaves_the_previous_checkpoint(nodes: Nodes, fault: str) -> None:
    """It says so, reopens nothing again, drops what was kept, and is in nobody's way afterwards."""
    in_flight = nodes.add(*episodes(2))
    begin, text = FAULTS[fault]
    async with nodes.coordinator(retries=QUICK) as coordinator:
        first = await take(coordinator, in_flight, reopen_when_captured=True)
        await coordinator.reopened()
        async with coordinator.checkpoint(checkpoint_id="ck-fails", deadline=20) as checkpoint:
            await released(checkpoint, in_flight)
            pause = checkpoint.timing.pause_ms
            assert pause > 0
            await begin(nodes)
            live = {node.name: len(node.owner.openings) for node in nodes}
            checkpoint.allow(1.5)
            with pytest.raises(CommitFailed, match=text) as raised:
                await checkpoint.commit(in_flight)
            assert first.id in str(raised.value)
            with pytest.raises(UsageError):
                await checkpoint.publish()
        result = result_of(checkpoint)
        assert result.state is CheckpointState.ABORTED
        assert text in result.failure
        assert f"{first.id} (number" in result.failure
        assert result.timing.pause_ms == pause
        assert any(first.id in e.message and e.checkpoint_id == checkpoint.id for e in coordinator.events)
        assert published(nodes) == [first.id]
        assert nodes.all_open()
        assert kept(nodes) == []
        # a Resume of an id that was resumed opens nothing again
        assert {node.name: len(node.owner.openings) for node in nodes} == live
        nodes["agent"].always.clear()
        again = nodes.add(*episodes(2))
        second = await take(coordinator, again, reopen_when_captured=True)
    assert published(nodes) == [second.id, first.id]
    for node in nodes:
        await node.restart()
    async with nodes.coordinator() as coordinator, coordinator.restoring(first.id) as restored:
        assert len(restored.continued) == 2


async def test_a_failed_write_may_be_repeated_while_records_are_kept(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    nodes["agent"].script["Commit"] = [refuse(InternalError("once"))]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await released(checkpoint, in_flight)
        with pytest.raises(CommitFailed, match="once"):
            await checkpoint.commit(in_flight)
        with pytest.raises(UsageError, match="another one than was captured"):
            await checkpoint.commit(in_flight[:1])
        await checkpoint.commit(in_flight)
        await checkpoint.publish()
    assert (result_of(checkpoint).state, result_of(checkpoint).failure) == (CheckpointState.PUBLISHED, "")
    assert len(nodes["agent"].calls["Capture"]) == 1


async def test_a_release_that_nobody_commits_says_what_stands(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await released(checkpoint, in_flight)
    assert "nothing is published in this root" in result_of(checkpoint).failure
    assert kept(nodes) == []


async def test_a_checkpoint_that_fails_while_it_is_closed_tells_of_no_release(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    nodes["agent"].always["Commit"] = refuse(InternalError("incident 8"))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        with pytest.raises(CommitFailed) as raised:
            await checkpoint.commit(in_flight)
        assert "released" not in str(raised.value)
    assert result_of(checkpoint).failure == ""


async def test_cancelling_the_write_aborts_it_and_the_fleet_goes_on(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    gate = Gate()
    nodes["env"].script["Commit"] = [gate.hold()]

    async def run(coordinator: Coordinator) -> None:
        async with coordinator.checkpoint(checkpoint_id="ck-1") as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight, reopen_when_captured=True)

    async with nodes.coordinator() as coordinator:
        running = asyncio.create_task(run(coordinator))
        await gate.entered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gate.open.set()
        assert nodes.all_open()
        assert kept(nodes) == []
        assert published(nodes) == []
        await take(coordinator, in_flight)


# ---- who waits for whom


async def test_a_second_checkpoint_is_refused_by_name_while_the_write_runs(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    gate = Gate()
    nodes["env"].script["Commit"] = [gate.hold()]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint(checkpoint_id="ck-1") as checkpoint:
        await checkpoint.prepare(ready_within=5)
        committing = asyncio.create_task(checkpoint.commit(in_flight, reopen_when_captured=True))
        await gate.entered.wait()
        with pytest.raises(UsageError, match="ck-1 is open"):
            await coordinator.checkpoint().__aenter__()
        assert nodes.all_open()
        gate.open.set()
        await committing
        await checkpoint.publish()
    assert published(nodes) == ["ck-1"]


async def test_a_commit_too_late_for_its_records_is_not_sent(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(lease_ttl=20) as coordinator, coordinator.checkpoint() as checkpoint:
        await released(checkpoint, in_flight)
        assert coordinator._session is not None
        holds, begun = coordinator._session.renewal.holds, time.monotonic()
        monkeypatch.setattr(holds, "clock", lambda: begun + 20)
        with pytest.raises(LeaseLost, match="no Commit was sent"):
            await checkpoint.commit(in_flight)
        assert nodes.journal.begun("Commit") == []
    assert "no Commit was sent" in result_of(checkpoint).failure


async def test_one_slow_resume_does_not_keep_the_commits_back(nodes: Nodes) -> None:
    """They have to be sent while records are kept; the slow one is released when it answers."""
    in_flight = nodes.add(*episodes(2))
    slow, wrote = Gate(), asyncio.Event()
    nodes["env"].script["Resume"] = [slow.hold()]

    async def action(inner: Any, request: Any, context: Any) -> Any:
        wrote.set()
        return await inner(request, context)

    nodes["agent"].script["Commit"] = [action]
    async with nodes.coordinator(lease_ttl=6) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        committing = asyncio.create_task(checkpoint.commit(in_flight, reopen_when_captured=True))
        await wrote.wait()
        assert not nodes["env"].owner.open
        slow.open.set()
        await committing
        await checkpoint.publish()
    assert nodes.all_open()
    result = result_of(checkpoint)
    assert (result.state, result.resume_pending) == (CheckpointState.PUBLISHED, ())
    timing = result.timing
    assert timing.released_at is not None
    assert timing.prepared_at is not None
    assert timing.released_at - timing.prepared_at >= 2.0  # it counts from the last one


class Unknowable(LocalFiles):
    """Once `broken`, it names an entry of the sequence, says that it could not, and reads the sequence no more."""

    broken = False
    named = False

    def publish(self, temporary: str, path: str) -> None:
        super().publish(temporary, path)
        if self.broken and "/sequence/" in path:
            self.named = True
            raise StateUnwritable(f"cannot name {path!r}: Input/output error (EIO)")

    def names(self, path: str) -> list[str]:
        if self.named and path.endswith("/sequence"):
            raise StateCorrupt(f"cannot read {path!r}: Input/output error (EIO)")
        return super().names(path)


async def test_what_may_be_published_is_not_said_to_be_lost(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    files = Unknowable()
    async with nodes.coordinator(files=files) as coordinator:
        async with coordinator.checkpoint(checkpoint_id="ck-1") as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight, reopen_when_captured=True)
            files.broken = True
            with pytest.raises(PublishUnknown):
                await checkpoint.publish()
        told = [event.message for event in coordinator.events if event.state is CheckpointState.ABORTED]
    assert published(nodes) == ["ck-1"]
    for text in (result_of(checkpoint).failure, *told):
        assert "without being published" not in text
        assert "not known" in text
    assert nodes.all_open()


class Held(LocalFiles):
    """Waits, in its thread, before it names an entry of the sequence, while it is `hung`."""

    def __init__(self) -> None:
        super().__init__()
        self.hung = False
        self.gate = threading.Event()

    def publish(self, temporary: str, path: str) -> None:
        if self.hung and "/sequence/" in path:
            assert self.gate.wait(30)
        super().publish(temporary, path)


async def test_a_publication_that_hangs_may_still_come(nodes: Nodes) -> None:
    """No entry is there yet. That is not known to be the end of it, and its directory is nobody's to remove."""
    in_flight = nodes.add(*episodes(1))
    files = Held()
    async with nodes.coordinator(files=files) as coordinator:
        try:
            async with coordinator.checkpoint(checkpoint_id="ck-1") as checkpoint:
                await checkpoint.prepare(ready_within=5)
                await checkpoint.commit(in_flight, reopen_when_captured=True)
                files.hung = True
                checkpoint.allow(0.2)
                with pytest.raises(PublishUnknown):
                    await checkpoint.publish()
            assert "not known" in result_of(checkpoint).failure
            assert coordinator._session is not None
            assert coordinator._session.retaining.aborted == set()
        finally:
            files.gate.set()
    assert published(nodes) == ["ck-1"]


async def test_a_failure_is_not_its_own_cause(nodes: Nodes) -> None:
    """Whoever follows the causes of an error comes to an end."""
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await released(checkpoint, in_flight)
        lost = LeaseLost("no Commit was sent in time")
        checkpoint._commit = partial(_raise, lost)  # type: ignore[method-assign]
        with pytest.raises(LeaseLost) as caught:
            await checkpoint.commit(in_flight)
        assert caught.value is lost
        assert caught.value.__cause__ is not lost


async def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.behaviour("C240", "C241")
async def test_a_take_over_in_that_window_ends_the_write(nodes: Nodes) -> None:
    """One chain of publications, and the first coordinator's records are dropped by the next one's first call."""
    in_flight = nodes.add(*episodes(1))
    gate = Gate()
    nodes["env"].script["Commit"] = [gate.hold()]
    async with nodes.coordinator(retries=QUICK) as first, first.checkpoint(checkpoint_id="ck-1") as checkpoint:
        await checkpoint.prepare(ready_within=5)
        committing = asyncio.create_task(checkpoint.commit(in_flight, reopen_when_captured=True))
        await gate.entered.wait()
        async with nodes.coordinator(controller_id="second") as second:
            after = await take(second, in_flight)
        gate.open.set()
        with pytest.raises((CommitFailed, ControlError)):
            await committing
        with pytest.raises((UsageError, ControlError)):
            await checkpoint.publish()
    assert result_of(checkpoint).state is CheckpointState.ABORTED
    assert published(nodes) == [after.id]
    assert kept(nodes) == []
    assert nodes.all_open()


async def test_what_comes_after_the_release_is_of_the_live_run_only(nodes: Nodes) -> None:
    """New rollouts, progress, and a rollout that is retired: the checkpoint has the cut, and nothing of these."""
    in_flight = nodes.add(*episodes(3))
    gate = Gate()
    nodes["env"].script["Commit"] = [gate.hold()]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        committing = asyncio.create_task(checkpoint.commit(in_flight, reopen_when_captured=True))
        await gate.entered.wait()
        nodes.add(EpisodeId("late", 0))
        for node in nodes:
            node.owner.live[in_flight[0]] = "went on"
        await coordinator.retire([in_flight[1]])
        gate.open.set()
        await committing
        await checkpoint.publish()
        assert checkpoint.continued == tuple(in_flight)
        assert checkpoint.restarts == {}
    for node in nodes:
        await node.restart()
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert sorted(restored.continued) == [episode.next() for episode in in_flight]
    assert nodes["env"].owner.live[in_flight[0].next()] == {"at": "env", "turn": 0}


@pytest.mark.parametrize("options", [{"on_stop": "close"}, {"on_stop": "retire"}])
async def test_a_stop_is_not_reopened(nodes: Nodes, options: dict[str, Any]) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        with pytest.raises(UsageError, match="cannot be reopened"):
            await checkpoint.commit(in_flight, stop=True, reopen_when_captured=True, **options)
        assert nodes.journal.begun("Capture") == []
        await checkpoint.capture(in_flight)
        await checkpoint.reopen()
        with pytest.raises(UsageError, match="cannot be reopened"):
            await checkpoint.commit(in_flight, stop=True, **options)
        await checkpoint.commit(in_flight)
        await checkpoint.publish()


# ---- from one process to the next


async def test_another_process_repeats_a_write_that_failed(nodes: Nodes) -> None:
    """No lease covers what is kept; the participants decide whether it still is."""
    in_flight = nodes.add(*episodes(2))
    nodes["agent"].script["Commit"] = [refuse(InternalError("once"))]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await released(checkpoint, in_flight)
        with pytest.raises(CommitFailed):
            await checkpoint.commit(in_flight)
        state = await checkpoint.detach()
    assert state.step is Step.RELEASED
    nodes.journal.clear()
    async with Coordinator.attach(type(state).from_json(state.to_json())) as coordinator:
        block = coordinator.attached()
        assert isinstance(block, Checkpoint)
        async with block:
            await block.commit(in_flight)
            await block.publish()
    assert nodes.journal.begun("Capture") == []
    assert published(nodes) == [checkpoint.id]
    assert block.continued == tuple(in_flight)
    assert nodes.all_open()


async def test_another_process_publishes_what_was_written_after_the_release(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight, reopen_when_captured=True)
        state = await checkpoint.detach()
    async with Coordinator.attach(state) as coordinator:
        block = coordinator.attached()
        assert isinstance(block, Checkpoint)
        async with block:
            await block.publish()
    assert published(nodes) == [checkpoint.id]
    assert len(nodes["env"].owner.openings) == 1
