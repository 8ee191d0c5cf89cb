"""`EpisodeContext`: what an environment's protocol is given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.records import plain
from gym_ckpt_grpc.participants.steps import Live, StepMode, StepTracker
from gym_ckpt_grpc.protocol.ids import EpisodeId

CLEANUP_LIMIT = 60.0
"""Seconds for all of an episode's cleanup together."""

log = logging.getLogger(__name__)


class EpisodeContext:
    """One episode as its protocol sees it.

    episode, task: whose and what. restored: the boundary at which to continue, or None to start from the task; one
    that was RAW is bytes.
    """

    def __init__(
        self,
        episode: EpisodeId,
        task: Mapping[str, Any],
        restored: Any,
        live: Live,
        steps: StepTracker,
        names: DataPlaneNames,
    ) -> None:
        self.episode = episode
        self.task = task
        self.restored = plain(restored)
        self._live = live
        self._steps = steps
        self._names = names
        self._cleanups: list[Callable[[], Awaitable[object]]] = []

    @property
    def closing(self) -> asyncio.Event:
        """Set while a checkpoint waits; a long wait step may stop early on it."""
        return self._steps.closing

    async def boundary(self, state: Any) -> None:
        """Record where the episode is; while a checkpoint is open, wait here until it is over.

        state: JSON-able or `storage.raw` bytes and not changed afterwards, or a function that gives it as of now. It
        carries everything that the rest of the episode needs. Raises StaleAttempt if the attempt was retired.
        """
        await self._steps.boundary(self._live, state)

    def step(self, name: str, mode: StepMode | str = StepMode.WAIT) -> AbstractAsyncContextManager[None]:
        """Run a step: `wait` (may run once, a checkpoint waits for it) or `replay` (may run twice)."""
        return self._steps.step(self._live, name, mode)

    async def mark_restart(self) -> None:
        """Say that this episode cannot be captured: it neither blocks nor parks, and starts over after a crash."""
        await self._steps.mark_restart(self._live)

    async def seed_reply(self, headers: Mapping[str, str]) -> StepMode:
        """Take in the headers of a seed reply: gives the mode for `verify`; a restart header marks the episode."""
        if self._names.is_restart(headers):
            await self.mark_restart()
        return StepMode.REPLAY if self._names.is_replay(headers) else StepMode.WAIT

    def on_cleanup(self, cleanup: Callable[[], Awaitable[object]]) -> None:
        """Run this when the episode ends, however it does; the last registered runs first."""
        self._cleanups.append(cleanup)

    @property
    def has_cleanup(self) -> bool:
        """Whether there is anything to run when the episode ends."""
        return bool(self._cleanups)

    async def run_cleanup(self, limit: float) -> None:
        """Run all cleanup within `limit` seconds, to its end even if a cancel arrives; then let the cancel on."""
        if not self._cleanups:
            return
        running = asyncio.create_task(self._clean(limit), name=f"cleanup of {self.episode}")
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _clean(self, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                while self._cleanups:
                    await self._clean_one(self._cleanups.pop())
        except TimeoutError:
            log.warning("the cleanup of %s did not end within %g s", self.episode, limit)

    async def _clean_one(self, cleanup: Callable[[], Awaitable[object]]) -> None:
        try:
            await cleanup()
        except Exception:
            log.warning("a cleanup of %s failed", self.episode, exc_info=True)
