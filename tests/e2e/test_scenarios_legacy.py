"""Agents that own the whole episode: a legacy `/run`, and the proof refinement agent. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.e2e.plays import counting, play, proving
from tests.e2e.rig import HELD_AFTER, Rig, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PROOF = Topology(protocol="proof", resources=("proofs",), controls=True)
LEGACY = Topology(protocol="legacy", resources=("counter",), controls=True)


@pytest.mark.behaviour("E4")
async def test_a_legacy_run_goes_on_from_its_last_boundary(tmp_path: Path) -> None:
    """Calls with 1 and 3 messages, a crash in the second, and after it one with 3 messages."""
    async with rig(tmp_path, LEGACY) as gym:
        await gym.start()
        await gym.held_at_call(counting("a"), turn=1)
        checkpoint = await gym.checkpoint()
        assert checkpoint.continued == (EpisodeId("a", 0),)
        await gym.crash()
        restored = await gym.restore()
        results = await gym.finish()
    assert restored.continued == (EpisodeId("a", 1),)
    assert [call.messages for call in gym.calls("a")] == [1, 3, 3]
    assert gym.calls("a")[-1].reused == HELD_AFTER
    assert results["a"] == play(gym.tasks["a"]).result


async def crash_at(gym: Rig, task: Task, attempt: int, step: str) -> None:
    """One life of a proof: go on from the newest checkpoint, stand at a step, checkpoint, crash."""
    await (gym.installed() if attempt else gym.start())
    held = "/seed_session" if step == "seed" else "/verify"
    if step == "model":
        await gym.hold_tokens(HELD_AFTER, turn=1)
    else:
        await gym.hold("proofs", held, outside=step == "seed")
    gym.send([task], {task.rollout_id: attempt})
    await (gym.held_tokens(task.rollout_id) if step == "model" else gym.held("proofs", held))
    async with gym.prepared() as checkpoint:
        if step == "return":
            await gym.release("proofs", held)
            await gym.counted("agent", "at_boundary", 1)
        await gym.commit(checkpoint)
    [record] = gym.records("agent", checkpoint.id).values()
    assert record.decode("protocol_boundary")["next"] == step
    await gym.crash()


@pytest.mark.behaviour("E29")
async def test_a_proof_crashed_at_every_step(tmp_path: Path) -> None:
    """At `seed`, `model`, `verify` and `return` in turn: the same proof, and no generation repeated."""
    task, expected = proving("a", tries=2)
    async with rig(tmp_path, PROOF) as gym:
        for attempt, step in enumerate(("seed", "model", "verify", "return")):
            await crash_at(gym, task, attempt, step)
        await gym.restore()
        results = await gym.finish()
    assert results["a"] == expected.result
    [first, cut, again] = gym.calls("a")
    assert (first.ids_digest, again.ids_digest) == tuple(expected.digests)
    assert (again.continued_from, again.reused) == (cut.call_id, HELD_AFTER)
    assert again.reused + again.tokens == expected.tokens[1]
