"""However a block ends, the fleet is open again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import Checkpoint, CheckpointState, Coordinator, PublishFailed
from gym_ckpt_grpc.protocol.errors import InternalError, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles
from tests.coordinator.fleet_of_nodes import Gate, Nodes, broken, episodes, nodes_elsewhere, refuse


def published(nodes: Nodes) -> list[str]:
    return [p.checkpoint_id for p in CheckpointRoot(str(nodes.root)).sequence.publications()]


async def whole(coordinator: Coordinator, in_flight: list[EpisodeId], keep: list[Checkpoint], **options: Any) -> None:
    async with coordinator.checkpoint() as checkpoint:
        keep.append(checkpoint)
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued(in_flight), **options)
        await checkpoint.publish()


class Stop(BaseException):
    """Like KeyboardInterrupt, but raised where a test wants it."""


@pytest.mark.behaviour("C232", "C234")
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, Stop])
@pytest.mark.parametrize("after", ["nothing", "prepare", "capture", "commit", "publish"])
async def test_the_fleet_is_reopened_whatever_the_body_raises(
    nodes: Nodes, kind: type[BaseException], after: str
) -> None:
    in_flight = nodes.add(*episodes(1))
    raised = kind("the body's own")

    async def body() -> None:
        async with checkpoint:
            if after != "nothing":
                await checkpoint.prepare(ready_within=5)
            if after in ("capture", "commit", "publish"):
                await checkpoint.capture(in_flight)
            if after in ("commit", "publish"):
                await checkpoint.commit(in_flight)
            if after == "publish":
                await checkpoint.publish()
            raise raised

    async with nodes.coordinator() as coordinator:
        checkpoint = coordinator.checkpoint()
        with pytest.raises(kind) as found:
            await body()
        assert found.value is raised
        assert nodes.all_open()
    assert checkpoint.result is not None
    stands = after == "publish"
    assert checkpoint.result.state is (CheckpointState.PUBLISHED if stands else CheckpointState.ABORTED)
    assert published(nodes) == ([checkpoint.id] if stands else [])


CALLS = [
    (method, name)
    for method in ("GetStatus", "Prepare", "Capture", "Commit", "ListEpisodes", "Resume")
    for name in ("env", "res")
]


@pytest.mark.behaviour("C232")
@pytest.mark.parametrize(("method", "name"), CALLS)
async def test_a_cancellation_at_each_call_reopens_the_fleet(nodes: Nodes, method: str, name: str) -> None:
    in_flight = nodes.add(*episodes(1))
    gate = Gate()
    async with nodes.coordinator() as coordinator:
        keep: list[Checkpoint] = []
        nodes[name].script[method] = [gate.hold()]
        task = asyncio.create_task(whole(coordinator, in_flight, keep))
        await gate.entered.wait()
        task.cancel()
        if method == "Resume":
            gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nodes.all_open()
        gate.open.set()
    stands = method == "Resume"
    assert published(nodes) == ([keep[0].id] if stands else [])
    assert keep[0].result is not None
    assert keep[0].result.state is (CheckpointState.PUBLISHED if stands else CheckpointState.ABORTED)


class Slow(LocalFiles):
    """Waits, in its thread, before it gives a file whose path has `at` in it its name."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.armed = False
        self.entered = threading.Event()
        self.gate = threading.Event()

    def publish(self, temporary: str, path: str) -> None:
        if self.armed and self.at in path:
            self.entered.set()
            assert self.gate.wait(30)
        super().publish(temporary, path)


@pytest.mark.behaviour("C232")
@pytest.mark.parametrize(
    ("at", "stands"), [("intent.json", False), ("episodes-", False), ("checkpoint.json", False), ("sequence/", True)]
)
async def test_a_cancellation_at_each_write_reopens_the_fleet(nodes: Nodes, at: str, stands: bool) -> None:
    """Work in a thread cannot be taken back: the exit waits for it, and knows what it did."""
    in_flight = nodes.add(*episodes(1))
    files = Slow(at)
    async with nodes.coordinator(files=files) as coordinator:
        keep: list[Checkpoint] = []
        files.armed = True
        task = asyncio.create_task(whole(coordinator, in_flight, keep))
        await asyncio.to_thread(files.entered.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        files.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        files.armed = False
        assert nodes.all_open()
    assert published(nodes) == ([keep[0].id] if stands else [])
    assert keep[0].result is not None
    assert keep[0].result.state is (CheckpointState.PUBLISHED if stands else CheckpointState.ABORTED)


@pytest.mark.behaviour("C233")
@pytest.mark.parametrize("times", [1, 5])
async def test_further_cancellations_do_not_stop_the_reopening(nodes: Nodes, times: int) -> None:
    in_flight = nodes.add(*episodes(1))
    gate, closing = Gate(), Gate()
    nodes["agent"].script["Commit"] = [gate.hold()]
    nodes["model"].script["Resume"] = [closing.hold()]
    async with nodes.coordinator(stage_grace=0.01) as coordinator:
        task = asyncio.create_task(whole(coordinator, in_flight, []))
        await gate.entered.wait()
        task.cancel()
        await closing.entered.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        closing.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nodes.all_open()


@pytest.mark.behaviour("C233")
async def test_a_cancellation_during_the_exit_of_a_good_block_is_raised_after_it(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    gate = Gate()
    nodes["model"].script["Resume"] = [gate.hold()]
    keep: list[Checkpoint] = []
    async with nodes.coordinator(stage_grace=0.01) as coordinator:
        task = asyncio.create_task(whole(coordinator, in_flight, keep))
        await gate.entered.wait()
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nodes.all_open()
    assert keep[0].result is not None
    assert keep[0].result.state is CheckpointState.PUBLISHED


@pytest.mark.behaviour("C234")
async def test_a_cancellation_during_an_exit_is_not_lost_behind_the_body_s_error(nodes: Nodes) -> None:
    gate = Gate()
    nodes["model"].script["Resume"] = [gate.hold()]

    async def body(coordinator: Coordinator) -> str:
        try:
            async with coordinator.checkpoint() as checkpoint:
                await checkpoint.prepare(ready_within=5)
                raise ValueError("the body's own")
        except ValueError:
            await asyncio.sleep(0)
        return "swallowed"

    async with nodes.coordinator(stage_grace=0.01) as coordinator:
        task = asyncio.create_task(body(coordinator))
        await gate.entered.wait()
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nodes.all_open()


@pytest.mark.behaviour("C234")
async def test_failures_of_the_exit_are_notes_on_the_body_s_exception(nodes: Nodes) -> None:
    nodes["agent"].always["Resume"] = refuse(InternalError("incident 5"))

    async def body() -> None:
        async with checkpoint:
            await checkpoint.prepare(ready_within=5)
            raise ValueError("the body's own")

    async with nodes.coordinator() as coordinator:
        checkpoint = coordinator.checkpoint()
        with pytest.raises(ValueError, match="the body's own") as raised:
            await body()
        nodes["agent"].always.clear()
    assert any("agent/agent/0" in note and "incident 5" in note for note in raised.value.__notes__)
    assert checkpoint.result is not None
    assert [identity.service for identity in checkpoint.result.resume_pending] == ["agent"]
    assert {node.phase for node in nodes if node.name != "agent"} == {"IDLE"}


@pytest.mark.behaviour("C225")
async def test_a_failed_resume_after_publication_leaves_it_published(nodes: Nodes) -> None:
    """It is reported as pending, goes on in the background, and never touches what is published."""
    in_flight = nodes.add(*episodes(1))
    nodes["agent"].always["Resume"] = broken()
    keep: list[Checkpoint] = []
    async with nodes.coordinator() as coordinator:
        await whole(coordinator, in_flight, keep)
        result = keep[0].result
        assert result is not None
        assert result.state is CheckpointState.PUBLISHED
        assert [identity.service for identity in result.resume_pending] == ["agent"]
        manifest = nodes.root / "checkpoints" / keep[0].id / "checkpoint.json"
        before = manifest.read_bytes()
        assert nodes["agent"].phase == "COMMITTED"
        assert result.timing.resume < 5  # of the 10 that the exit may take
        nodes["agent"].always.clear()
        assert await coordinator.reopened(timeout=10)
        assert nodes.all_open()
        assert manifest.read_bytes() == before
    assert published(nodes) == [keep[0].id]


@pytest.mark.behaviour("C225")
async def test_one_lost_resume_is_simply_sent_again(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    nodes["agent"].script["Resume"] = [broken(), broken(after=True)]
    keep: list[Checkpoint] = []
    async with nodes.coordinator() as coordinator:
        await whole(coordinator, in_flight, keep)
        assert nodes.all_open()
    assert keep[0].result is not None
    assert keep[0].result.resume_pending == ()


async def test_an_exit_is_bounded(nodes: Nodes) -> None:
    gate = Gate()
    nodes["agent"].always["Resume"] = gate.hold()
    loop = asyncio.get_running_loop()
    async with nodes.coordinator(exit_timeout=0.5) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            begun = loop.time()
        assert 0.4 < loop.time() - begun < 2
        assert checkpoint.result is not None
        assert [identity.service for identity in checkpoint.result.resume_pending] == ["agent"]
        gate.open.set()
        assert await coordinator.reopened(timeout=10)
        assert nodes.all_open()


async def test_a_stopping_checkpoint_leaves_the_fleet_closed(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    keep: list[Checkpoint] = []
    async with nodes.coordinator() as coordinator:
        await whole(coordinator, in_flight, keep, stop=True)
        assert nodes.phases() == {"COMMITTED"}
    assert keep[0].result is not None
    assert keep[0].result.state is CheckpointState.STOPPED
    assert all(node.calls["Commit"][0].stop for node in nodes)
    assert nodes.journal.begun("Resume") == []


async def test_a_stopping_checkpoint_can_retire_the_scope_instead(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    keep: list[Checkpoint] = []
    async with nodes.coordinator() as coordinator:
        await whole(coordinator, in_flight, keep, stop=True, on_stop="retire")
        assert nodes.all_open()
        assert all(node.episodes == set() for node in nodes)
    assert keep[0].result is not None
    assert keep[0].result.state is CheckpointState.STOPPED


async def test_stop_without_publication_is_an_abort(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight, stop=True)
        assert nodes.all_open()
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.ABORTED


async def test_an_aborted_id_is_fenced_everywhere(nodes: Nodes) -> None:
    """Also where the Prepare never arrived: one that comes late finds the id resumed."""
    nodes["env"].always["Prepare"] = refuse(InternalError("incident 7"))
    async with nodes.coordinator() as coordinator:
        with pytest.raises(Exception, match="incident 7"):
            async with coordinator.checkpoint() as checkpoint:
                await checkpoint.prepare(ready_within=5)
    assert sorted(nodes.journal.begun("Resume")) == ["agent", "env", "model", "res"]
    assert nodes["res"].calls["Resume"][0].context.checkpoint_id == checkpoint.id


async def test_leaving_the_coordinator_aborts_what_is_open(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator:
        checkpoint = await coordinator.checkpoint().__aenter__()
        await checkpoint.prepare(ready_within=5)
    assert nodes.all_open()
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.ABORTED


async def test_a_publication_that_fails_leaves_no_name(nodes: Nodes) -> None:
    class Full(LocalFiles):
        full = False

        def create(self, path: str) -> Any:
            if self.full:
                raise StateUnwritable(f"no space for {path}")
            return super().create(path)

    in_flight = nodes.add(*episodes(1))
    files = Full()
    async with nodes.coordinator(files=files) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight)
            files.full = True
            with pytest.raises(PublishFailed, match="no space"):
                await checkpoint.publish()
        files.full = False
    assert published(nodes) == []
    assert not (nodes.root / "checkpoints" / checkpoint.id / "checkpoint.json").exists()
    assert nodes.all_open()


@pytest.mark.behaviour("C232")
def test_an_interrupt_that_tears_the_loop_down_still_reopens_the_fleet(tmp_path: Path) -> None:
    """As a second Ctrl-C does: the loop stops at once, then every task is cancelled, the exit's own too."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main(nodes: Nodes) -> None:
        async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            assert nodes.phases() == {"PREPARED"}
            asyncio.get_running_loop().call_soon(interrupt)
            await asyncio.Event().wait()

    with nodes_elsewhere(tmp_path / "root") as nodes:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main(nodes))
        assert nodes.all_open()


@pytest.mark.behaviour("C232")
def test_an_interrupt_in_the_middle_of_an_exit_still_reopens_the_fleet(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main(nodes: Nodes) -> None:
        async with nodes.coordinator(stage_grace=0.2) as coordinator, coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            nodes["model"].script["Resume"] = [broken(), broken()]
            asyncio.get_running_loop().call_later(0.1, interrupt)

    with nodes_elsewhere(tmp_path / "root") as nodes:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main(nodes))
        assert nodes.all_open()
