"""When a checkpoint is prepared, released and durable, and that nothing else stands in the pause."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import CheckpointState, Step, Timing
from gym_ckpt_grpc.protocol.errors import StateUnwritable
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles
from tests.coordinator.fleet_of_nodes import Gate, Nodes, episodes
from tests.coordinator.test_released import kept, result_of, take


def moments(timing: Timing) -> list[float | None]:
    return [timing.prepared_after, timing.released_after, timing.durable_after, timing.published_after]


async def test_prepared_released_and_durable_are_three_moments(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    gate = Gate()
    nodes["env"].script["Commit"] = [gate.hold()]
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        timing = checkpoint.timing
        assert moments(timing) == [None] * 4
        await checkpoint.prepare(ready_within=5)
        assert [moment is not None for moment in moments(timing)] == [True, False, False, False]
        committing = asyncio.create_task(checkpoint.commit(in_flight, reopen_when_captured=True))
        await gate.entered.wait()
        assert [moment is not None for moment in moments(timing)] == [True, True, False, False]
        assert checkpoint.step is Step.RELEASED
        assert nodes.all_open()
        gate.open.set()
        await committing
        assert [moment is not None for moment in moments(timing)] == [True, True, True, False]
        await checkpoint.publish()
    told = [moment for moment in moments(result_of(checkpoint).timing) if moment is not None]
    assert len(told) == 4
    assert told == sorted(told)
    assert timing.pause_ms == pytest.approx(1000 * told[1])
    assert timing.beyond_cut_ms == pytest.approx(timing.pause_ms - timing.cut_ms)
    states = [e.state for e in coordinator.events if e.state]
    assert states == [
        CheckpointState.PREPARED,
        CheckpointState.RELEASED,
        CheckpointState.COMMITTED,
        CheckpointState.PUBLISHED,
    ]


async def test_without_it_the_fleet_is_released_last(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        checkpoint = await take(coordinator, in_flight)
    timing = checkpoint.timing
    assert timing.prepared_at is not None
    assert timing.durable_at is not None
    assert timing.published_at is not None
    assert timing.released_at is not None
    assert timing.prepared_at <= timing.durable_at <= timing.published_at <= timing.released_at


async def test_nothing_but_capture_and_resume_stands_between_prepared_and_released(nodes: Nodes) -> None:
    """No look, no list, no path call: the pause beyond the cut is two fan-outs."""
    paths: list[str] = []

    class Watched(LocalFiles):
        def make_dirs(self, path: str) -> None:
            paths.append(path)
            super().make_dirs(path)

        def create(self, path: str, **options: Any) -> Any:
            paths.append(path)
            return super().create(path, **options)

        def open(self, path: str) -> Any:
            paths.append(path)
            return super().open(path)

    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator(files=Watched(), incremental=True) as coordinator:
        await take(coordinator, in_flight)
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            nodes.journal.clear()
            paths.clear()
            await checkpoint.capture(in_flight)
            await checkpoint.reopen()
            assert {entry.method for entry in nodes.journal} - {"RenewLease"} == {"Capture", "Resume"}
            assert paths == []


async def test_a_root_that_cannot_take_it_is_told_before_anything_is_closed(nodes: Nodes) -> None:
    class Filling(LocalFiles):
        free: int | None = None

        def free_bytes(self, path: str) -> int | None:
            return super().free_bytes(path) if self.free is None else self.free

    nodes.add(*episodes(1))
    files = Filling()
    async with nodes.coordinator(files=files) as coordinator:
        files.free = 0
        async with coordinator.checkpoint() as checkpoint:
            with pytest.raises(StateUnwritable, match=str(nodes.root)):
                await checkpoint.prepare(ready_within=5)
        assert nodes.journal.begun("Prepare") == []
        assert nodes.journal.begun("Resume") == []


async def test_a_full_checkpoint_needs_room_for_what_the_newest_one_took(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is not begun where it cannot end; how much an incremental one writes is not known."""
    in_flight = nodes.add(*episodes(2))
    asked: list[int] = []
    preflight = CheckpointRoot.preflight

    def noted(self: CheckpointRoot, *, expected_bytes: int = 0) -> Any:
        asked.append(expected_bytes)
        return preflight(self, expected_bytes=expected_bytes)

    monkeypatch.setattr(CheckpointRoot, "preflight", noted)
    async with nodes.coordinator() as coordinator:
        first = await take(coordinator, in_flight)
        await take(coordinator, in_flight)
    async with nodes.coordinator(incremental=True) as coordinator:
        await take(coordinator, in_flight)
    start = 0
    assert asked == [start, 0, result_of(first).bytes, start, 0]
    assert result_of(first).bytes > 0


async def test_records_that_are_published_are_not_kept_in_memory(nodes: Nodes) -> None:
    """Else a checkpoint every few seconds keeps several copies of all state; nothing waits for it."""
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(lease_ttl=60) as coordinator:
        await take(coordinator, in_flight, reopen_when_captured=True)
        assert await coordinator.reopened(timeout=20)
        assert kept(nodes) == []
    assert all(len(node.owner.openings) == 1 for node in nodes)
