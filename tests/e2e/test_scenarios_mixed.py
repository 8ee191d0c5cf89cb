"""Rollouts that can be captured beside some that cannot, and many of them at once. Real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gym_ckpt_grpc.coordinator.transaction import Checkpoint
from gym_ckpt_grpc.minigym.evidence import turns_begun
from gym_ckpt_grpc.minigym.tasks import Task, make_tasks
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.e2e.plays import counting, play
from tests.e2e.rig import HELD_AFTER, Rig, rig, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MIXED = Topology(resources=("counter", "tally"), controls=True)
FREE = Topology(resources=("counter", "blackjack"))
FREE_MIXED = Topology(resources=("counter", "tally"))
SCALE = int(os.environ.get("GYM_CKPT_TEST_SCALE", "24"))
"""Rollouts of the test of scale."""
SLOW_TICK = 0.003
"""Seconds per token where rollouts run freely: slow enough that most are in flight at the checkpoint."""


async def both_held(gym: Rig) -> None:
    """One rollout that can be captured and one that cannot, both in their second call."""
    await gym.start()
    await gym.hold_tokens(HELD_AFTER, turn=1)
    gym.send([counting("kept"), counting("again", kind="tally")])
    await gym.held_tokens("kept")
    await gym.held_tokens("again")


@pytest.mark.behaviour("E22")
async def test_mixed_with_a_crash(tmp_path: Path) -> None:
    """The restart rollout does not block, is reported, has no record anywhere, and starts over; both get 1.0."""
    async with rig(tmp_path, MIXED) as gym:
        await both_held(gym)
        checkpoint = await gym.checkpoint()
        assert checkpoint.report.restarts == (EpisodeId("again"),)
        assert (checkpoint.continued, checkpoint.restarts) == ((EpisodeId("kept"),), {EpisodeId("again"): "restart"})
        for server in ("environment", "agent", "policy_model", "counter", "tally"):
            assert EpisodeId("again").capture_key not in gym.records(server, checkpoint.id)
        await gym.crash()
        restored = await gym.installed()
        await gym.retire(restored.restarts)
        gym.send_continued(restored)
        gym.send([gym.tasks["again"]], {"again": 1})
        results = await gym.finish()
    assert {rollout: result.reward for rollout, result in results.items()} == {"kept": 1.0, "again": 1.0}
    assert [call.turn for call in gym.calls("kept", life=2)] == [1]
    assert [call.turn for call in gym.calls("again", life=2)] == [0, 1]


@pytest.mark.behaviour("E23")
async def test_mixed_without_a_crash(tmp_path: Path) -> None:
    """Both finish as their first attempt."""
    async with rig(tmp_path, MIXED) as gym:
        await both_held(gym)
        await gym.checkpoint()
        await gym.release_tokens()
        results = await gym.finish()
    assert {rollout: result.reward for rollout, result in results.items()} == {"kept": 1.0, "again": 1.0}
    assert [(call.turn, call.attempt) for call in gym.calls("kept")] == [(0, 0), (1, 0)]
    assert [(call.turn, call.attempt) for call in gym.calls("again")] == [(0, 0), (1, 0)]


async def free_running(gym: Rig, tasks: list[Task]) -> Checkpoint:
    """Start rollouts, let them run, and take a checkpoint of what is in flight; none finishes during it."""
    await gym.start()
    gym.send(tasks)
    await until(lambda: sum(turns_begun(gym.plan.inference_log, life=1).values()) > len(tasks))
    async with gym.prepared() as checkpoint:
        await gym.settled()
        before = dict(gym.trainer.results)
        await gym.commit(checkpoint)
        assert gym.trainer.results == before
        assert gym.trainer.failures == {}
    in_flight = {episode.rollout_id for episode in (*checkpoint.continued, *checkpoint.restarts)}
    assert in_flight.isdisjoint(before)
    assert in_flight | set(before) == {task.rollout_id for task in tasks}
    return checkpoint


@pytest.mark.behaviour("E33")
async def test_free_running(tmp_path: Path) -> None:
    """No test holds anything: in flight is finished or exported, and every replacement succeeds."""
    tasks = make_tasks(16, seed=11)
    async with rig(tmp_path, FREE, tick=SLOW_TICK) as gym:
        checkpoint = await free_running(gym, tasks)
        assert checkpoint.restarts == {}
        steps = {key: r.decode("boundary")["next"] for key, r in gym.records("environment", checkpoint.id).items()}
        agent = set(gym.records("agent", checkpoint.id))
        assert {key for key, step in steps.items() if step == "invoke_agent"} <= agent
        # Beside them only sessions whose activation has not begun, or has ended and is to be closed.
        assert {steps[key] for key in agent} <= {"seed", "invoke_agent", "close_agent"}
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
    assert set(results) == {episode.rollout_id for episode in checkpoint.continued}
    assert all(result == play(gym.tasks[rollout]).result for rollout, result in results.items())


@pytest.mark.behaviour("E34")
async def test_free_running_and_mixed(tmp_path: Path) -> None:
    """Exactly the restart-only rollouts in flight are restarts; after retiring what crashed all succeed."""
    tasks = make_tasks(16, seed=12, kinds=("counter", "tally"))
    async with rig(tmp_path, FREE_MIXED, tick=SLOW_TICK) as gym:
        checkpoint = await free_running(gym, tasks)
        assert {gym.tasks[episode.rollout_id].kind for episode in checkpoint.restarts} == {"tally"}
        assert {gym.tasks[episode.rollout_id].kind for episode in checkpoint.continued} == {"counter"}
        await gym.crash()
        restored = await gym.installed()
        await gym.retire(restored.restarts)
        gym.send_continued(restored)
        again = [gym.tasks[episode.rollout_id] for episode in restored.restarts]
        gym.send(again, {task.rollout_id: 1 for task in again})
        results = await gym.finish()
    assert len(results) == len(checkpoint.continued) + len(checkpoint.restarts)
    assert all(result == play(gym.tasks[rollout]).result for rollout, result in results.items())


@pytest.mark.behaviour("E36")
@pytest.mark.parametrize("workers", [1, 2])
async def test_scale(workers: int, tmp_path: Path) -> None:
    """Finished and exported are disjoint and together all; every replacement has reward 1.0. Prints what it cost."""
    tasks = [counting(f"r{number}", turns=2) for number in range(SCALE)]
    topology = Topology(resources=("counter",), inference_workers=workers)
    async with rig(tmp_path, topology, tick=SLOW_TICK) as gym:
        checkpoint = await free_running(gym, tasks)
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
    continued = [call for call in gym.calls(life=2) if call.continued_from]
    result = checkpoint.result
    assert result is not None
    cuts = checkpoint.report.participants["policy_model/policy_model/0"].counts["cut"]
    print(
        f"{SCALE} rollouts, {workers} workers: {len(results)} continued, pause {result.timing.pause_ms:.0f} ms, "
        f"{result.bytes} bytes, {cuts} cuts, {len(continued)} calls continued"
    )
    assert set(results) == {episode.rollout_id for episode in checkpoint.continued}
    assert {result.reward for result in results.values()} == {1.0}
