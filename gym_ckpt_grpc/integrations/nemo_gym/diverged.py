"""Attempts whose replay diverged: they are refused from then on, and their rollouts start over as a later attempt."""

from __future__ import annotations

from collections import OrderedDict

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId

KEPT = 4096
"""Rollouts that are remembered; the oldest go first."""


class DivergedAttempts:
    """What would otherwise begin from scratch under an id that other servers hold restored state for."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, str]] = OrderedDict()  # no exceptions: they keep whole episodes

    def check(self, episode: EpisodeId) -> None:
        """Raise what the replay of this attempt, or of a later one, ended with."""
        attempt, problem = self._failures.get(episode.rollout_id, (-1, ""))
        if episode.attempt <= attempt:
            raise StateCorrupt(problem, episodes=[episode])

    def add(self, episode: EpisodeId, failure: StateCorrupt) -> None:
        """Remember it."""
        self._failures[episode.rollout_id] = (episode.attempt, failure.message)
        self._failures.move_to_end(episode.rollout_id)
        if len(self._failures) > KEPT:
            self._failures.popitem(last=False)
