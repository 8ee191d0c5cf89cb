"""What an inference worker implements to be cut, and one sweep over it.

Source: participants section 8.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from gym_ckpt_grpc.capture.generation_wire import CutOutcome, CutReference
from gym_ckpt_grpc.control import BackendInfo, Budget, CallIdentity, CutDisposition
from gym_ckpt_grpc.control.error_details import cut, unexpected
from gym_ckpt_grpc.control.generation import CutPresence
from gym_ckpt_grpc.protocol.errors import ControlError, GymCkptError

MAX_BATCH = 256
"""Acknowledgements of one message."""


class CutEngine(Protocol):
    """The generations of one inference worker, as GenerationService sees them."""

    def describe(self) -> BackendInfo:
        """Who it is now, and what it can do."""

    async def cut(self, call: CallIdentity, age: float) -> CutOutcome:
        """Cut one call. What the outcome names is durable before it returns; the generation goes on.

        age: seconds that it has run, as its policy model server says. May take its time: it holds up no other call.
        What it raises is FAILED. Cancelled when the sweep's time is over or nobody waits for it any more.
        """

    async def check(self, cuts: Sequence[CutReference]) -> Sequence[CutPresence]:
        """One presence per cut, in order."""

    async def release(self, cut_ids: Sequence[str]) -> Sequence[bool]:
        """Give cuts up; per id True if it was given up now, False if it is not known here."""


Outcomes = list[tuple[CallIdentity, CutOutcome]]


class CutSweep:
    """One pass over the calls of a request: cuts them side by side, and hands outcomes out as they come.

    A cut of which nobody has heard when the sweep ends is released. tasks: where those that outlive the sweep are
    kept, for who ends them.
    """

    def __init__(
        self, engine: CutEngine, calls: Sequence[tuple[CallIdentity, float]], tasks: set[asyncio.Task[Any]]
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._tasks = tasks
        self._ready: Outcomes = []
        self._arrived = asyncio.Event()
        self._running: dict[asyncio.Task[CutOutcome], CallIdentity] = {}

    async def batches(self, budget: Budget) -> AsyncGenerator[Outcomes]:
        """Each call once, at most MAX_BATCH at a time. What is not done when the budget is spent is FAILED."""
        for call, age in self._calls:
            task = asyncio.create_task(self._engine.cut(call, age), name=f"cut {call.model_call_id}")
            self._running[task] = call
            self._tasks.add(task)
            task.add_done_callback(self._done)
        try:
            while self._running or self._ready:
                if not await self._wait(budget):
                    break
                while batch := self._take():
                    yield batch
            late = [(call, CutOutcome.failed("it was not cut in the time of this sweep")) for call in self._give_up()]
            for begin in range(0, len(late), MAX_BATCH):
                yield late[begin : begin + MAX_BATCH]
        finally:
            self._give_up()
            self._release([outcome for _, outcome in self._ready])

    async def _wait(self, budget: Budget) -> bool:
        """Wait for an outcome; False once the budget is spent."""
        try:
            async with asyncio.timeout(budget.left()):
                await self._arrived.wait()
        except TimeoutError:
            return bool(self._ready)
        return True

    def _take(self) -> Outcomes:
        batch, self._ready = self._ready[:MAX_BATCH], self._ready[MAX_BATCH:]
        if not self._ready:
            self._arrived.clear()
        return batch

    def _done(self, task: asyncio.Task[CutOutcome]) -> None:
        self._tasks.discard(task)
        outcome = _outcome_of(task)
        call = self._running.pop(task, None)
        if call is not None:
            self._ready.append((call, outcome))
            self._arrived.set()
        else:
            self._release([outcome])  # given up, and durable all the same

    def _give_up(self) -> list[CallIdentity]:
        """Cancel what still runs; its outcome, if one comes, is nobody's."""
        running, self._running = self._running, {}
        for task in running:
            task.cancel()
        return list(running.values())

    def _release(self, outcomes: Sequence[CutOutcome]) -> None:
        cut_ids = [o.evidence.cut_id for o in outcomes if o.evidence and o.disposition is CutDisposition.CUT]
        if cut_ids:
            task = asyncio.create_task(self._give_back(cut_ids), name="release of unheard cuts")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _give_back(self, cut_ids: list[str]) -> None:
        try:
            await self._engine.release(cut_ids)
        except Exception as error:
            unexpected(error, f"releasing {len(cut_ids)} cuts that nobody heard of")


def _outcome_of(task: asyncio.Task[CutOutcome]) -> CutOutcome:
    if task.cancelled():
        return CutOutcome.failed("the cut was cancelled")
    if error := task.exception():
        known = error if isinstance(error, GymCkptError) else unexpected(error, "cutting a generation")
        return CutOutcome.failed(cut(known.message if isinstance(known, ControlError) else str(known), 300))
    return task.result()
