"""What the backends say of themselves and of restored cuts: asked at a Restore, and again until all have answered.

Source: participants sections 7.2 and 8.4.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from gym_ckpt_grpc.control.budget import MAX_DEADLINE, Budget
from gym_ckpt_grpc.control.generation import BackendInfo, GenerationBackends
from gym_ckpt_grpc.control.tasks import TaskOwner
from gym_ckpt_grpc.participants.blocking import Clock
from gym_ckpt_grpc.participants.restored_cuts import RestoredCut, RestoredCuts
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry.propagation import leave_trace

T = TypeVar("T")
log = logging.getLogger("gym_ckpt_grpc.participants")

FIRST_BACKOFF, LAST_BACKOFF = 0.1, 30.0
"""Seconds between two tries to ask a backend."""
CALL_LIMIT = 10.0
"""Seconds that one question may take; a look has one for each batch."""
LOOK_SHARE = 0.5
"""Part of what is left of a Restore that a look may take."""
OPENING_LIMIT = 0.5
"""Seconds that an opening waits for fresh answers at most."""
BATCH = 256
"""Cuts that one call asks about at most: a backend reads the tokens of each, and what it has said is kept."""


class BackendLooks:
    """Asks every backend who it is and which of the restored cuts it has.

    missing: counts cuts that no backend had any more; lost: told of each. cuts: those that are offered. sleep: waits so
    many seconds.
    """

    def __init__(
        self,
        backends: GenerationBackends,
        cuts: RestoredCuts,
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        lost: Callable[[EpisodeId, RestoredCut], None] = lambda episode, cut: None,
    ) -> None:
        self.missing = 0
        self._lost = lost
        self._backends = backends
        self._cuts = cuts
        self._clock = clock
        self._sleep = sleep
        self._tasks = TaskOwner()
        self._known: dict[str, BackendInfo] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def known(self, backend: str) -> BackendInfo | None:
        """What a backend last said of itself; None if it never answered."""
        return self._known.get(backend)

    async def ask_all(self, cuts: list[RestoredCut], budget: Budget) -> None:
        """Ask all backends about cuts, side by side, within a share of the budget.

        One that cannot be asked is logged; `look` asks it again when admission opens.
        """
        limit = Budget(budget.left() * LOOK_SHARE, self._clock)
        await asyncio.gather(*(self._ask_logged(name, cuts, limit) for name in self._backends))

    async def _ask_logged(self, name: str, cuts: Iterable[RestoredCut], budget: Budget) -> bool:
        try:
            await self._ask(name, cuts, budget)
        except Exception as error:
            log.warning("backend %s could not be asked about restored cuts: %r", name, error)
            return False
        return True

    async def _ask(self, name: str, cuts: Iterable[RestoredCut], budget: Budget) -> None:
        """Its own cuts first: calls go back to the backend that they came from."""
        backend = self._backends[name]
        self._known[name] = await self._answer(backend.describe, budget)
        unknown = [cut for cut in cuts if name not in cut.presence]
        unknown.sort(key=lambda cut: cut.record.backend != name)
        for start in range(0, len(unknown), BATCH):
            batch = unknown[start : start + BATCH]
            found = await self._answer(partial(backend.check, [cut.record.evidence for cut in batch]), budget)
            for cut, presence in zip(batch, found, strict=True):
                cut.presence[name] = presence

    async def _answer(self, question: Callable[[Budget], Awaitable[T]], budget: Budget) -> T:
        limit = Budget(min(CALL_LIMIT, budget.left()), self._clock)
        async with asyncio.timeout(limit.left()):
            return await question(limit)

    # ---- later

    def look(self) -> list[asyncio.Task[None]]:
        """Ask again in the background, until each backend has answered; the looks under way."""
        for name in self._backends:
            if name not in self._running:
                self._running[name] = self._tasks.own(self._look(name), f"look at backend {name}")
        return list(self._running.values())

    async def look_before_opening(self) -> None:
        """Learn what was not answered yet, and the weights in use now, from backends that answer at once."""
        if len(self._cuts) and (running := self.look()):
            await asyncio.wait(running, timeout=OPENING_LIMIT)

    async def _look(self, name: str) -> None:
        backoff = FIRST_BACKOFF
        try:
            while len(self._cuts) and not await self._ask_logged(name, self._cuts, Budget(MAX_DEADLINE, self._clock)):
                leave_trace()
                await self._sleep(backoff * random.uniform(0.8, 1.2))
                backoff = min(backoff * 2, LAST_BACKOFF)
        finally:
            del self._running[name]
        self.drop_lost()

    def drop_lost(self) -> None:
        """Forget cuts that no backend has, and count them."""
        lost = self._cuts.drop_lost(self._backends)
        self.missing += len(lost)
        if lost:
            log.warning("%d restored cuts are gone from all backends; their calls are generated anew", len(lost))
        for episode, cut in lost:
            self._lost(episode, cut)

    async def close(self) -> None:
        """End what runs. Only at the end of the process."""
        await self._tasks.close()
