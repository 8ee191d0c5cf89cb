"""The data set: legal ids, stable seeds, and a length that makes rollouts of 6 to 10 model calls."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from gym_ckpt_grpc.minigym.blackjack import BlackjackSession
from gym_ckpt_grpc.minigym.counter import MAX_BY
from gym_ckpt_grpc.minigym.generation import MAX_SEED
from gym_ckpt_grpc.minigym.tasks import Task, make_tasks
from gym_ckpt_grpc.protocol.ids import EpisodeId


def test_ids_are_legal_and_unique_and_seeds_differ() -> None:
    tasks = make_tasks(64, seed=7)
    assert [task.rollout_id for task in tasks[:5]] == ["0-0", "0-1", "1-0", "1-1", "2-0"]
    assert len({EpisodeId(task.rollout_id) for task in tasks}) == 64
    assert len({task.seed for task in tasks}) == 64
    assert all(0 <= task.seed <= MAX_SEED for task in tasks)


def test_kinds_alternate_by_task_and_rollouts_of_a_task_differ_in_their_sampling_only() -> None:
    tasks = make_tasks(12, seed=7, rollouts_per_task=3)
    assert [task.kind for task in tasks] == (["blackjack"] * 3 + ["counter"] * 3) * 2
    assert len({(task.prompt, task.turns, str(task.setup)) for task in tasks}) == 4


def test_a_list_depends_on_its_seed_and_begins_with_the_shorter_one() -> None:
    assert make_tasks(6, seed=1) == make_tasks(20, seed=1)[:6] != make_tasks(6, seed=2)
    assert make_tasks(0, seed=1) == []
    for count, group in ((-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be"):
            make_tasks(count, 1, rollouts_per_task=group)


def test_a_row_survives_json() -> None:
    task = make_tasks(3, seed=1)[2]
    assert Task(**json.loads(json.dumps(task.as_row()))) == task


def test_a_rollout_takes_6_to_10_model_calls() -> None:
    """Tool calls and the final answer; blackjack ends with its games or with its turns."""
    chance = random.Random(1)
    for task in make_tasks(200, seed=3):
        turns = task.turns
        if task.kind == "blackjack":
            session = BlackjackSession(seed=task.setup["seed"], games=task.setup["games"])
            while not session.done and session.steps < task.turns:
                session.step(chance.choice(["hit", "stand"]))
            turns = session.steps
        else:
            assert task.setup["target"] > turns * MAX_BY
        assert 6 <= turns + 1 <= 10


def test_only_blackjack_imports_gymnasium() -> None:
    modules = "counter engine generation inference_log inference_worker supervisor tasks".split(" ")
    code = "import sys, " + ", ".join(f"gym_ckpt_grpc.minigym.{name}" for name in modules)
    subprocess.run(
        [sys.executable, "-c", f"{code}\nassert not {{'gymnasium', 'numpy'}} & set(sys.modules)"],
        env={"PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
