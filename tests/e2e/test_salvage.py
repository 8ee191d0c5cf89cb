"""What `gym-ckpt salvage` saved of a damaged checkpoint of real servers restores into real servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.minigym.trainer import Result
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot
from tests.e2e.processes import run
from tests.e2e.rig import rig
from tests.golden.make import read_expected
from tests.golden.scenes import FORMATS, HELD_AFTER, HELD_TURN, scenes
from tests.storage.damaged import flip, flip_payload, only

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]

AGENT = (ParticipantKind.AGENT, "agent", "0")


@pytest.mark.behaviour("C184")
@pytest.mark.parametrize("scene", ["native", "legacy"])
@pytest.mark.parametrize("damage", ["a record", "a record and checkpoint.json"])
async def test_the_rollouts_that_are_left_continue_to_the_same_results(scene: str, damage: str, tmp_path: Path) -> None:
    """One rollout's record at the agent is damaged: it starts over, the others give what they gave uninterrupted."""
    fixture, lost = FORMATS[-1] / scene, EpisodeId("1-0")
    source, new = tmp_path / "damaged", tmp_path / "new"
    shutil.copytree(fixture / "root", source)
    checkpoint_id = CheckpointRoot(str(source)).find().manifest.checkpoint_id
    flip_payload(CheckpointRoot(str(source)), checkpoint_id, AGENT, lost)
    if damage != "a record":
        flip(only(source, f"checkpoints/{checkpoint_id}/checkpoint.json"))
    told = run("salvage", "--root", str(source), "--to", str(new), "--json")
    assert told.returncode == 1, told.stderr
    assert [(each["participant"], each["episode"]) for each in json.loads(told.stdout)["lost"]] == [
        ("agent/agent/0", str(lost))
    ]
    expected = read_expected(fixture)
    async with rig(tmp_path / "gym", scenes()[scene].topology) as gym:
        for part, place in ((new, gym.plan.root), (fixture / "staged", gym.plan.staged)):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(part, place)
        gym.tasks = {rollout: Task(**each["task"]) for rollout, each in expected.items()}
        restored = await gym.restore()
        continued = {episode.rollout_id for episode in restored.continued}
        assert continued == expected.keys() - {lost.rollout_id}
        assert set(restored.restarts) == {lost}
        assert restored.restarts[lost].startswith("salvage: ")
        gym.send([gym.tasks[lost.rollout_id]], {lost.rollout_id: lost.attempt + 1})
        results = await gym.finish()
        for rollout in continued:
            first, *_ = gym.calls(rollout)
            assert (first.attempt, first.turn, first.reused) == (1, HELD_TURN, HELD_AFTER)
        again, *_ = gym.calls(lost.rollout_id)
        assert (again.turn, again.reused) == (0, 0), "it starts over from its input"
    assert {rollout: results[rollout] for rollout in continued} == {
        rollout: Result.from_reply(expected[rollout]["result"]) for rollout in continued
    }
    assert lost.rollout_id in results
