"""Old checkpoints are removed after a publication: off the pause, with an outcome of its own, and never one in use."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import Checkpoint, CheckpointState, Coordinator, EventKind
from gym_ckpt_grpc.coordinator.retaining import told
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InvalidArgument,
    OutOfTime,
    StaleController,
    StateNotFound,
    StateUnwritable,
    UsageError,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    LocalFiles,
    Retention,
    RetentionOutcome,
    apply_retention,
    plan_retention,
)
from tests.coordinator.fleet_of_nodes import Gate, Nodes, episodes


async def take(
    coordinator: Coordinator, in_flight: list[EpisodeId], *, checkpoint_id: str | None = None, **options: Any
) -> Checkpoint:
    """A published checkpoint."""
    async with coordinator.checkpoint(checkpoint_id=checkpoint_id) as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued(in_flight), **options)
        await checkpoint.publish()
    return checkpoint


async def outcome_of(checkpoint: Checkpoint) -> RetentionOutcome:
    """What retention did after it."""
    assert checkpoint.result is not None
    assert checkpoint.result.retention is not None
    return await checkpoint.result.retention


def there(nodes: Nodes) -> list[str]:
    return sorted(os.listdir(Path(nodes.root, "checkpoints")))


def write(path: str, data: bytes) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(data)


def told_of(coordinator: Coordinator) -> list[str]:
    return [event.message for event in coordinator.events if event.kind is EventKind.RETENTION]


@pytest.mark.behaviour("C229")
async def test_each_publication_removes_what_the_policy_does_not_keep(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator(retention=Retention(keep_last=2)) as coordinator:
        outcome = RetentionOutcome()
        for number in range(1, 5):
            checkpoint = await take(coordinator, in_flight, checkpoint_id=f"ck-{number}")
            outcome = await outcome_of(checkpoint)
            assert outcome.failures == ()
            assert there(nodes) == [f"ck-{n}" for n in range(max(1, number - 1), number + 1)]
        assert [each.name for each in outcome.removed] == ["ck-2"]
        assert outcome.bytes_freed > 0
        assert {each.name for each in outcome.kept} == {"ck-3", "ck-4"}
        assert told_of(coordinator)[-1].startswith("removed ck-2; ")
        assert "ck-3 (among the last 2)" in told_of(coordinator)[-1]


async def test_nothing_is_removed_unless_it_was_asked_for(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        for number in range(1, 5):
            checkpoint = await take(coordinator, in_flight, checkpoint_id=f"ck-{number}")
            assert checkpoint.result is not None
            assert checkpoint.result.retention is None
        assert told_of(coordinator) == []
    assert len(there(nodes)) == 4


class Held(LocalFiles):
    """Waits, in its thread, before a directory is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.moving: list[str] = []

    def move_dir(self, path: str, target: str) -> None:
        self.moving.append(path)
        self.entered.set()
        assert self.gate.wait(30)
        super().move_dir(path, target)


async def test_the_fleet_is_open_and_the_block_has_ended_while_it_works(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    files = Held()
    async with nodes.coordinator(retention=Retention(keep_last=1), files=files) as coordinator:
        await take(coordinator, in_flight, checkpoint_id="ck-1")
        second = await take(coordinator, in_flight, checkpoint_id="ck-2")
        assert await asyncio.to_thread(files.entered.wait, 20)
        assert nodes.all_open()
        assert second.result is not None
        assert second.result.retention is not None
        assert not second.result.retention.done()
        # The next checkpoint does not wait for it either.
        third = await take(coordinator, in_flight, checkpoint_id="ck-3")
        assert there(nodes) == ["ck-1", "ck-2", "ck-3"]
        files.gate.set()
        assert [each.name for each in (await outcome_of(second)).removed] == ["ck-1"]
        assert [each.name for each in (await outcome_of(third)).removed] == ["ck-2"]
    assert there(nodes) == ["ck-3"]


async def test_a_deletion_waits_for_the_retention_under_way(nodes: Nodes) -> None:
    """What that moves aside may come back, so nothing that it may need could go: both at once refuse each other."""
    in_flight = nodes.add(*episodes(1))
    files = Held()
    async with nodes.coordinator(retention=Retention(keep_last=1), files=files) as coordinator:
        await take(coordinator, in_flight, checkpoint_id="ck-1")
        await coordinator.hold("ck-1", "eval")
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="ck-2"))
        third = await take(coordinator, in_flight, checkpoint_id="ck-3")
        assert await asyncio.to_thread(files.entered.wait, 20)  # ck-2 is about to go
        await coordinator.release("ck-1", "eval")
        with pytest.raises(OutOfTime):
            await coordinator.delete("ck-1", deadline=0.5)
        assert [os.path.basename(path) for path in files.moving] == ["ck-2"]
        deleting = asyncio.create_task(coordinator.delete("ck-1"))
        files.gate.set()
        await deleting
        assert [each.name for each in (await outcome_of(third)).removed] == ["ck-2"]
        assert there(nodes) == ["ck-3"]


@pytest.mark.behaviour("C222")
async def test_an_unreadable_old_manifest_is_reported_and_the_new_checkpoint_stands(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(retention=Retention(keep_last=1)) as coordinator:
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="old"))
        write(coordinator.root.location("old").aggregate, b"junk")
        new = await take(coordinator, in_flight, checkpoint_id="new")
        outcome = await outcome_of(new)
        assert new.result is not None
        assert new.result.state is CheckpointState.PUBLISHED
        assert new.result.notes == ()
        assert outcome.removed == ()
        (old,) = [each for each in outcome.kept if each.name == "old"]
        assert "cannot be read" in old.reason
        assert "cannot be read" in told_of(coordinator)[-1]
    assert there(nodes) == ["new", "old"]
    assert CheckpointRoot(str(nodes.root)).find().manifest.checkpoint_id == "new"


class Refusing(LocalFiles):
    """Refuses one operation with an error of the disk."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.on = False

    def _check(self, operation: str, path: str) -> None:
        if self.on and operation == self.operation:
            raise StateUnwritable(f"cannot {operation} {path!r}: Input/output error (EIO)")

    def move_dir(self, path: str, target: str) -> None:
        self._check("move", path)
        super().move_dir(path, target)

    def remove(self, path: str) -> None:
        if "/.deleted-" in path:
            self._check("remove", path)
        super().remove(path)

    def names(self, path: str) -> list[str]:
        if path.endswith("/checkpoints"):
            self._check("list", path)
        return super().names(path)


@pytest.mark.behaviour("C222")
@pytest.mark.parametrize("operation", ["move", "remove", "list"])
async def test_a_failure_is_an_outcome_of_its_own_and_the_next_one_makes_up_for_it(
    nodes: Nodes, operation: str
) -> None:
    in_flight = nodes.add(*episodes(1))
    files = Refusing(operation)
    async with nodes.coordinator(retention=Retention(keep_last=1), files=files) as coordinator:
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="ck-1"))
        files.on = True
        second = await take(coordinator, in_flight, checkpoint_id="ck-2")
        outcome = await outcome_of(second)
        files.on = False
        assert second.result is not None
        assert (second.result.state, second.result.sequence_number) == (CheckpointState.PUBLISHED, 3)
        assert "EIO" in outcome.failures[0]
        assert "EIO" in told_of(coordinator)[-1]
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="ck-3"))
        assert there(nodes) == ["ck-3"]


async def test_a_trainer_that_stops_spends_no_time_on_it(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(retention=Retention(keep_last=1)) as coordinator:
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="ck-1"))
        last = await take(coordinator, in_flight, checkpoint_id="ck-2", stop=True)
        assert last.result is not None
        assert last.result.state is CheckpointState.STOPPED
        assert last.result.retention is None
    assert there(nodes) == ["ck-1", "ck-2"]


@pytest.mark.behaviour("C231")
async def test_what_was_aborted_here_or_by_an_earlier_run_goes_after_its_grace(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))

    async def abort(coordinator: Coordinator, checkpoint_id: str) -> None:
        async with coordinator.checkpoint(checkpoint_id=checkpoint_id) as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight)

    async with nodes.coordinator() as coordinator:
        await abort(coordinator, "of-the-run-before")
    write(f"{nodes.root}/checkpoints/foreign/checkpoint.json", b"{}")
    async with nodes.coordinator(retention=Retention()) as coordinator:
        await abort(coordinator, "aborted")
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="young"))
        assert there(nodes) == ["aborted", "foreign", "of-the-run-before", "young"]
        for directory, _, names in os.walk(Path(nodes.root, "checkpoints")):
            for name in names:
                os.utime(f"{directory}/{name}", (1.0, 1.0))
        outcome = await outcome_of(await take(coordinator, in_flight, checkpoint_id="next"))
    assert {each.name for each in outcome.removed} == {"of-the-run-before", "aborted"}
    assert there(nodes) == ["foreign", "next", "young"]


async def restarted(nodes: Nodes) -> None:
    for node in nodes:
        await node.restart()


@pytest.mark.behaviour("C230")
async def test_the_source_of_a_restore_stays_until_the_restored_run_has_published(nodes: Nodes) -> None:
    """With a prune of another process at the slowest moment of the restore, and one after each step of it."""
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        for number in (1, 2, 3):
            await take(coordinator, in_flight, checkpoint_id=f"ck-{number}")
    await restarted(nodes)
    other = CheckpointRoot(str(nodes.root))

    def prune() -> list[str]:
        outcome = apply_retention(other, plan_retention(other, Retention(keep_last=1), epoch=None, grace=0.0))
        assert outcome.failures == ()
        return there(nodes)

    gate = Gate()
    nodes["agent"].script["Restore"] = [gate.hold()]
    async with nodes.coordinator(retention=Retention(keep_last=1)) as coordinator:

        async def restore() -> tuple[EpisodeId, ...]:
            async with coordinator.restoring("ck-1", deadline=30) as restored:
                assert prune() == ["ck-1", "ck-3"]
            return restored.continued

        task = asyncio.create_task(restore())
        await gate.entered.wait()
        assert prune() == ["ck-1", "ck-3"]
        gate.open.set()
        continued = await task
        assert prune() == ["ck-1", "ck-3"]
        with pytest.raises(CheckpointConflict, match="pinned"):
            await coordinator.delete("ck-1")
        checkpoint = await take(coordinator, list(continued), checkpoint_id="ck-4")
        await outcome_of(checkpoint)
    assert there(nodes) == ["ck-4"]


async def test_a_source_that_was_removed_under_a_restore_fails_it_by_name(nodes: Nodes) -> None:
    """It was read, and is gone when it is pinned: nothing is installed."""
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        for number in (1, 2):
            await take(coordinator, in_flight, checkpoint_id=f"ck-{number}")
    await restarted(nodes)
    other = CheckpointRoot(str(nodes.root))

    def prune(request: Any) -> None:
        apply_retention(other, plan_retention(other, Retention(keep_last=1), epoch=None))

    async with nodes.coordinator() as coordinator:
        look = coordinator.root.pin

        def late(checkpoint_id: str, *, epoch: int) -> Any:
            prune(None)
            return look(checkpoint_id, epoch=epoch)

        coordinator.root.pin = late  # type: ignore[method-assign]
        with pytest.raises(StateNotFound, match="ck-1"):
            async with coordinator.restoring("ck-1"):
                pytest.fail("the body was entered")
        assert nodes.all_open()
        assert not any(node.calls["Restore"] for node in nodes)
        assert coordinator.root.pins() == ()


async def test_a_run_that_goes_on_in_another_process_lets_its_source_go_too(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        await take(coordinator, in_flight, checkpoint_id="ck-1")
    await restarted(nodes)
    async with nodes.coordinator() as first, first.restoring() as restored:
        state = await restored.detach()
    async with Coordinator.attach(state) as second:
        async with second.attached():
            pass
        assert [pin.checkpoint_id for pin in second.root.pins()] == ["ck-1"]
        await take(second, [episode.next() for episode in in_flight], checkpoint_id="ck-2")
        assert second.root.pins() == ()


class Hanging(LocalFiles):
    """Waits, in its thread, where the pins are read or a release is written, from `hung` on."""

    def __init__(self) -> None:
        super().__init__()
        self.hung = ""
        self.gate = threading.Event()

    def names(self, path: str) -> list[str]:
        if self.hung and path.endswith(self.hung):
            assert self.gate.wait(30)
        return super().names(path)


async def test_a_storage_that_hangs_after_the_publication_holds_up_neither_the_fleet_nor_the_end(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is let go then is tidied later by others: the checkpoint stands."""
    monkeypatch.setattr("gym_ckpt_grpc.coordinator.session.UNPIN_LIMIT", 0.05)
    monkeypatch.setattr("gym_ckpt_grpc.coordinator.coordinator.LEAVE_PATIENCE", 0.05)
    in_flight = nodes.add(*episodes(1))
    files = Hanging()
    coordinator = nodes.coordinator(files=files)
    try:
        async with asyncio.timeout(10), coordinator:
            async with coordinator.checkpoint() as checkpoint:
                report = await checkpoint.prepare(ready_within=5)
                await checkpoint.commit(report.continued(in_flight))
                files.hung = "/pins"
                await checkpoint.publish()
            assert checkpoint.result is not None
            assert checkpoint.result.state is CheckpointState.PUBLISHED
            assert nodes.all_open()
            assert any("still pinned" in text for text in told_of(coordinator))
            files.hung = "/sequence"
    finally:
        files.gate.set()
    assert any("not released" in event.message for event in coordinator.events)


@pytest.mark.behaviour("C229")
async def test_a_hold_keeps_what_a_trainer_s_save_refers_to(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(retention=Retention(keep_last=1)) as coordinator:
        await take(coordinator, in_flight, checkpoint_id="ck-1")
        await coordinator.hold("ck-1", "step-100")
        await coordinator.hold("ck-1", "step-100")
        with pytest.raises(StateNotFound):
            await coordinator.hold("never", "step-100")
        with pytest.raises(InvalidArgument):
            await coordinator.hold("ck-1", "step 100")
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="ck-2"))
        assert await coordinator.holds() == [("ck-1", "step-100")]
    async with nodes.coordinator(retention=Retention(keep_last=1)) as coordinator:
        outcome = await outcome_of(await take(coordinator, in_flight, checkpoint_id="ck-3"))
        assert there(nodes) == ["ck-1", "ck-3"]
        assert "held by 'step-100'" in told(outcome)
        with pytest.raises(CheckpointConflict, match="held by 'step-100'"):
            await coordinator.delete("ck-1")
        await coordinator.release("ck-1", "step-100")
        await coordinator.release("ck-1", "step-100")
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="ck-4"))
    assert there(nodes) == ["ck-4"]


async def test_a_coordinator_that_is_left_ends_it_between_two_files(nodes: Nodes) -> None:
    """It does not hold up the end of the process, and the next one goes on where it ended."""
    in_flight = nodes.add(*episodes(1))
    files = Held()
    async with nodes.coordinator(files=files) as coordinator:
        for number in (1, 2, 3):
            await take(coordinator, in_flight, checkpoint_id=f"ck-{number}")
    async with nodes.coordinator(retention=Retention(keep_last=1), files=files) as coordinator:
        last = await take(coordinator, in_flight, checkpoint_id="ck-4")
        assert await asyncio.to_thread(files.entered.wait, 20)
        session = coordinator._session
        assert session is not None
        (stop,) = session.retaining._stops
        ending = asyncio.create_task(session.retaining.close(0.01))
        assert await asyncio.to_thread(stop._stopped.wait, 20)
        files.gate.set()
        await ending
    outcome = await outcome_of(last)
    assert "stopped" in outcome.failures[0]
    assert {"ck-1", "ck-2", "ck-4"} <= set(there(nodes))
    async with nodes.coordinator(retention=Retention(keep_last=1)) as coordinator:
        await outcome_of(await take(coordinator, in_flight, checkpoint_id="ck-5"))
    assert there(nodes) == ["ck-5"]


async def test_a_coordinator_that_was_replaced_removes_and_holds_nothing(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(retention=Retention(keep_last=1)) as coordinator:
        await take(coordinator, in_flight, checkpoint_id="ck-1")
        async with coordinator.checkpoint(checkpoint_id="ck-2") as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight)
            await checkpoint.publish()
            CheckpointRoot(str(nodes.root)).sequence.claim("other", "run")
        outcome = await outcome_of(checkpoint)
        assert outcome.removed == ()
        assert "replaced" in outcome.failures[0]
        for call in (coordinator.delete("ck-1"), coordinator.hold("ck-1", "me"), coordinator.release("ck-1", "me")):
            with pytest.raises(StaleController):
                await call
    assert there(nodes) == ["ck-1", "ck-2"]


async def test_holds_need_the_block_of_the_coordinator(nodes: Nodes) -> None:
    coordinator = nodes.coordinator()
    for call in (coordinator.hold("a", "b"), coordinator.release("a", "b"), coordinator.holds()):
        with pytest.raises(UsageError):
            await call
