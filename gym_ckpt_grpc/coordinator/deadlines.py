"""What is left of an operation's time, on the local monotonic clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gym_ckpt_grpc.protocol.errors import UsageError

Clock = Callable[[], float]
"""Seconds of a monotonic clock."""


def positive_seconds(name: str, seconds: float) -> float:
    """The value, if it is finite and positive; else raises UsageError naming it."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"{name} must be finite and above 0 seconds, not {seconds!r}")
    return float(seconds)


class Deadline:
    """A point on the monotonic clock, `seconds` from now."""

    __slots__ = ("_clock", "_ends")

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._ends = clock() + seconds

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._ends - self._clock())

    def within(self, seconds: float) -> Deadline:
        """The sooner of this deadline and `seconds` from now."""
        return Deadline(min(seconds, self.left()), self._clock)
