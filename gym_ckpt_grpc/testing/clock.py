"""A monotonic clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """Give it as `clock=` to a control plane, an owner or a settings object. Seconds; starts at 1000."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on by so many seconds, and give the new time. A monotonic clock never goes back: ValueError."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self.now += seconds
        return self.now
