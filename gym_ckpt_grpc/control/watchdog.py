"""Ages of background work, and the lag of the event loop while something is open: a hang announces itself, once.

Work that outlives its calls has nobody who waits for it. It is entered here with its age; what grows too old is
logged with its stack. Source: telemetry section 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.control.budget import Clock
from gym_ckpt_grpc.control.settings import ControlSettings
from gym_ckpt_grpc.control.stacks import task_stack, thread_stack
from gym_ckpt_grpc.telemetry import Recorder, catalogue
from gym_ckpt_grpc.telemetry import attributes as at

log = logging.getLogger("gym_ckpt_grpc.control")
BEATS = 5
"""Looks at the loop's clock within `loop_lag_warn_seconds`: a lag is measured short by one of them at most."""
LEAST_BEAT = 0.01
"""Seconds between two looks, at least."""


class TaskKind(enum.StrEnum):
    """Kinds of background work. The value is the word in metrics."""

    EXPORT = "export"
    WRITE = "write"
    CLEANUP = "cleanup"
    INSTALL = "install"
    REOPEN = "reopen"


def _nothing() -> None:
    return None


@dataclass(slots=True, eq=False)
class Background:
    """One piece of background work. tasks: that do it. thread: that does it, 0 if none does.

    abandon: called if the process's control plane closes over it.
    """

    kind: TaskKind
    checkpoint_id: str
    since: float
    tasks: Sequence[asyncio.Task[Any]] = ()
    thread: int = 0
    abandon: Callable[[], None] = _nothing
    told: bool = False

    def stack(self) -> str:
        """Where it is now: the threads first, since a task that waits for one shows nothing."""
        running = [task for task in self.tasks if not task.done()]
        parts = [thread_stack(self.thread)] if self.thread else []
        if running:
            more = f"\n(and {len(running) - 1} more)" if len(running) > 1 else ""
            parts.append(f"task {running[0].get_name()}:\n{task_stack(running[0])}{more}")
        return "\n".join(parts) or "it waits for a thread"


class Watchdog:
    """Looks only while work is entered or a checkpoint is open; there is no timer otherwise.

    clock: the control plane's. longest_lag: seconds, of the checkpoint that is open or was the last.
    """

    def __init__(self, recorder: Recorder, clock: Clock, settings: ControlSettings) -> None:
        self.longest_lag = 0.0
        self._recorder = recorder
        self._clock = clock
        self._settings = settings
        # A dict, since adding, removing and copying its keys are each one step for every thread.
        self._entered: dict[Background, None] = {}
        self._open = ""
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    # Background work

    def enter(self, kind: TaskKind, checkpoint_id: str, tasks: Sequence[asyncio.Task[Any]] = ()) -> Background:
        """Background work begins. On the loop."""
        background = Background(kind, checkpoint_id, self._clock(), tasks)
        self._entered[background] = None
        self._schedule()
        return background

    def leave(self, background: Background) -> bool:
        """It has ended; whether this is the first to say so. On any thread."""
        return self._entered.pop(background, self) is None

    @contextlib.contextmanager
    def running(self, kind: TaskKind, checkpoint_id: str) -> Iterator[None]:
        """Work of the running task."""
        task = asyncio.current_task()
        background = self.enter(kind, checkpoint_id, [task] if task else [])
        try:
            yield
        finally:
            self.leave(background)

    def follow(self, kind: TaskKind, checkpoint_id: str, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Owned tasks that are one piece of work, until the last of them has ended."""
        if not tasks:
            return
        background, left = self.enter(kind, checkpoint_id, tasks), set(tasks)

        def ended(task: asyncio.Task[Any]) -> None:
            left.discard(task)
            if not left:
                self.leave(background)

        for task in tasks:
            task.add_done_callback(ended)

    def begun_at(self) -> dict[TaskKind, float]:
        """When the oldest work of each kind began, on the clock; without the kinds that have none. On any thread."""
        oldest: dict[TaskKind, float] = {}
        for background in list(self._entered):
            oldest[background.kind] = min(background.since, oldest.get(background.kind, background.since))
        return oldest

    # The loop's lag

    def opened(self, checkpoint_id: str) -> None:
        """A checkpoint or restore has begun: from here on the loop's lag counts."""
        self.longest_lag = 0.0
        self._open = checkpoint_id
        if self._timer is not None:  # it may be a slow one
            self._timer.cancel()
            self._timer = None
        self._schedule()

    def ended(self) -> None:
        """It has ended. Its longest lag is told here, since only now it is known."""
        self._measure()
        if self.longest_lag >= self._settings.loop_lag_warn_seconds:
            log.warning(
                "the event loop stood still for up to %.0f ms during %s: something blocks it",
                1000 * self.longest_lag,
                self._open,
            )
        self._open = ""
        if self._timer is not None and not self._entered:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Look no more, and let go of what still runs."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for background in list(self._entered):
            background.abandon()
            self.leave(background)

    # Looking

    def _schedule(self) -> None:
        if self._timer is not None or self._closed or not (self._open or self._entered):
            return
        pause = self._settings.watch_interval
        if self._open:
            pause = max(LEAST_BEAT, self._settings.loop_lag_warn_seconds / BEATS)
        self._due = self._clock() + pause
        self._timer = asyncio.get_running_loop().call_later(pause, self._beat)

    def _beat(self) -> None:
        self._measure()
        self._timer = None
        self._look()
        self._schedule()

    def _measure(self) -> None:
        if self._open and self._timer is not None:
            self.longest_lag = max(self.longest_lag, self._clock() - self._due)

    def _look(self) -> None:
        now, limit = self._clock(), self._settings.slow_task_warn_seconds
        for background in list(self._entered):
            age = now - background.since
            if age < limit or background.told:
                continue
            background.told = True
            log.warning(
                "%s of %s has run for %.0f s and goes on:\n%s",
                background.kind,
                background.checkpoint_id,
                age,
                background.stack(),
            )
            self._recorder.count(catalogue.WATCHDOG_TOTAL, labels={at.TASK: background.kind.value})
