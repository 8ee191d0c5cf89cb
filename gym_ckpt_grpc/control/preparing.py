"""Closing admission and following readiness until the records are frozen."""

from __future__ import annotations

import asyncio

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.doors import give_up, tell_fate
from gym_ckpt_grpc.control.error_details import unexpected
from gym_ckpt_grpc.control.ports import Closing
from gym_ckpt_grpc.control.tasks import failure_of, hook_cancelled, set_within
from gym_ckpt_grpc.control.work import PrepareReply, Work
from gym_ckpt_grpc.protocol.errors import ControlError, InvalidPhase, OutOfTime
from gym_ckpt_grpc.protocol.machine import Call
from gym_ckpt_grpc.protocol.phases import Operation, Phase
from gym_ckpt_grpc.telemetry import catalogue

_FROZEN = (Phase.CAPTURED, Phase.COMMITTING, Phase.COMMITTED)


class Preparing:
    """The Prepare half of a checkpoint: PREPARING <-> PREPARED."""

    def __init__(self, core: Core) -> None:
        self._core = core
        core.on_changed = self.recheck

    def begin(self, call: Call, ttl: float, ready_within: float, budget: Budget) -> Work:
        """Close admission in an owned task; a call that ends early leaves it running."""
        core = self._core
        now = core.clock()
        core.machine.begin(call, ttl=ttl, now=now)
        work = core.begin_open(Work(call.checkpoint_id, closed_at=now, began=now))
        closing = Closing(call.checkpoint_id, work.number, budget, ready_within)
        work.closing = core.tasks.own(self._close(work, closing), f"close admission for {call.checkpoint_id}")
        core.touch()
        return work

    async def _close(self, work: Work, closing: Closing) -> None:
        core = self._core
        try:
            with hook_cancelled():
                await core.owner.close_admission(closing)
        except Exception as error:
            failure = error if isinstance(error, ControlError) else unexpected(error, "closing admission")
            tell_fate(core, work, durable=False)
            await give_up(core, work, Phase.PREPARING)
            raise failure from error
        work.closed = True
        self.recheck()

    def recheck(self) -> None:
        """Compare readiness with the phase. Cheap: the owner answers in constant time."""
        core, work = self._core, self._core.work
        if work is None or not work.closed or work.capturing:
            return
        ready = work.ready_seen = self.is_ready()
        if ready and core.machine.phase is Phase.PREPARING:
            core.move(Phase.PREPARED)
            work.settled.set()
        elif not ready and core.machine.phase is Phase.PREPARED:
            work.settled.clear()
            work.began = core.clock()
            core.move(Phase.PREPARING)

    def is_ready(self) -> bool:
        """Ready, and no retired episode holds anything."""
        return self._core.retirement.all_freed and self._core.owner.is_ready()

    def watch(self) -> None:
        """Find a change of readiness that nobody announced; a defect of the owner, delivered all the same."""
        work = self._core.work
        following = self._core.machine.phase in (Phase.PREPARING, Phase.PREPARED)
        if self._core.notified or not (work and work.closed and following) or work.capturing:
            return
        if self.is_ready() != work.ready_seen:
            self._core.unnotified_changes += 1
            self.recheck()

    async def wait(self, work: Work, ready_within: float, budget: Budget) -> PrepareReply:
        """Wait for a safe cut, at most `ready_within` seconds, and reply with what was reached."""
        core = self._core
        reserve = budget.left() - min(ready_within, budget.left())
        with core.recorder.step(catalogue.WAIT_READY) as step:
            await self._closed(work, budget)
            while not work.settled.is_set() and budget.left() > reserve:
                await set_within(work.settled, budget.left() - reserve)
            reply = PrepareReply(self._reached(work), core.report())
            if reply.phase is not Phase.PREPARED:
                step.not_ready()
        if reply.phase is Phase.PREPARED:
            core.machine.record(Operation.PREPARE, reply)
        return reply

    async def _closed(self, work: Work, budget: Budget) -> None:
        """Wait until admission is closed, or the checkpoint has ended; a failed close fails the call."""
        assert work.closing is not None
        settled = asyncio.ensure_future(work.settled.wait())
        try:
            await asyncio.wait({work.closing, settled}, timeout=budget.left(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        if failure := failure_of(work.closing):
            raise failure
        if not (work.ended or work.closing.done()):
            raise OutOfTime("closing admission had not ended in time; it goes on, and the same call joins it")

    def _reached(self, work: Work) -> Phase:
        if work.ended:
            return Phase.IDLE
        phase = self._core.machine.phase
        return Phase.PREPARED if phase in _FROZEN else phase

    def require_ready(self) -> None:
        """Refuse a capture whose cut is not safe any more; falls back to PREPARING, which a Prepare waits out."""
        if self.is_ready():
            return
        self.recheck()
        raise self._core.refusal(InvalidPhase, "this participant is not ready any more")
