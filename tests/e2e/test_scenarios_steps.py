"""A checkpoint that meets an episode in each of its steps, or on its way in. Real processes, SIGKILL of every group."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.coordinator import NotPrepared
from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.e2e.plays import counting, play
from tests.e2e.rig import COUNTER, HELD_AFTER, Rig, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

WEATHER = Topology(resources=("weather",), controls=True)


def forecast(rollout_id: str) -> Task:
    """A weather rollout of two calls; its verification may run twice."""
    return Task(rollout_id, "weather", 3, f"Rollout {rollout_id}: report the weather.", 1, {"cities": 1})


async def in_verify(gym: Rig, server: str, task: Task) -> None:
    """Send a rollout and wait until its verification is inside the resources server."""
    await gym.hold(server, "/verify")
    gym.send([task])
    await gym.held(server, "/verify")


@pytest.mark.behaviour("E15")
async def test_a_slow_verification_that_may_run_twice_holds_nothing_up(tmp_path: Path) -> None:
    """Prepare is ready while it runs; the boundary is `verify`, which runs once more after the restore."""
    async with rig(tmp_path, WEATHER) as gym:
        await gym.start()
        await in_verify(gym, "weather", forecast("a"))
        async with gym.prepared() as checkpoint:
            assert checkpoint.report.blocker_count == 0
            await gym.held("weather", "/verify")  # it is still at it
            await gym.commit(checkpoint)
        assert gym.boundary("a", checkpoint.id) == "verify"
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
        assert await gym.seen("weather", "/verify") == 1
    assert len(gym.calls("a")) == 2
    assert gym.calls("a", life=2) == []
    assert results["a"] == play(gym.tasks["a"]).result


@pytest.mark.behaviour("E16")
async def test_a_verification_that_must_not_run_twice_is_waited_for(tmp_path: Path) -> None:
    """An early Prepare names it with its age; once it is done the boundary is `return`, and it is not run again."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await in_verify(gym, "counter", counting("a"))
        async with gym.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
            with pytest.raises(NotPrepared) as early:
                await checkpoint.prepare(ready_within=1)
            blockers = [b for name, b in early.value.report.blockers if name.startswith("environment/")]
            assert [(b.episode, b.reason, b.place) for b in blockers] == [
                (EpisodeId("a"), BlockerReason.WAIT_STEP, "verify")
            ]
            assert blockers[0].age > 0
            await gym.release("counter", "/verify")
            await checkpoint.prepare(ready_within=10)
            await gym.commit(checkpoint)
        assert gym.boundary("a", checkpoint.id) == "return"
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
        assert await gym.seen("counter", "/verify") == 0
    assert gym.calls("a", life=2) == []
    assert results["a"] == play(gym.tasks["a"]).result


@pytest.mark.behaviour("E17")
@pytest.mark.parametrize("crashed", [False, True])
async def test_an_episode_that_finishes_during_prepare(crashed: bool, tmp_path: Path) -> None:
    """It is not delivered while prepared, has boundary `return`, and its result is neither lost nor made twice."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await in_verify(gym, "counter", counting("a"))
        async with gym.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
            await gym.prepare_while(checkpoint, lambda: gym.release("counter", "/verify"))
            await gym.commit(checkpoint)
            assert gym.boundary("a", checkpoint.id) == "return"
            assert (gym.trainer.results, gym.trainer.failures) == ({}, {})
            assert (await gym.status("environment")).report.counts["episodes"] == 1
        if crashed:
            await gym.crash()
            await gym.restore()
        results = await gym.finish()
        assert await gym.seen("counter", "/verify") == (0 if crashed else 1)
    assert len(gym.calls("a")) == 2
    assert results["a"] == play(gym.tasks["a"]).result


@pytest.mark.behaviour("E24")
async def test_a_judge_at_work_holds_nothing_up(tmp_path: Path) -> None:
    """It asks the policy server for a rollout in verification; that call belongs to nobody, and goes on."""
    topology = Topology(resources=("weather",), judge=True, controls=True)
    async with rig(tmp_path, topology) as gym:
        await gym.start()
        await gym.hold_tokens(HELD_AFTER, rollout_id="")
        gym.send([forecast("a")])
        await gym.held_tokens("")
        async with gym.prepared() as checkpoint:
            counts = checkpoint.report.participants["policy_model/policy_model/0"].counts
            assert (counts["untagged"], counts["inflight"], counts["cut"]) == (1, 0, 0)
            await gym.commit(checkpoint)
            await gym.release_tokens()
            await gym.counted("policy_model", "untagged", 0)
        assert gym.boundary("a", checkpoint.id) == "verify"
        results = await gym.finish()
    assert results["a"].reward > 0
    assert [call.rollout_id for call in gym.calls()] == ["a", "a", ""]


@pytest.mark.behaviour("E27")
async def test_a_restore_into_servers_that_serve_other_rollouts(tmp_path: Path) -> None:
    """Both sets finish with reward 1.0."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(counting("a"), turn=1)
        await gym.checkpoint()
        await gym.crash()
        await gym.start()
        await gym.held_at_call(counting("b"), turn=1)
        restored = await gym.restore_here()
        gym.send_continued(restored)
        await gym.release_tokens()
        results = await gym.finish()
    assert {rollout: result.reward for rollout, result in results.items()} == {"a": 1.0, "b": 1.0}
    assert [(call.turn, call.reused) for call in gym.calls("a", life=2)] == [(1, HELD_AFTER)]
    assert [(call.turn, call.attempt) for call in gym.calls("b", life=2)] == [(0, 0), (1, 0)]


@pytest.mark.behaviour("E32", "R20")
async def test_a_run_that_arrives_while_closed_runs_once_afterwards(tmp_path: Path) -> None:
    """It is held: nothing of it exists until the Resume, then it runs, once."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        async with gym.prepared() as checkpoint:
            gym.send([counting("a")])
            await gym.counted("environment", "waiting", 1)
            assert await gym.seen("counter", "/seed_session") == 0
            await gym.commit(checkpoint)
        results = await gym.finish()
        assert await gym.seen("counter", "/seed_session") == 1
    assert [call.turn for call in gym.calls("a")] == [0, 1]
    assert results["a"] == play(gym.tasks["a"]).result


@pytest.mark.behaviour("E32")
async def test_a_held_run_that_a_crash_ended_starts_from_its_input(tmp_path: Path) -> None:
    """The checkpoint counts it as a restart; its next attempt makes every call."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        async with gym.prepared() as checkpoint:
            gym.send([counting("a")])
            await gym.counted("environment", "waiting", 1)
            await gym.commit(checkpoint)
            await gym.hold("environment", "/run")
        assert checkpoint.continued == ()
        assert checkpoint.restarts == {EpisodeId("a"): "no_record"}
        await gym.crash()
        restored = await gym.installed()
        assert set(restored.restarts) == {EpisodeId("a")}
        gym.send([gym.tasks["a"]], {"a": 1})
        results = await gym.finish()
    assert [(call.turn, call.attempt) for call in gym.calls("a")] == [(0, 1), (1, 1)]
    assert results["a"] == play(gym.tasks["a"]).result
