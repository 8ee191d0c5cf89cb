"""Running an episode's protocol to its end, with its cleanup, its deadline and the retire that may stop it.

Shared by environments and legacy agents. Source: participants sections 5 and 6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from gym_ckpt_grpc.participants.episode_context import CLEANUP_LIMIT, EpisodeContext
from gym_ckpt_grpc.participants.steps import EpisodeDeadline, Live, StepTracker
from gym_ckpt_grpc.protocol.errors import StaleAttempt

T = TypeVar("T")
C = TypeVar("C", bound=EpisodeContext)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """episode: seconds an episode may take, parked time not counted, or None. cleanup: seconds for all its cleanup."""

    episode: float | None = None
    cleanup: float = CLEANUP_LIMIT


async def run_episode(
    steps: StepTracker, live: Live, context: C, protocol: Callable[[C], Awaitable[T]], limits: EpisodeLimits
) -> T:
    """Run a protocol that `live` tracks, and track it no more when this ends.

    Raises what the protocol raises, TimeoutError past the limit; whatever a retired episode ends with, its caller
    hears StaleAttempt.
    """
    stale = StaleAttempt(f"attempt {live.episode} was retired", episodes=[live.episode])
    try:
        result = await _with_cleanup(steps, live, context, protocol, limits)
    except BaseException as error:
        ours = live.runs.absorb()
        if live.retired and (ours or isinstance(error, Exception)):
            raise stale from error
        raise
    finally:
        steps.end(live)
    if live.retired:
        live.runs.absorb()
        raise stale
    return result


async def _with_cleanup(
    steps: StepTracker, live: Live, context: C, protocol: Callable[[C], Awaitable[T]], limits: EpisodeLimits
) -> T:
    """Run the protocol and its cleanup. What ends while closed, out of a replay step, is told after it."""
    try:
        try:
            async with asyncio.timeout(limits.episode) as scope:
                live.deadline = EpisodeDeadline(scope)
                result = await protocol(context)
        finally:
            steps.finish(live, cleans=context.has_cleanup)
            await context.run_cleanup(limits.cleanup)
    except Exception:
        await steps.hold_end(live)
        raise
    await steps.hold_end(live)
    return result
