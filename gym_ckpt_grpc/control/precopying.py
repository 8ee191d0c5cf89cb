"""Encoding ahead: while admission is open the owner encodes what changed, in passes that take a bounded share of time.

A cut then finds most of the state encoded and digested already, so that its pause does not grow with the bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from gym_ckpt_grpc.control.budget import Clock
from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.error_details import log
from gym_ckpt_grpc.control.ports import Precopied
from gym_ckpt_grpc.control.tasks import hook_cancelled
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.storage import Payload
from gym_ckpt_grpc.telemetry.propagation import leave_trace

QUIET_INTERVAL = 2.0
"""Seconds between two looks at a server in which nothing changes."""
LONGEST_REST = 1.0
"""Seconds that a pass rests at most between two pieces of work, however long the piece seemed to take."""

Sleep = Callable[[float], Awaitable[object]]


class SharedPace:
    """A `Pace` of one processor's `share`, above 0 and at most 1; cancels a pass from inside once it is stopped.

    pass_length: seconds after which a pass should look at the revisions again. busy: processor seconds of the calling
    thread. clock, sleep: of the event loop's time.
    """

    def __init__(
        self,
        core: Core,
        *,
        clock: Clock = time.monotonic,
        busy: Clock = time.thread_time,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._core = core
        self._clock, self._busy, self._sleep = clock, busy, sleep
        self._idle = 1 / core.settings.precopy_share - 1
        self._ends = 0.0
        self.stopped = False
        self.spent = 0.0

    @property
    def max_bytes(self) -> int:
        return self._core.settings.precopy_bytes

    def begin(self) -> None:
        """A pass begins."""
        self._ends = self._clock() + self._core.settings.precopy_interval

    @property
    def over(self) -> bool:
        return self._clock() >= self._ends

    def stop(self) -> None:
        """End the pass at its next step, also one whose hook has swallowed the cancellation."""
        self.stopped = True

    @contextmanager
    def working(self) -> Iterator[None]:
        self._check()
        began = self._busy()
        try:
            yield
        finally:
            self.spent += max(0.0, self._busy() - began)
        self._check()

    async def digest(self, payloads: Sequence[Payload]) -> None:
        self._check()
        self.spent += await self._core.in_thread(self._digest, payloads)
        self._check()

    def _digest(self, payloads: Sequence[Payload]) -> float:
        began = self._busy()
        for payload in payloads:
            payload.digest()
        return max(0.0, self._busy() - began)

    async def rest(self) -> None:
        await self.wait(0.0)

    async def wait(self, at_least: float) -> None:
        """Rest for as long as the share asks, and at least so many seconds."""
        self._check()
        spent, self.spent = self.spent, 0.0
        await self._sleep(max(at_least, min(spent * self._idle, LONGEST_REST)))
        self._check()

    def _check(self) -> None:
        if self.stopped:
            raise asyncio.CancelledError


class Precopying:
    """Keeps passes going while the participant is IDLE: one at a time, none while a checkpoint or restore is open."""

    def __init__(self, core: Core, make_pace: Callable[[Core], SharedPace] = SharedPace) -> None:
        self._core = core
        self._make_pace = make_pace
        self._task: asyncio.Task[None] | None = None
        self._pace: SharedPace | None = None
        self._off = core.settings.precopy_share <= 0
        self._failed = False
        core.on_idle = self.start

    def start(self) -> None:
        """Begin passes if the participant is IDLE, once what was stopped before has ended."""
        core = self._core
        if self._off or core.closing or self._task is not None or core.machine.phase is not Phase.IDLE:
            return
        self._pace = self._make_pace(self._core)
        self._task = self._core.tasks.own(self._passes(self._pace), "precopy")
        self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        """Cancel the pass under way; nothing that it does later has an effect. Waits for nothing."""
        if self._task is not None and self._pace is not None:
            self._pace.stop()
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if self._pace is not None and self._pace.stopped:
            self.start()  # it may have outlived a whole checkpoint in a hook that would not end

    async def _passes(self, pace: SharedPace) -> None:
        leave_trace()  # the call that ended a checkpoint, and so began this, has nothing to do with it
        interval = self._core.settings.precopy_interval
        pause = interval
        while True:
            found = await self._pass(pace)
            if found is Precopied.NEVER:
                self._off = True
                return
            if found is Precopied.MORE:
                await pace.wait(0.0)
                continue
            pause = interval if found is Precopied.CHANGING else min(pause * 2, max(QUIET_INTERVAL, interval))
            await pace.wait(pause)

    async def _pass(self, pace: SharedPace) -> Precopied:
        """One pass; a failing owner is told of once and looked at as seldom as a quiet one."""
        pace.begin()
        try:
            with hook_cancelled():
                return await self._core.owner.precopy(pace)
        except Exception as error:
            if not self._failed:
                log.warning("encoding ahead failed; everything is encoded at the cut: %r", error, exc_info=True)
            self._failed = True
            return Precopied.QUIET
