"""What is kept in memory per attempt, and dropped per rollout."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from gym_ckpt_grpc.protocol.ids import EpisodeId

T = TypeVar("T")


class Recent(Generic[T]):
    """Values of the attempts used last. limit: rollouts kept at most. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rollouts: OrderedDict[str, dict[int, T]] = OrderedDict()

    def get(self, episode: EpisodeId) -> T | None:
        """The value of an attempt, None if there is none any more."""
        return self._rollouts.get(episode.rollout_id, {}).get(episode.attempt)

    def put(self, episode: EpisodeId, value: T) -> None:
        """Keep a value; the rollout used longest ago goes where there are too many."""
        self._rollouts.setdefault(episode.rollout_id, {})[episode.attempt] = value
        self._rollouts.move_to_end(episode.rollout_id)
        if len(self._rollouts) > self._limit:
            self._rollouts.popitem(last=False)

    def drop(self, rollouts: Iterable[str]) -> None:
        """Drop all that is kept of these rollouts."""
        for rollout in rollouts:
            self._rollouts.pop(rollout, None)
