"""The lease of an open checkpoint, counted on one monotonic clock that the caller passes in.

Rule (protocol section 4): counted from the end of the last accepted call; a call under way holds it; never
shortened.
"""

from __future__ import annotations

import math

DEFAULT_LEASE_TTL = 30.0
MAX_LEASE_TTL = 600.0


class Lease:
    """One lease of `ttl` seconds. All `now` values are seconds of the same monotonic clock."""

    __slots__ = ("_deadline", "_holders", "ttl")

    def __init__(self, ttl: float, now: float) -> None:
        self.ttl = min(ttl, MAX_LEASE_TTL)
        self._deadline = now + self.ttl
        self._holders = 0

    def extend(self, now: float) -> None:
        self._deadline = max(self._deadline, now + self.ttl)

    def hold(self) -> None:
        """A call began; until its `release` the lease cannot end."""
        self._holders += 1

    def release(self, now: float) -> None:
        """A call ended, or its connection broke: the lease counts from here."""
        self._holders -= 1
        self.extend(now)

    def remaining(self, now: float) -> float:
        """Seconds left; the whole ttl while a call holds it."""
        return self.ttl if self._holders else max(0.0, self._deadline - now)

    def expired(self, now: float) -> bool:
        return self._holders == 0 and now >= self._deadline

    def wake_at(self) -> float:
        """When to look again: infinity while held."""
        return math.inf if self._holders else self._deadline
