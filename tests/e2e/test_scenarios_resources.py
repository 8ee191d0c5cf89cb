"""Tools with state, crashed at every boundary in turn: the reward of an uninterrupted twin. Real processes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.tasks import Kind, Task, make_tasks
from gym_ckpt_grpc.minigym.topology import Topology
from tests.e2e.plays import play
from tests.e2e.rig import Rig, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

KINDS: tuple[Kind, ...] = ("blackjack", "office", "inbox")
TURNS = 2
"""Tool calls of each rollout: calls 0 to 2 of the model."""


def short_tasks() -> list[Task]:
    """A short rollout of each kind."""
    tasks = make_tasks(len(KINDS), seed=21, rollouts_per_task=1, kinds=KINDS)
    return [dataclasses.replace(task, turns=TURNS) for task in tasks]


async def crash_at(gym: Rig, tasks: list[Task], attempt: int, hold: str | int) -> None:
    """One life: go on from the newest checkpoint, stand at a boundary everywhere, checkpoint, crash.

    hold: a route at which every resources server holds, or a call of the model that is held before its first token.
    """
    await (gym.installed() if attempt else gym.start())
    for kind in KINDS:
        if isinstance(hold, str):
            await gym.hold(kind, hold)
    if isinstance(hold, int):
        await gym.hold_tokens(0, turn=hold)
    gym.send(tasks, {task.rollout_id: attempt for task in tasks})
    for task in tasks:
        if isinstance(hold, str):
            await gym.held(task.kind, hold)
        else:
            await gym.held_tokens(task.rollout_id)
    async with gym.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        if isinstance(hold, str):
            # In a wait step or a counted request: let go, it ends at the boundary behind it.
            await gym.prepare_while(checkpoint, lambda: asyncio.gather(*(gym.release(kind, hold) for kind in KINDS)))
        else:
            await checkpoint.prepare(ready_within=20)
        await gym.commit(checkpoint)
    assert {gym.boundary(task.rollout_id, checkpoint.id) for task in tasks} == {STANDS.get(hold, "invoke_agent")}
    await gym.crash()


STANDS: dict[str | int, str] = {"/seed_session": "seed", "/verify": "return"}
"""The environment's boundary after a hold."""


@pytest.mark.behaviour("E28")
async def test_crashed_at_every_boundary_in_turn(tmp_path: Path) -> None:
    """Blackjack, office and inbox: six lives, and what comes out is what one life gives."""
    tasks = short_tasks()
    topology = Topology(resources=KINDS, controls=True)
    async with rig(tmp_path, topology) as gym:
        holds = ["/seed_session", *range(TURNS + 1), "/verify"]
        for attempt, hold in enumerate(holds):
            await crash_at(gym, tasks, attempt, hold)
        await gym.restore()
        results = await gym.finish()
    for task in tasks:
        expected = play(task)
        assert results[task.rollout_id] == expected.result, task.kind
        # Held before its first token, each call was made once and then once more, never after its delivery.
        ended = [call.turn for call in gym.calls(task.rollout_id) if call.outcome == "end"]
        assert ended == list(range(len(expected.ids))), task.kind
