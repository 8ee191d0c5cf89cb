"""Marks of retired attempts, and stopping the work of many episodes side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.control.budget import Budget, Clock
from gym_ckpt_grpc.control.error_details import unexpected
from gym_ckpt_grpc.control.ports import StateOwner
from gym_ckpt_grpc.control.tasks import TaskOwner
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.fences import Marks
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import Blocker, BlockerReason

RETIRE_LIMIT = 3600.0
"""Seconds an episode's stop may take once begun; its call may end long before, and a retry joins it."""

Stops = Mapping[EpisodeId, asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class _Stopping:
    """One episode that is being stopped, or whose stop failed; since: when it began."""

    task: asyncio.Task[None]
    since: float


class Retirement:
    """Raises marks, stops episodes, and knows which are not freed yet. Implements MarkView.

    freed: called when an episode has been freed, since a Prepare may have waited for that.
    """

    def __init__(self, tasks: TaskOwner, clock: Clock, freed: Callable[[], None]) -> None:
        self._tasks = tasks
        self._clock = clock
        self._freed = freed
        self._marks = Marks()
        self._raised_at: dict[str, float] = {}
        self._unfreed: dict[EpisodeId, _Stopping] = {}

    def refuses(self, episode: EpisodeId) -> bool:
        return self._marks.refuses(episode)

    def being_retired(self, episode: EpisodeId) -> bool:
        return any(
            marked.rollout_id == episode.rollout_id and episode.attempt <= marked.attempt for marked in self._unfreed
        )

    @property
    def marks(self) -> tuple[EpisodeId, ...]:
        return tuple(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def all_freed(self) -> bool:
        """Whether no retired episode holds anything."""
        return not self._unfreed

    def blockers(self) -> list[Blocker]:
        """Retired episodes that still hold something, oldest first."""
        now = self._clock()
        return [Blocker(BlockerReason.RETIRING, now - stop.since, episode=e) for e, stop in self._unfreed.items()]

    def oldest_age(self) -> float | None:
        """Seconds since the oldest mark was raised, or None without marks."""
        return self._clock() - min(self._raised_at.values()) if self._raised_at else None

    def raise_marks(self, episodes: Sequence[EpisodeId]) -> None:
        """Refuse all of them, before anything is stopped."""
        for episode in episodes:
            self._marks.raise_to(episode)
            self._raised_at.setdefault(episode.rollout_id, self._clock())

    def begin(self, owner: StateOwner, episodes: Sequence[EpisodeId], *, after: asyncio.Task[Any] | None) -> Stops:
        """Stop all side by side, each once `after` has ended; from here on none counts as freed.

        A stop under way is joined, never begun twice; one that failed is begun again.
        """
        running = {}
        for episode in episodes:
            known = self._unfreed.get(episode)
            if known is None or known.task.done():
                task = self._tasks.own(self._retire(owner, episode, after), f"retire {episode}")
                known = _Stopping(task, known.since if known else self._clock())
                self._unfreed[episode] = known
            running[episode] = known.task
        return running

    async def _retire(self, owner: StateOwner, episode: EpisodeId, after: asyncio.Task[Any] | None) -> None:
        if after is not None:
            await asyncio.wait({after})
        try:
            await owner.retire(episode, Budget(RETIRE_LIMIT, self._clock))
        except Exception as error:
            raise error if isinstance(error, ControlError) else unexpected(error, f"retiring {episode}") from error
        self._unfreed.pop(episode, None)
        # Earlier attempts were freed with it; one whose own stop failed would count as held for ever.
        for earlier in self.holders(episode.rollout_id, episode.attempt):
            if self._unfreed[earlier].task.done():
                del self._unfreed[earlier]
        self._freed()

    async def outcomes(self, stops: Stops, budget: Budget) -> list[tuple[EpisodeId, str | None]]:
        """Wait within the budget; per episode None, or why it is incomplete."""
        await asyncio.wait(stops.values(), timeout=budget.left())
        return [(episode, _outcome(task)) for episode, task in stops.items()]

    def holders(self, rollout_id: str, through_attempt: int) -> list[EpisodeId]:
        """Retired attempts of a rollout, up to one, that still hold something."""
        return [e for e in self._unfreed if e.rollout_id == rollout_id and e.attempt <= through_attempt]

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        if self._marks.forget(rollout_id, through_attempt):
            self._raised_at.pop(rollout_id, None)


def _outcome(task: asyncio.Task[None]) -> str | None:
    if not task.done():
        return "it had not ended in time; it is still being stopped"
    if task.cancelled():
        return "stopping it was cancelled"
    error = task.exception()
    return error.message if isinstance(error, ControlError) else None if error is None else "stopping it failed"
