"""Ends a checkpoint whose controller has gone, exactly as a Resume would, and looks after readiness."""

from __future__ import annotations

from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.error_details import log
from gym_ckpt_grpc.control.ports import OpeningCause
from gym_ckpt_grpc.control.preparing import Preparing
from gym_ckpt_grpc.control.reopening import Reopening
from gym_ckpt_grpc.control.tasks import set_within
from gym_ckpt_grpc.control.work import Work
from gym_ckpt_grpc.protocol.phases import Phase


class LeaseWatch:
    """One watch per open checkpoint, in an owned task."""

    def __init__(self, core: Core, preparing: Preparing, reopening: Reopening) -> None:
        self._core = core
        self._preparing = preparing
        self._reopening = reopening

    def begin(self, work: Work) -> None:
        self._core.tasks.own(self._watch(work), f"lease of {work.checkpoint_id}")

    async def _watch(self, work: Work) -> None:
        core = self._core
        while core.work is work and core.machine.phase is not Phase.RESUMING:
            self.look(work)
            touched = core.next_touch()
            await set_within(touched, self._pause())

    def _pause(self) -> float:
        current = self._core.machine.open
        interval = self._core.settings.watch_interval
        if current is None:
            return interval
        return min(interval, max(0.0, current.lease.wake_at() - self._core.clock()) + 0.001)

    def look(self, work: Work) -> None:
        """Expire the lease if it is time. No await between the look and RESUMING: never expired and extended."""
        core = self._core
        current = core.machine.open
        if core.work is not work or current is None or core.machine.phase is Phase.RESUMING:
            return
        self._preparing.watch()
        if current.lease.expired(core.clock()):
            core.leases_expired += 1
            log.warning("lease of %s by %s expired; reopening", current.checkpoint_id, current.controller_id)
            self._reopening.begin(work, OpeningCause.LEASE_EXPIRED, keep=False)
