"""Seeds in progress: counted from before any state is built until the session is registered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.participants.admission import Admission, wait_for
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.reports import covers
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason


class Seed(AbstractContextManager["Seed"]):
    """One seed in progress. It counts from its making; leaving the block ends it, safe against cancellation."""

    def __init__(self, owner: Seeds, token: tuple[str, int], episode: EpisodeId) -> None:
        self.episode = episode
        self.token = token
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner

    def __exit__(self, *_: object) -> None:
        self._owner.end(self)


class Seeds:
    """The seeds of one server; each blocks, also when several seed one session."""

    def __init__(self, admission: Admission, blocking: Blocking) -> None:
        self._admission = admission
        self._blocking = blocking
        self._numbers = count()
        self._by_rollout: dict[str, dict[tuple[str, int], Seed]] = {}
        self._building: dict[str, asyncio.Future[None]] = {}

    def begin(self, episode: EpisodeId, key: str, place: str) -> Seed:
        """Count a seed. key: the session it seeds."""
        seed = Seed(self, ("seed", next(self._numbers)), episode)
        self._by_rollout.setdefault(episode.rollout_id, {})[seed.token] = seed
        self._blocking.set(seed.token, BlockerReason.IN_FLIGHT_REQUEST, episode, place)
        self._admission.changed()
        return seed

    def end(self, seed: Seed) -> None:
        """Count it no more."""
        of_rollout = self._by_rollout.get(seed.episode.rollout_id, {})
        of_rollout.pop(seed.token, None)
        if not of_rollout:
            self._by_rollout.pop(seed.episode.rollout_id, None)
        self._blocking.clear(seed.token)
        if not seed.ended.done():
            seed.ended.set_result(None)
        self._admission.changed()

    def of_rollout(self, rollout_id: str) -> list[Seed]:
        """Seeds in progress of a rollout, any attempt."""
        return list(self._by_rollout.get(rollout_id, {}).values())

    async def wait(self, retired: EpisodeId, budget: Budget) -> None:
        """Wait for the seeds that a retire covers. Raises OutOfTime."""
        for seed in self.of_rollout(retired.rollout_id):
            if covers(retired, seed.episode):
                await wait_for(seed.ended, budget, f"the seed of {seed.episode}")

    def building(self, key: str) -> asyncio.Future[None] | None:
        """Done when the seed that builds this session now has ended; None if none does."""
        return self._building.get(key)

    @contextmanager
    def build(self, key: str) -> Iterator[None]:
        """Build a session; others that seed it wait."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._building[key] = done
        try:
            yield
        finally:
            del self._building[key]
            done.set_result(None)
