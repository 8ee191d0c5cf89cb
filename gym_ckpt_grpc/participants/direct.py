"""Servers with checkpointing off: the same calls as an owner's, run directly.

    owner = EnvironmentOwner() if checkpointing else None
    episodes = owner or DirectEnvironment()
    ...
    return await episodes.run(episode, task, protocol)

Nothing is tracked, counted, held or refused, and no boundary is kept; so a server's protocol and loop are written
once, and off costs nothing. A resources or policy model server has no such calls: it is served without its gate.
Source: participants section 1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from gym_ckpt_grpc.participants.admission import Admission, Cancellable
from gym_ckpt_grpc.participants.agent_runs import RunContext
from gym_ckpt_grpc.participants.agent_sessions import Session, SessionContext, run_key
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.episode_context import EpisodeContext
from gym_ckpt_grpc.participants.episode_runs import EpisodeLimits
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.steps import Live, StepMode, StepTracker
from gym_ckpt_grpc.protocol.ids import EpisodeId

T = TypeVar("T")
C = TypeVar("C", bound=EpisodeContext)


class _NoSteps(StepTracker):
    """A tracker that tracks nothing: every step is run, and nobody ever waits."""

    def __init__(self) -> None:
        super().__init__(Admission(), Blocking(time.monotonic))

    async def boundary(self, live: Live, state: Any) -> None:
        return None

    @asynccontextmanager
    async def step(self, live: Live, name: str, mode: StepMode | str = StepMode.WAIT) -> AsyncIterator[None]:
        StepMode(mode)
        yield

    async def mark_restart(self, live: Live) -> None:
        return None

    def enter_replay(self, live: Live, name: str) -> None:
        return None

    def leave_replay(self, live: Live) -> None:
        return None


def _untracked(episode: EpisodeId) -> Live:
    return Live(episode, episode, Cancellable(), asyncio.get_running_loop().create_future())


class DirectEnvironment:
    """`EnvironmentOwner.run` without checkpoints. limits: of an episode and of its cleanup."""

    def __init__(self, limits: EpisodeLimits | None = None, *, names: DataPlaneNames | None = None) -> None:
        self.names = names or DataPlaneNames()
        self._limits = limits or EpisodeLimits()
        self._steps = _NoSteps()

    async def run(
        self, episode: EpisodeId, task: Mapping[str, Any], protocol: Callable[[EpisodeContext], Awaitable[T]]
    ) -> T:
        """Run an episode from its start to its end, cleanup included. Raises what `protocol` raises, TimeoutError."""
        context = EpisodeContext(episode, task, None, _untracked(episode), self._steps, self.names)
        return await _run(context, protocol, self._limits)


class DirectAgent:
    """`seed`, `invoke`, `close_session` and `run` of an AgentOwner without checkpoints."""

    def __init__(self, limits: EpisodeLimits | None = None, *, names: DataPlaneNames | None = None) -> None:
        self.names = names or DataPlaneNames()
        self._limits = limits or EpisodeLimits()
        self._steps = _NoSteps()

    async def seed(self, episode: EpisodeId, key: str, body: Any, build: Callable[[], Awaitable[Any]]) -> Any:
        """Build a session, each time it is asked."""
        return await build()

    async def invoke(
        self,
        episode: EpisodeId,
        key: str,
        loop: Callable[[SessionContext, Any], Awaitable[Any]],
        *,
        index: str | None = None,
    ) -> Any:
        """Run one activation."""
        return await loop(SessionContext(Session(key, episode), _untracked(episode), self._steps), None)

    async def close_session(
        self, episode: EpisodeId, key: str, free: Callable[[], Awaitable[Any]] | None = None
    ) -> Any:
        """Free a session."""
        return await free() if free is not None else None

    async def run(
        self,
        episode: EpisodeId,
        task: Mapping[str, Any],
        protocol: Callable[[RunContext], Awaitable[T]],
        *,
        cookie_session_id: str | None = None,
    ) -> T:
        """Run a legacy episode from its start to its end."""
        session = Session(run_key(episode), episode, cookie_session_id=cookie_session_id)
        context = RunContext(session, task, None, _untracked(episode), self._steps, self.names, "")
        return await _run(context, protocol, self._limits)


async def _run(context: C, protocol: Callable[[C], Awaitable[T]], limits: EpisodeLimits) -> T:
    try:
        async with asyncio.timeout(limits.episode):
            return await protocol(context)
    finally:
        await context.run_cleanup(limits.cleanup)
