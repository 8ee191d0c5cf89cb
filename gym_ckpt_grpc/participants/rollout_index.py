"""`RolloutIndex`: what is remembered of rollouts until they are forgotten, found without a look at any other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from gym_ckpt_grpc.protocol.ids import EpisodeId

K = TypeVar("K", bound=Hashable)


class RolloutIndex(Generic[K]):
    """Keys by rollout, each with its attempt."""

    __slots__ = ("_attempts",)

    def __init__(self) -> None:
        self._attempts: dict[str, dict[K, int]] = {}

    def add(self, key: K, episode: EpisodeId) -> None:
        """Remember a key of an episode."""
        self._attempts.setdefault(episode.rollout_id, {})[key] = episode.attempt

    def drop(self, key: K, episode: EpisodeId) -> None:
        """Remember it no more; harmless if it was not."""
        of_rollout = self._attempts.get(episode.rollout_id, {})
        of_rollout.pop(key, None)
        if not of_rollout:
            self._attempts.pop(episode.rollout_id, None)

    def through(self, rollout_id: str, attempt: int) -> list[K]:
        """The keys of a rollout's attempts up to this one."""
        return [key for key, number in self._attempts.get(rollout_id, {}).items() if number <= attempt]
