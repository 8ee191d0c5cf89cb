"""A step tracker with its admission, for tests of the episode-steps engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gym_ckpt_grpc.participants.admission import Admission
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.steps import Live, StepTracker
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.fakes import FakeClock, FakePort

Work = Callable[[Live], Awaitable[Any]]


class Rig:
    """A tracker with its admission, and episodes that run as tasks."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.admission = Admission(clock=self.clock)
        self.port = FakePort()
        self.admission.attach(self.port)
        self.blocking = Blocking(self.clock)
        self.steps = StepTracker(self.admission, self.blocking)
        self.lives: dict[EpisodeId, Live] = {}

    def close(self) -> None:
        self.admission.close()
        self.steps.close()

    def open(self) -> None:
        self.admission.open()
        self.steps.open()

    def start(self, episode: EpisodeId, work: Work, **options: Any) -> asyncio.Task[Any]:
        async def run() -> Any:
            live = self.lives[episode] = self.steps.begin(episode, episode, **options)
            try:
                return await work(live)
            finally:
                self.steps.end(live)

        return asyncio.create_task(run())

    def taken(self) -> dict[EpisodeId, Any]:
        """What a checkpoint would export."""
        return {live.episode: boundary for live, boundary in self.steps.exported()}

    def reasons(self) -> list[tuple[BlockerReason, str]]:
        return [(each.reason, each.place) for each in self.blocking.oldest(100)]


class Deadline:
    """A deadline that writes down what is asked of it."""

    def __init__(self) -> None:
        self.suspended = False

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False


async def forever(_: Live) -> None:
    await asyncio.Event().wait()
