"""What the parts of a control plane share: the machine, the owner, the open work, and how they wake each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

from gym_ckpt_grpc.control.budget import Clock
from gym_ckpt_grpc.control.ports import MarkView, StateOwner
from gym_ckpt_grpc.control.retirement import Retirement
from gym_ckpt_grpc.control.settings import ControlSettings
from gym_ckpt_grpc.control.tasks import TaskOwner
from gym_ckpt_grpc.control.untold import Untold
from gym_ckpt_grpc.control.watchdog import Watchdog
from gym_ckpt_grpc.control.work import Work
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.machine import Machine
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.protocol.report import MAX_BLOCKERS, MAX_LISTED, PrepareReport
from gym_ckpt_grpc.storage import FileLayer
from gym_ckpt_grpc.telemetry import Recorder, Telemetry

P = ParamSpec("P")
T = TypeVar("T")
IO_THREADS = 4


class Core:
    """Shared state of one control plane. Implements OwnerPort."""

    def __init__(
        self,
        owner: StateOwner,
        identity: ParticipantIdentity,
        *,
        roots: Sequence[str],
        files: FileLayer,
        clock: Clock,
        settings: ControlSettings,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.owner = owner
        self._identity = identity
        self._recorder = Recorder.of(identity, telemetry)
        self.roots = tuple(roots)
        self.files = files
        self.clock = clock
        self.settings = settings
        self.machine = Machine(identity.incarnation_id)
        self.tasks = TaskOwner()
        self.watchdog = Watchdog(self._recorder, clock, settings)
        self.untold = Untold()
        self.retirement = Retirement(self.tasks, clock, self.changed)
        self.work: Work | None = None
        self.kept: dict[str, Work] = {}
        self.leases_expired = 0
        self.unnotified_changes = 0
        self.on_changed: Callable[[], None] = lambda: None
        self.on_idle: Callable[[], None] = lambda: None
        self.closing = False
        self._notified = False
        self._touched = asyncio.Event()
        self._threads = ThreadPoolExecutor(IO_THREADS, "gymckpt-io")

    # OwnerPort

    @property
    def identity(self) -> ParticipantIdentity:
        return self._identity

    @property
    def recorder(self) -> Recorder:
        return self._recorder

    @property
    def marks(self) -> MarkView:
        return self.retirement

    def changed(self) -> None:
        """Look at readiness again, once this loop turn is over however often it is called."""
        if not self._notified:
            self._notified = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._notified = False
        self.on_changed()
        self.touch()

    # For the parts

    @property
    def notified(self) -> bool:
        """Whether a change was told that is still to be looked at."""
        return self._notified

    def move(self, phase: Phase) -> None:
        self.machine.move(phase)
        self.touch()

    def begin_open(self, work: Work) -> Work:
        """The machine has begun a checkpoint or restore: this is its work."""
        self.work = work
        self.watchdog.opened(work.checkpoint_id)
        return work

    def end_open(self, *, fenced: bool) -> None:
        """Back to IDLE: admission is open, and nothing is open any more."""
        self.machine.end(fenced=fenced)
        self.work = None
        self.watchdog.ended()
        self.touch()
        self.on_idle()

    def touch(self) -> None:
        """Wake whoever watches the status or the lease."""
        self._touched.set()
        self._touched = asyncio.Event()

    def next_touch(self) -> asyncio.Event:
        """An event that the next `touch` sets."""
        return self._touched

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work off the loop, on threads of this control plane only."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    def refusal(self, kind: type[ControlError], message: str) -> ControlError:
        """A typed refusal that carries phase, active id and, while preparing, the blocking episodes."""
        report = self.report()
        return kind(
            message,
            phase=self.machine.phase.name,
            active_checkpoint_id=self.machine.active_checkpoint_id,
            episodes=[b.episode for b in report.blockers if b.episode],
            episode_count=report.blocker_count,
        )

    def report(self) -> PrepareReport:
        """The owner's report, cut to its limits; retired episodes that an owner does not list block all the same."""
        report = self.owner.report(MAX_BLOCKERS)
        blockers, count = report.blockers[:MAX_BLOCKERS], report.blocker_count
        if count <= MAX_BLOCKERS:
            listed = {blocker.episode for blocker in blockers}
            unlisted = [blocker for blocker in self.retirement.blockers() if blocker.episode not in listed]
            count += len(unlisted)
            blockers = (*blockers, *unlisted)[:MAX_BLOCKERS]
        return replace(report, blockers=blockers, blocker_count=count, restarts=report.restarts[:MAX_LISTED])

    async def close(self) -> None:
        self.closing = True
        for work in (self.work, *self.kept.values()):
            if work is not None:
                work.stop.stop(0)
                work.cut.close()
        try:
            await self.tasks.close()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self.watchdog.close()
