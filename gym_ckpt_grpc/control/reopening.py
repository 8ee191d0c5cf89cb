"""Ending a checkpoint: pre-empting what runs, then opening admission, with retries until it is open."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.doors import free_restored, open_admission, tell_fate
from gym_ckpt_grpc.control.error_details import log
from gym_ckpt_grpc.control.ports import OpeningCause
from gym_ckpt_grpc.control.steps import preempting
from gym_ckpt_grpc.control.tasks import cancel_and_wait
from gym_ckpt_grpc.control.watchdog import TaskKind
from gym_ckpt_grpc.control.work import Work
from gym_ckpt_grpc.protocol.machine import CommitArguments
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.telemetry import Timed
from gym_ckpt_grpc.telemetry import attributes as at

PREEMPT_WAIT = 1.0
"""Seconds to wait for a cancelled hook; one that hangs longer has its result dropped."""
STOP_POLL = 0.02
"""Seconds between two looks at a publication under way. No thread waits for it: hung writes may hold them all."""


class Reopening:
    """RESUMING to IDLE, by a controller's Resume or by the lease; and records kept after it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def begin(self, work: Work, cause: OpeningCause, *, keep: bool) -> asyncio.Task[None]:
        """Enter RESUMING at once and reopen in an owned task."""
        core = self._core
        phase = core.machine.phase
        core.move(Phase.RESUMING)
        work.began = core.clock()
        work.end()
        # An export that still runs has frozen nothing: opened over it, it would tell of two moments.
        keep = keep and phase in (Phase.CAPTURED, Phase.COMMITTING) and work.captured is not None
        if keep:
            self._keep(work)
        expired = cause is OpeningCause.LEASE_EXPIRED
        reopen = self._expired(work, was=phase) if expired else self._reopen(work, cause, was=phase, keep=keep)
        work.reopening = core.tasks.own(reopen, f"reopen after {work.checkpoint_id}")
        return work.reopening

    async def _expired(self, work: Work, *, was: Phase) -> None:
        """An expiry counts once the doors are open again; each try to open them is an operation of its own.

        The first one has in it what was ended before.
        """
        core = self._core

        def begin() -> Timed:
            return core.recorder.operation("lease_reopen", checkpoint_id=work.checkpoint_id).__enter__()

        tried = begin()

        def end(error: BaseException | None) -> None:
            tried.set(at.PHASE, core.machine.phase.name)
            tried.__exit__(type(error) if error else None, error, None)

        def failed(error: Exception) -> None:
            nonlocal tried
            end(error)
            tried = begin()

        try:
            await self._reopen(work, OpeningCause.LEASE_EXPIRED, was=was, keep=False, failed=failed)
        finally:
            end(sys.exception())
        core.recorder.event("lease_expired")

    async def _reopen(
        self,
        work: Work,
        cause: OpeningCause,
        *,
        was: Phase,
        keep: bool,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        core = self._core
        with core.watchdog.running(TaskKind.REOPEN, work.checkpoint_id):
            with preempting(core, work.closing, "prepare"):
                await cancel_and_wait([work.closing], PREEMPT_WAIT)
            if not keep:
                await self._stop(work)
                self._tell_fate(work)
            with preempting(core, work.install, "restore"):
                await cancel_and_wait([work.install], core.settings.cleanup_limit)
            await self._deletions_ended(work)
            if was is Phase.RESTORED and cause is OpeningCause.LEASE_EXPIRED:
                # Nothing has started from what a dead controller installed: it goes, and leaves no refusal.
                await free_restored(core, sorted(work.installed & core.owner.restored_pending()))
            await open_admission(core, work, cause, lambda: True, failed)
            work.cut.close()
            core.end_open(fenced=True)

    async def _stop(self, work: Work) -> None:
        """End capture and write; afterwards nothing of that write can appear."""
        commits = work.commit is not None and not work.commit.done()  # one that failed may be followed by a Capture
        task, operation = (work.commit, "commit") if commits else (work.capture, "capture")
        with preempting(self._core, task, operation):
            await self._stop_writing(work)

    async def _stop_writing(self, work: Work) -> None:
        if work.commit and not work.commit.done():
            loop = asyncio.get_running_loop()
            ends = loop.time() + self._core.settings.cleanup_limit
            while not work.stop.stop(0):
                if loop.time() >= ends:
                    log.error("a publication of %s hangs; opening without it", work.checkpoint_id)
                    break
                await asyncio.sleep(STOP_POLL)
        await cancel_and_wait([work.capture, work.commit], PREEMPT_WAIT)

    def _tell_fate(self, work: Work) -> None:
        """Nothing more will be written. Files that were named, or whose naming hangs, count as in storage."""
        if work.install is None:
            durable = work.named or work.stop.published or not work.stop.stop(0)
            tell_fate(self._core, work, durable=durable)

    async def _deletions_ended(self, work: Work) -> None:
        """Wait for deletions, at most cleanup_limit from their start."""
        if work.deletions:
            ends = work.deleting_since + self._core.settings.cleanup_limit
            left = ends - asyncio.get_running_loop().time()
            await asyncio.wait(work.deletions.values(), timeout=max(0.0, left))

    # Kept records: no lease covers them; their Commit must come within lease_ttl.

    def _keep(self, work: Work) -> None:
        core = self._core
        current = core.machine.open
        assert current is not None
        core.machine.keep()
        core.kept[work.checkpoint_id] = work
        work.epoch = current.epoch
        work.answered_at = core.clock()
        core.tasks.own(self._expire_kept(work, current.lease.ttl), f"keep {work.checkpoint_id}")

    async def _expire_kept(self, work: Work, ttl: float) -> None:
        """Drop records that nobody commits within `ttl`, and the reply of a Commit as long after it ended."""
        core = self._core
        while core.kept.get(work.checkpoint_id) is work and work.dropping is None:
            left = work.answered_at + ttl - core.clock()
            if work.commit is not None and not work.commit.done():
                await asyncio.wait({work.commit})
            elif left > 0:
                await asyncio.sleep(min(left, core.settings.watch_interval))
            else:
                self.drop(work.checkpoint_id)

    def ask_kept(self, checkpoint_id: str, arguments: CommitArguments) -> Work:
        """The kept work of an accepted Commit, whose arguments are fixed from here."""
        self._core.machine.ask_kept(checkpoint_id, arguments)
        return self._core.kept[checkpoint_id]

    def drop(self, checkpoint_id: str) -> asyncio.Task[None] | None:
        """End kept records and their write, if there are any; once the task has ended, nothing of them can appear."""
        core = self._core
        core.machine.drop_kept(checkpoint_id)
        work = core.kept.get(checkpoint_id)
        if work is None:
            return None
        if work.dropping is None:
            work.stop.stop(0)
            work.dropping = core.tasks.own(self._drop(work), f"drop {checkpoint_id}")
        return work.dropping

    async def _drop(self, work: Work) -> None:
        await self._stop(work)
        self._tell_fate(work)
        self._core.kept.pop(work.checkpoint_id, None)

    def drop_older(self, epoch: int) -> list[asyncio.Task[None]]:
        """A higher epoch was obeyed: what an earlier controller left to be written is ended."""
        older = [checkpoint_id for checkpoint_id, work in self._core.kept.items() if work.epoch < epoch]
        return [task for checkpoint_id in older if (task := self.drop(checkpoint_id))]
