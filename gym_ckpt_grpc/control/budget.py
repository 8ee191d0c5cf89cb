"""Time left for one call, on the local monotonic clock. Source: protocol section 4, participants section 2."""

from __future__ import annotations

import time
from collections.abc import Callable

from gym_ckpt_grpc.protocol.errors import OutOfTime

Clock = Callable[[], float]
"""Seconds of a monotonic clock."""

MAX_DEADLINE = 3600.0
"""Seconds to which a longer deadline is clamped."""
MAX_MARGIN = 1.0
MIN_MARGIN = 0.05
"""Seconds that a typed answer needs on a busy machine; a short call gives up to half of its time for it."""


def margin_of(seconds: float) -> float:
    """What a call of so many seconds keeps for its answer: a tenth, within MIN_MARGIN and MAX_MARGIN."""
    return min(max(seconds / 10, min(MIN_MARGIN, seconds / 2)), MAX_MARGIN)


class Budget:
    """What is left of a call's time, less a margin in which the typed answer still reaches the caller.

    The margin is that of `margin_of`.
    """

    __slots__ = ("_clock", "_ends")

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        seconds = min(seconds, MAX_DEADLINE)
        self._clock = clock
        self._ends = clock() + seconds - margin_of(seconds)

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._ends - self._clock())

    def require(self, step: str) -> float:
        """Seconds left for a step that is about to begin; raises OutOfTime naming it if none are."""
        left = self.left()
        if left <= 0:
            raise OutOfTime(f"no time was left to begin {step}")
        return left
