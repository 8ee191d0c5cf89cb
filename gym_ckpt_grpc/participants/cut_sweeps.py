"""`CutSweeper`: asks the backends of a policy model server for cuts of its undelivered calls, again and again.

What is asked about and what becomes of the answers is the business of `SweptCalls`: the book of one process, or of
several. Source: participants section 8.1.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from gym_ckpt_grpc.control.budget import Budget, Clock
from gym_ckpt_grpc.control.generation import (
    BackendInfo,
    CallIdentity,
    Capability,
    CutAck,
    CutDisposition,
    GenerationBackend,
    GenerationBackends,
    Sweep,
    SweepHeader,
)
from gym_ckpt_grpc.control.ports import Closing, OwnerPort
from gym_ckpt_grpc.control.tasks import TaskOwner
from gym_ckpt_grpc.participants.cut_ack import Judge
from gym_ckpt_grpc.participants.policy_settings import PolicyModelSettings
from gym_ckpt_grpc.protocol.errors import OutOfTime
from gym_ckpt_grpc.telemetry import Timed, outcome_of
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import GENERATION_CUT
from gym_ckpt_grpc.telemetry.spans import OK

RPC_SHARE = 0.5
"""Part of the time left for cuts that one sweep of a backend may take."""
LATE = 1.0
"""Seconds for which an answer is still read after the time of its sweep, so that late cuts can be given up."""

_CALLS_OF = {
    CutDisposition.CUT: at.CALLS_CUT,
    CutDisposition.FINISHED: at.CALLS_FINISHED,
    CutDisposition.NOT_FOUND: at.CALLS_NOT_FOUND,
    CutDisposition.UNCUTTABLE: at.CALLS_UNCUTTABLE,
    CutDisposition.FAILED: at.CALLS_FAILED,
}

log = logging.getLogger(__name__)


class SweptCalls(Protocol):
    """The calls that sweeps are about, of a whole participant."""

    on_askable: Callable[[str], None]

    def begin(self) -> None:
        """Undelivered calls are owed a disposition from here on."""

    def expire(self) -> None:
        """The time for cuts is spent."""

    def inventory(self, backend: str) -> list[tuple[CallIdentity, float]]:
        """The calls to ask a backend about now, with their ages in seconds."""

    def accept(self, backend: str, header: SweepHeader, ack: CutAck) -> CutDisposition:
        """A valid acknowledgement, in time; gives what its call has come to."""

    def failed(self, call: CallIdentity, why: str, *, for_good: bool = False) -> None:
        """A try to cut a call failed."""

    def unwanted(self, backend: str, ack: CutAck) -> None:
        """An acknowledgement that is late or does not stand."""


class CutSweeper:
    """Sweeps every backend of the participant, side by side, from a close to the open or until the time is spent.

    port: gives the port of the participant. clock: seconds, those of the event loop.
    """

    def __init__(
        self,
        calls: SweptCalls,
        backends: GenerationBackends,
        settings: PolicyModelSettings,
        *,
        clock: Clock,
        port: Callable[[], OwnerPort],
    ) -> None:
        self._calls = calls
        self._backends = dict(backends)
        self._settings = settings
        self._clock = clock
        self._port = port
        self._known = _Known()
        self._askable = {name: asyncio.Event() for name in self._backends}
        self._tasks = TaskOwner()
        self._sweeping: list[asyncio.Task[None]] = []
        self._answers: set[_Answer] = set()
        self._timer: asyncio.TimerHandle | None = None
        calls.on_askable = self._woken

    def start(self, closing: Closing) -> None:
        """Admission has closed: sweep. Nothing is swept for a Restore, without backends, or with `cut_share` 0.

        All sweeps together may take `cut_share` of the time in which the participant is to be ready.
        """
        if closing.ready_within is None or not self._backends or not self._settings.cut_share:
            return
        self.stop()
        self._known.forget_incapable()
        self._calls.begin()
        seconds = self._settings.cut_share * min(closing.ready_within, closing.budget.left())
        if seconds <= 0:
            self._calls.expire()
            return
        ends = self._clock() + seconds
        for name, backend in self._backends.items():
            self._askable[name].set()
            self._sweeping.append(self._tasks.own(self._sweep(name, backend, closing, ends), f"cuts of {name}"))
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def stop(self) -> None:
        """No more sweeps, as admission opens or the time is spent. What is still answered is late."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._sweeping:
            task.cancel()
        self._sweeping.clear()
        for answer in self._answers:
            answer.late = True

    async def close(self) -> None:
        """End all tasks. Only at the end of the process."""
        self.stop()
        await self._tasks.close()

    def _expire(self) -> None:
        self.stop()
        self._calls.expire()

    def _woken(self, backend: str) -> None:
        self._askable[backend].set()

    async def _sweep(self, name: str, backend: GenerationBackend, closing: Closing, ends: float) -> None:
        """Sweep one backend while there is something to ask about, `sweep_interval` apart."""
        number = 0
        while True:
            await self._askable[name].wait()
            self._askable[name].clear()
            if calls := self._calls.inventory(name):
                number += 1
                service = self._port().identity.service
                sweep = Sweep(closing.checkpoint_id, service, closing.number, number, calls)
                await self._ask(name, backend, sweep, RPC_SHARE * (ends - self._clock()))
                if self._calls.inventory(name):
                    self._askable[name].set()
                await asyncio.sleep(self._settings.sweep_interval)

    async def _ask(self, name: str, backend: GenerationBackend, sweep: Sweep, seconds: float) -> None:
        """One sweep. Its answer is read to the end, even past its time, by a task of its own."""
        answer = _Answer(name, backend, sweep, self._calls, self._known)
        self._answers.add(answer)
        with self._port().recorder.step(GENERATION_CUT, timed=False) as span:
            # Begun in here: what it asks the worker belongs to this span.
            reading = self._tasks.own(answer.read(Budget(seconds, self._clock), seconds + LATE), f"answer of {name}")
            reading.add_done_callback(lambda _: self._answers.discard(answer))
            try:
                await asyncio.wait({reading}, timeout=seconds)
                answer.end(in_time=reading.done())
            finally:
                answer.describe(span)


class _Known:
    """What backends said of themselves, kept as long as they are the same process."""

    def __init__(self) -> None:
        self._infos: dict[str, BackendInfo] = {}

    async def ask(self, name: str, backend: GenerationBackend, budget: Budget) -> BackendInfo:
        """What is known, or what it answers. Raises ControlError."""
        info = self._infos.get(name)
        if info is None:
            info = self._infos[name] = await backend.describe(budget)
        return info

    def forget(self, name: str) -> None:
        self._infos.pop(name, None)

    def forget_incapable(self) -> None:
        """One that cannot cut is asked again in the next closing: a new process in its place may be able to."""
        self._infos = {name: info for name, info in self._infos.items() if Capability.CUT in info.capabilities}


class _Answer:
    """What one backend answers in one sweep. late: its time is over, so that what still comes is given up."""

    def __init__(self, name: str, backend: GenerationBackend, sweep: Sweep, calls: SweptCalls, known: _Known) -> None:
        self.late = False
        self._name = name
        self._backend = backend
        self._sweep = sweep
        self._calls = calls
        self._known = known
        self._asked = {call.ticket_id: call for call, _ in sweep.calls}
        self._judge = Judge(self._asked.values())
        self._failed: set[str] = set()
        self._came_to: dict[str, CutDisposition] = {}
        self._trouble = "it was not acknowledged in time"
        self._outcome = OK

    async def read(self, budget: Budget, limit: float) -> None:
        """Ask, and hear every acknowledgement as it comes; at most `limit` seconds. A failure costs only cuts."""
        try:
            async with asyncio.timeout(limit):
                await self._read(budget)
            self._trouble = "the answer ended without it"
        except Exception as error:
            self._known.forget(self._name)
            self._outcome = outcome_of(error)
            self._trouble = f"asking {self._name} failed: {str(error) or type(error).__name__}"

    async def _read(self, budget: Budget) -> None:
        info = await self._known.ask(self._name, self._backend, budget)
        if self.late:
            return
        if Capability.CUT not in info.capabilities:
            for ticket_id in self._judge.unanswered():
                self._fail(ticket_id, f"{self._name} cannot cut", for_good=True)
            return
        header: SweepHeader | None = None
        async for part in self._backend.cut(self._sweep, budget):
            if isinstance(part, SweepHeader):
                header = part
                if part.incarnation_id != info.incarnation_id:
                    self._known.forget(self._name)
            else:
                self._hear(header, part)

    def _hear(self, header: SweepHeader | None, acks: Sequence[CutAck]) -> None:
        """Judge each alone: a bad one fails its own call and no other."""
        for ack in acks:
            if self.late:
                self._calls.unwanted(self._name, ack)
                continue
            problem = self._judge.judge(ack) or ("" if header is not None else "no header came before it")
            if not problem and header is not None:
                self._came_to[ack.call.ticket_id] = self._calls.accept(self._name, header, ack)
                continue
            log.warning("%s sent a bad acknowledgement for ticket %s: %s", self._name, ack.call.ticket_id, problem)
            self._fail(ack.call.ticket_id, problem)
            self._calls.unwanted(self._name, ack)

    def _fail(self, ticket_id: str, why: str, *, for_good: bool = False) -> None:
        """Once per call and sweep, whatever else comes."""
        call = self._asked.get(ticket_id)
        if call is not None and ticket_id not in self._failed:
            self._failed.add(ticket_id)
            self._came_to[ticket_id] = CutDisposition.FAILED
            self._calls.failed(call, why, for_good=for_good)

    def end(self, *, in_time: bool) -> None:
        """The sweep is over: what was not acknowledged has failed this time. in_time: whether the answer had ended."""
        if not self.late:
            self.late = True
            unanswered = self._judge.unanswered()
            if unanswered and not in_time:
                self._outcome = OutOfTime.code.name
            for ticket_id in unanswered:
                self._fail(ticket_id, self._trouble)

    def describe(self, span: Timed) -> None:
        """What came of it, on its span. What is still answered afterwards is late, and counts nowhere."""
        came_to = Counter(self._came_to.values())
        span.set(at.BACKEND, self._name)
        span.set(at.SWEEP, self._sweep.number)
        span.set(at.CALLS, len(self._asked))
        for disposition, name in _CALLS_OF.items():
            span.set(name, came_to[disposition])
        if self._outcome != OK:
            span.failed(self._outcome)
