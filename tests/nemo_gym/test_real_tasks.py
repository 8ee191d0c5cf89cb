"""Real tasks of the released servers, as real processes: checkpointed in mid-rollout, killed, restored, finished.

Sixteen rollouts each of Workplace Assistant, the session counter, blackjack and the weather (the last one played by an
environment server with agent sessions), all at once, from the servers' own example rows, through the framework's own
collector. One story is played once, and each test looks at a part of it:

1. All wait for the model behind their first tool call: a checkpoint is taken. Then they go on to their end: the twin.
2. Other rollouts are under way when every process is killed. A restore, and the 64 go on; so their results must be the
   twin's, though nothing of the first life is left.
3. The same once more, with the three resources servers started anew as ones that forget: the negative control.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.integrations.nemo_gym.collection import CheckpointedCollection
from tests.nemo_gym.deployment import Collection, Deployment, framework_loop, row_of, told
from tests.nemo_gym.scripted_model import plan_of

EACH = 16
STATEFUL = ("workplace", "counter", "blackjack")
TASKS = (*STATEFUL, "weather")
SERVERS = (
    "policy_model",
    *(f"{task}{part}" for task in STATEFUL for part in ("", "_agent", "_relay")),
    *("weather", "session_agent", "turn"),
)
LATE = range(1000, 1003)
"""Numbers of the rollouts that are under way at the kill and in no checkpoint."""

Told = Mapping[str, dict[str, Any]]


@dataclass
class Story:
    """What happened. held: rollout -> step of the model at which the checkpoint met it."""

    held: dict[str, int] = field(default_factory=dict)
    records: int = 0
    continued: set[str] = field(default_factory=set)
    killed_midway: dict[str, int] = field(default_factory=dict)
    twin: Told = field(default_factory=dict)
    restored: Told = field(default_factory=dict)
    asked_again: list[tuple[str, int]] = field(default_factory=list)
    started_over: Told = field(default_factory=dict)
    forgetful: Told = field(default_factory=dict)

    def of(self, task: str) -> list[str]:
        """The rollouts of a task that were at the cut."""
        return [rollout for rollout in self.held if rollout.startswith(f"{task}-")]


def cut_of(row: Mapping[str, Any]) -> int:
    """The step of the model at which a rollout is to be met: behind its first tool call, before its last."""
    asked = row.get("task_input", row)["responses_create_params"]
    plan = plan_of(asked["input"][-1]["content"])
    return 2 + row["_ng_task_index"] % (len(plan) - 1) if plan is not None else 2


def number_of(rollout: str) -> int:
    return int(rollout.rpartition("-")[2])


def task_of(rollout: str) -> str:
    return rollout.rpartition("-")[0]


async def first_life(deployment: Deployment, story: Story) -> None:
    """Checkpoint, go on to the end, and be killed with other rollouts under way."""
    async with deployment.collecting() as collecting:
        playing = await brought_to_the_cut(deployment, collecting, story)
        story.records = (await collecting.checkpoint(ready_within=60)).records
        await deployment.model.hold({})
        twin = {rollout: result for each in playing for rollout, result in (await each.ended()).items()}
        story.twin = {rollout: told(twin[rollout]) for rollout in story.held}

        rows = [row_of(task, number) for task in TASKS if task != "blackjack" for number in LATE]
        await deployment.model.hold({row["_ng_rollout_id"]: 2 for row in rows})
        late = Collection(deployment, rows).begin()
        story.killed_midway = await late.met()
        await deployment.crash()
        await late.drop()


async def brought_to_the_cut(
    deployment: Deployment, collecting: CheckpointedCollection, story: Story
) -> list[Collection]:
    """Sixteen of each. A hand of blackjack may end before its cut; then another one is dealt."""
    rows = {task: [row_of(task, number) for number in range(16 * EACH)] for task in TASKS}
    await deployment.model.hold({row["_ng_rollout_id"]: cut_of(row) for task in TASKS for row in rows[task]})
    batch = [row for task in TASKS for row in rows[task][:EACH]]
    playing, dealt = [], EACH
    while batch:
        collection = Collection(deployment, batch, through=collecting).begin()
        playing.append(collection)
        story.held |= await collection.met()
        missing = EACH - len(story.of("blackjack"))
        batch, dealt = rows["blackjack"][dealt : dealt + missing], dealt + missing
    return playing


async def restored_life(deployment: Deployment, story: Story, *servers: str) -> Told:
    """A new trainer and new processes, of all servers or of these: restore, and send the rows as at first."""
    await deployment.start(*servers)
    async with deployment.collecting() as collecting:
        async with collecting.restoring("latest") as restored:
            story.continued = {str(episode) for episode in restored.continued}
        rows = [row_of(task, number_of(rollout)) for task in TASKS for rollout in story.of(task)]
        results = await Collection(deployment, rows, through=collecting).begin().ended()
    return {rollout: told(result) for rollout, result in results.items()}


async def play(directory: Path) -> Story:
    story = Story()
    async with Deployment(directory, SERVERS) as deployment:
        await first_life(deployment, story)

        story.restored = await restored_life(deployment, story)
        story.asked_again = await deployment.model.so_far()
        rows = [row_of(task_of(rollout), number_of(rollout)) for rollout in story.killed_midway]
        over = await Collection(deployment, rows).begin().ended()
        story.started_over = {rollout: told(result) for rollout, result in over.items()}

        for task in STATEFUL:
            await deployment.supervisor.kill(task)
        deployment.settings = {task: {"hooks": "forgetful:Forgetful"} for task in STATEFUL}
        story.forgetful = await restored_life(deployment, story, *STATEFUL)
    return story


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with framework_loop() as runner:
        yield runner.run(play(tmp_path_factory.mktemp("real")))


pytestmark = [
    pytest.mark.timeout(500),  # the story: two starts of fifteen processes, and one of three
    pytest.mark.filterwarnings("ignore:.* rows routed via their baked-in agent_ref:DeprecationWarning"),
]


def test_the_checkpoint_met_64_rollouts_behind_their_first_tool_call(story: Story) -> None:
    """None was before its first tool call or at its end, and none has to start over."""
    assert {task: len(story.of(task)) for task in TASKS} == dict.fromkeys(TASKS, EACH)
    assert min(story.held.values()) == 2
    assert max(story.held.values()) > 2
    assert story.continued == {f"{rollout}-a1" for rollout in story.held}
    assert story.records >= 2 * len(story.held)  # a run and a session of each, at least


@pytest.mark.parametrize("task", TASKS)
def test_restored_rollouts_end_as_their_twins(story: Story, task: str) -> None:
    """Same tool results, same rewards, same ends: what was killed goes on from what it was."""
    for rollout in story.of(task):
        assert story.restored[rollout] == story.twin[rollout], rollout


@pytest.mark.parametrize("task", ["workplace", "counter", "weather"])
def test_the_twin_solves_its_tasks(story: Story, task: str) -> None:
    """The script follows the ground truth, so that a lost tool call would be seen in the reward of the counter."""
    assert {story.twin[rollout]["reward"] for rollout in story.of(task)} == {1.0}


def test_nothing_before_the_cut_was_asked_again(story: Story) -> None:
    """Recorded replies of the model are used: after the restore it hears of no step before the cut."""
    first: dict[str, int] = {}
    for rollout, step in story.asked_again:
        first.setdefault(rollout, step)
    assert first == story.held


def test_rollouts_begun_after_the_checkpoint_start_over(story: Story) -> None:
    """They were killed in their second step, are in no checkpoint, and run from their input under the same attempt."""
    assert len(story.killed_midway) == 9
    assert {each["reward"] for each in story.started_over.values()} == {1.0}
    assert story.started_over.keys() == story.killed_midway.keys()


@pytest.mark.parametrize("task", STATEFUL)
def test_without_the_restored_state_results_differ(story: Story, task: str) -> None:
    """Negative control: with resources servers that put nothing back, every single rollout is told something else."""
    for rollout in story.of(task):
        assert story.forgetful[rollout] != story.twin[rollout], rollout
        assert lost(task, story.forgetful[rollout]), story.forgetful[rollout]


def test_the_control_differs_by_nothing_else(story: Story) -> None:
    """Where the state came back, the same restore gives the twin's results again."""
    for rollout in story.of("weather"):
        assert story.forgetful[rollout] == story.twin[rollout], rollout


def lost(task: str, heard: Mapping[str, Any]) -> bool:
    """Whether a rollout ended as one does whose session is unknown to its server."""
    if task == "workplace":
        return "Session not initialized" in heard["heard"][-1]
    if task == "counter":
        return bool(heard["reward"] == 0.0)
    # A stand is played with a hand of no cards, which is invented; a hit fails.
    return bool(heard["_ng_failure_class"] == "agent_run_error" or heard["info"]["player"] == "[]")
