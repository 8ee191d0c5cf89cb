"""The gauges of one participant.

They are asked for on an exporter's thread while the loop changes what they tell of. So what has to be looked up is
looked up on the loop, once per collection, as one value that never changes; what grows with time is kept as the
moment it began, so that ages go on where the loop hangs. A loop that does not answer gets no second question, and the
last values stand.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.watchdog import TaskKind
from gym_ckpt_grpc.protocol.phases import PHASES
from gym_ckpt_grpc.telemetry import Reading, catalogue
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import Instrument

FRESH = 0.2
"""Seconds for which a snapshot serves another thread: all gauges of one collection are asked for one by one."""
PATIENCE = 0.1
"""Seconds that another thread waits for the loop."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the loop saw. *_since: on the control plane's clock."""

    marks: int = 0
    mark_since: float | None = None
    blockers: int = 0
    blocker_since: float | None = None
    pending: int = 0
    owners: Mapping[Instrument, float] = field(default_factory=dict)


class Gauges:
    """Implements GaugeSource. Made inside the running loop; it has nothing to show once the control plane closes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._seen = _Snapshot()
        self._seen_at = float("-inf")
        self._asked: threading.Event | None = None

    def readings(self) -> Iterable[Reading]:
        """What each gauge shows now. On any thread; waits PATIENCE at most."""
        core = self._core
        if core.closing or self._loop.is_closed():
            return
        identity = core.identity
        place = {at.PARTICIPANT_KIND: identity.kind.value, at.SERVICE: identity.service}
        seen, now = self._snapshot(), core.clock()
        # These are single reads of values that the loop replaces as a whole.
        phase, current, work = core.machine.phase, core.machine.open, core.work
        for each in PHASES:
            yield catalogue.PHASE, int(each is phase), {**place, at.PHASE: each.name}
        yield catalogue.CLOSED_SECONDS, now - work.closed_at if work else 0, place
        if current is not None:
            yield catalogue.LEASE_REMAINING, current.lease.remaining(now), place
        yield catalogue.MARKS_HELD, seen.marks, place
        yield catalogue.OLDEST_MARK_AGE, _age(now, seen.mark_since), place
        yield catalogue.BLOCKERS, seen.blockers, place
        yield catalogue.OLDEST_BLOCKER_AGE, _age(now, seen.blocker_since), place
        yield catalogue.RESTORED_PENDING, seen.pending, place
        begun = core.watchdog.begun_at()
        for kind in TaskKind:
            yield catalogue.OLDEST_TASK_AGE, _age(now, begun.get(kind)), {**place, at.TASK: kind.value}
        yield catalogue.LOOP_LAG, 1000 * core.watchdog.longest_lag, place
        for instrument, value in seen.owners.items():
            yield instrument, value, place

    def _snapshot(self) -> _Snapshot:
        if threading.get_ident() == self._thread:
            self._look()
        elif self._asked is None and time.monotonic() - self._seen_at > FRESH:
            asked = self._asked = threading.Event()
            try:
                self._loop.call_soon_threadsafe(self._answer, asked)
            except RuntimeError:  # the loop was closed in between
                return self._seen
            asked.wait(PATIENCE)
        return self._seen

    def _answer(self, asked: threading.Event) -> None:
        self._asked = None
        with contextlib.suppress(Exception):
            self._look()
        asked.set()

    def _look(self) -> None:
        """Take a snapshot. On the loop."""
        core, now = self._core, self._core.clock()
        if core.closing:
            return
        report, marked = core.report(), core.retirement.oldest_age()
        ages = [blocker.age for blocker in report.blockers]
        owners: Mapping[Instrument, float] = {}
        with contextlib.suppress(Exception):
            owners = dict(core.owner.gauges())
        self._seen = _Snapshot(
            marks=len(core.retirement),
            mark_since=None if marked is None else now - marked,
            blockers=report.blocker_count,
            blocker_since=now - max(ages) if ages else None,
            pending=len(core.owner.restored_pending()),
            owners=owners,
        )
        self._seen_at = time.monotonic()


def _age(now: float, since: float | None) -> float:
    return 0.0 if since is None else max(0.0, now - since)
