"""One call of the framework's own `run_examples` that a crash of every server does not end.

The story is played once, by real processes; each test looks at a part of it. Five places, nine rows of the counter:

1. Rows 0 to 3 and 6 wait for the model behind their first tool call; 4 and 5 have ended. Row 3 is retired, and comes
   there again as its next attempt. A checkpoint is taken.
2. Row 6 ends, row 7 takes its place and waits too; row 8 waits for a place.
3. Every process is killed, and all start anew. Then a restore; all nine end.
4. Two more rows; only the relay is killed, and nothing is restored: they start over, while what ran is retired.
5. Two more, and a checkpoint; only the counter is killed, and is back before anybody has noticed: the agent lives on
   and calls it. Then a restore.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import CheckpointResult
from gym_ckpt_grpc.integrations.nemo_gym.collection import CheckpointedCollection
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.nemo_gym.deployment import Deployment, framework_loop, row_of, told

SERVERS = ("policy_model", "counter", "counter_agent", "counter_relay")
PLACES = 5
TASKS = 5
"""Example rows of the counter: row 5 is row 0 again, under another id."""
WAITS = (0, 1, 2, 3, 6, 7)

pytestmark = [pytest.mark.timeout(240), pytest.mark.e2e]  # the story: two starts of five processes


def name(number: int) -> str:
    return f"counter-{number}"


@dataclass
class Story:
    """What happened. rows: as they were given to the framework; got: (row, result) as they came back."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)
    got: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    in_flight: set[str] = field(default_factory=set)
    checkpoint: CheckpointResult | None = None
    lost: set[str] = field(default_factory=set)
    before_restore: list[tuple[str, int]] = field(default_factory=list)
    installed: set[str] = field(default_factory=set)
    after_restore: list[tuple[str, int]] = field(default_factory=list)
    left: tuple[EpisodeId, ...] = ()
    right: list[dict[str, Any]] = field(default_factory=list)
    started_over: dict[str, dict[str, Any]] = field(default_factory=dict)
    over_as: set[str] = field(default_factory=set)
    last: CheckpointResult | None = None
    behind_counter: set[str] = field(default_factory=set)
    continued_alone: dict[str, dict[str, Any]] = field(default_factory=dict)

    def wrong(self, results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The results that are not those of rows that ran alone."""
        tasks = len(self.right)
        return {key: each for key, each in results.items() if each != self.right[int(key.split("-")[1]) % tasks]}


def results_of(got: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {row["_ng_rollout_id"]: told(result) for row, result in got}


class Play:
    def __init__(self, deployment: Deployment, collection: CheckpointedCollection, story: Story) -> None:
        self.deployment, self.model, self.collection, self.story = deployment, deployment.model, collection, story
        self.collecting: asyncio.Task[Any]

    async def collect(self, rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Through the framework; as any user of it does."""
        helper = self.collection.helper()
        futures = helper.run_examples(rows, semaphore=self.collection.gate, route_failures_to_sidecar=True)
        return [await future for future in futures]

    async def held(self, *numbers: int) -> None:
        """Wait until the model holds exactly these rows."""
        wanted = {name(number) for number in numbers}
        await self.until(lambda held: held.keys() == wanted)

    async def first_life(self) -> None:
        story = self.story
        await self.model.hold({name(number): 2 for number in WAITS})
        story.rows = [row_of("counter", number) for number in range(9)]
        story.given = [dict(row) for row in story.rows]
        self.collecting = asyncio.create_task(self.collect(story.rows))
        await self.held(0, 1, 2, 3, 6)
        await self.collection.coordinator.retire([EpisodeId(name(3))])
        await self.asked_again(name(3))
        story.in_flight = {str(episode) for episode in self.collection.in_flight}
        story.checkpoint = await self.collection.checkpoint(ready_within=60)
        await self.model.hold({name(number): 2 for number in WAITS if number != 6})
        await self.held(0, 1, 2, 3, 7)

    async def asked_again(self, rollout: str) -> None:
        """Wait until the model was asked twice for the second step of a rollout, and holds it."""
        await self.until(lambda held: self.model.asked.count((rollout, 2)) == 2 and rollout in held)

    async def until(self, met: Callable[[Mapping[str, int]], bool]) -> None:
        """Wait for what the model holds; a collection that ends before fails."""

        async def watch() -> None:
            async with contextlib.aclosing(self.model.changes()) as changes:
                async for held in changes:
                    if met(held):
                        return

        watching = asyncio.create_task(watch())
        await asyncio.wait({watching, self.collecting}, return_when=asyncio.FIRST_COMPLETED)
        if not watching.done():
            watching.cancel()
            raise AssertionError(f"it ended early: {self.collecting.result()}")
        watching.result()

    async def restored(self) -> None:
        story = self.story
        await self.deployment.crash()
        await self.collection.loss()
        await self.deployment.start()
        story.lost = self.lost()
        story.before_restore = await self.model.so_far()
        async with self.collection.restoring() as restored:
            story.installed = {str(episode) for episode in restored.continued}
        story.got = await self.collecting
        story.after_restore = await self.model.so_far()
        story.left = self.collection.in_flight

    async def without_restore(self) -> None:
        story = self.story
        await self.model.hold({name(20): 2, name(21): 2})
        self.collecting = asyncio.create_task(self.collect([row_of("counter", number) for number in (20, 21)]))
        await self.held(20, 21)
        await self.deployment.supervisor.kill("counter_relay")
        await self.collection.loss()
        await self.deployment.start("counter_relay")
        await self.model.hold({})
        story.over_as = {str(episode) for episode in await self.collection.restart()}
        story.started_over = results_of(await self.collecting)

    async def counter_alone(self) -> None:
        story = self.story
        await self.model.hold({name(40): 2, name(41): 2})
        self.collecting = asyncio.create_task(self.collect([row_of("counter", number) for number in (40, 41)]))
        await self.held(40, 41)
        await self.collection.checkpoint(ready_within=60)
        await self.deployment.supervisor.kill("counter")
        await self.deployment.start("counter")
        await self.model.hold({})  # their next tool calls go to a counter that knows nothing of them
        async with asyncio.timeout(60):
            # Both are lost; a row that ends has an answer from nothing, which the test then shows.
            while len(self.lost()) < 2 and not self.collecting.done():  # noqa: ASYNC110 - it is told by other processes
                await asyncio.sleep(0.01)
        story.behind_counter = self.lost()
        if not self.collecting.done():
            async with self.collection.restoring():
                pass
        story.continued_alone = results_of(await self.collecting)

    def lost(self) -> set[str]:
        return {str(episode) for episode in self.collection.dispatch.lost}

    async def whole(self) -> None:
        await self.first_life()
        await self.restored()
        alone = results_of(await self.collect([row_of("counter", number) for number in range(30, 30 + TASKS)]))
        self.story.right = [alone[name(number)] for number in range(30, 30 + TASKS)]
        await self.without_restore()
        self.story.last = await self.collection.checkpoint(ready_within=60)
        await self.counter_alone()


async def play(directory: Path) -> Story:
    story = Story()
    async with Deployment(directory, SERVERS) as deployment, deployment.coordinator() as coordinator:
        made = CheckpointedCollection(
            coordinator, server_client=deployment.client(), limit=PLACES, patience=120, max_restarts=1
        )
        async with made as collection:
            await Play(deployment, collection, story).whole()
    return story


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with framework_loop() as runner:
        yield runner.run(play(tmp_path_factory.mktemp("collection")))


def test_the_checkpoint_continues_what_was_dispatched(story: Story) -> None:
    assert story.checkpoint is not None
    assert story.in_flight == {"counter-0", "counter-1", "counter-2", "counter-3-a1", "counter-6"}
    assert (story.checkpoint.state.name, story.checkpoint.continued, story.checkpoint.restarts) == ("PUBLISHED", 5, 0)


def test_nothing_is_sent_to_servers_that_came_back_without_state(story: Story) -> None:
    """Not the lost attempts, and no fresh row either, though servers were up and a row was waiting for its place."""
    assert story.lost == {"counter-0", "counter-1", "counter-2", "counter-3-a1", "counter-7"}
    assert story.before_restore == []


def test_rows_go_on_as_the_attempts_that_were_installed(story: Story) -> None:
    assert story.installed == {"counter-0-a1", "counter-1-a1", "counter-2-a1", "counter-3-a2", "counter-6-a1"}
    first: dict[str, int] = {}
    for rollout, step in story.after_restore:
        first.setdefault(rollout, step)
    assert {first[name(number)] for number in (0, 1, 2, 3)} == {2}  # the first step is not asked for again
    assert first[name(7)] == first[name(8)] == 1  # after the checkpoint: from its input


def test_what_was_delivered_is_not_run_again(story: Story) -> None:
    """Rows 4 and 5 before the checkpoint; row 6 after it, so that its state was installed, and is retired again."""
    assert not {rollout for rollout, _ in story.after_restore} & {name(4), name(5), name(6)}
    assert story.left == ()
    assert story.last is not None
    assert (story.last.state.name, story.last.records, story.last.restarts) == ("PUBLISHED", 0, 0)


def test_every_row_ends_right_and_is_the_callers_own(story: Story) -> None:
    assert {id(row) for row, _ in story.got} == {id(row) for row in story.rows}
    assert story.rows == story.given
    assert len(story.got) == 9
    assert [each["reward"] for each in story.right] == [1.0] * TASKS
    assert len({each["heard"][-1] for each in story.right}) == TASKS
    assert story.wrong(results_of(story.got)) == {}


def test_without_a_restore_rows_start_over(story: Story) -> None:
    assert story.over_as == {"counter-20-a1", "counter-21-a1"}
    assert story.started_over.keys() == {"counter-20", "counter-21"}
    assert story.wrong(story.started_over) == {}


def test_a_server_that_dies_alone_gives_no_wrong_reward(story: Story) -> None:
    """It is back with no sessions, and an agent calls it in the name of one: the row is lost, and then continued."""
    assert story.behind_counter == {"counter-40", "counter-41"}
    assert story.continued_alone.keys() == {"counter-40", "counter-41"}
    assert story.wrong(story.continued_alone) == {}
