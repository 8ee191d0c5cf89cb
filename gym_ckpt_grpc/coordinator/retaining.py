"""Removing old checkpoints after a publication: beside the run, bounded, and with an outcome of its own.

It begins when the fleet is open again, and nobody waits for it: whatever it meets, the publication stands. A process
that ends before it leaves the rest to the next one. Source: coordination section 9.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fanout import until_done
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import ControlError, OutOfTime
from gym_ckpt_grpc.storage import Decision, Retention, RetentionOutcome, StopFlag, apply_retention, plan_retention

if TYPE_CHECKING:
    from gym_ckpt_grpc.coordinator.session import Session

LIMIT = 300.0
"""Seconds that one run may take; the next one goes on where it ended."""

STOPPING = 5.0
"""Seconds that the removal of one file may take where the coordinator is left; a storage that hangs is given up."""

_TOLD = 10  # checkpoints of one kind that an event names


class Retaining:
    """The retention of one session. policy: None removes nothing. aborted: checkpoints that ended here unpublished."""

    def __init__(self, session: Session, policy: Retention | None) -> None:
        self.policy = policy
        self.aborted: set[str] = set()
        self._session = session
        self._closed = False
        self._lock = asyncio.Lock()
        self._stops: set[StopFlag] = set()
        self._tasks: set[asyncio.Task[RetentionOutcome]] = set()

    @property
    def open_ids(self) -> set[str]:
        """Checkpoints that are at work here: what is open, and the source of a restore."""
        session = self._session
        return {id for id in (session.open_id, session.pin.checkpoint_id if session.pin else "") if id}

    def start(self, checkpoint_id: str) -> asyncio.Task[RetentionOutcome] | None:
        """Begin, after this checkpoint was published; None where nothing was asked for.

        The task raises nothing. It is cancelled only where the coordinator is left while the storage hangs.
        """
        if self.policy is None or self._session.replaced:
            return None
        work = self._run(checkpoint_id, self.policy)
        task = asyncio.get_running_loop().create_task(work, name=f"retention after {checkpoint_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @asynccontextmanager
    async def alone(self, deadline: Deadline) -> AsyncIterator[None]:
        """Around other work that removes checkpoints: none is removed here meanwhile. Raises OutOfTime.

        What is aside while it is removed may come back, and may need anything older until then.
        """
        try:
            async with asyncio.timeout(deadline.left()):
                await self._lock.acquire()
        except TimeoutError:
            raise OutOfTime("the removal of older checkpoints had not ended in time; it goes on") from None
        try:
            yield
        finally:
            self._lock.release()

    async def close(self, patience: float) -> None:
        """Give what still runs `patience` seconds, then end it between two files."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience)
        for stop in self._stops:
            stop.stop()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=STOPPING)
        for task in tasks:
            task.cancel()
        await until_done(tasks)

    async def _run(self, checkpoint_id: str, policy: Retention) -> RetentionOutcome:
        async with self._lock:
            if self._closed:
                return RetentionOutcome(failures=("the coordinator was left before it began",))
            stop = StopFlag()
            self._stops.add(stop)
            try:
                outcome = await in_thread(self._work(policy, stop), "retention", Deadline(LIMIT))
            except ControlError as error:
                self._session.note(error)
                outcome = RetentionOutcome(failures=(error.message,))
            finally:
                stop.stop()
                self._stops.discard(stop)
        self._session.events.add(EventKind.RETENTION, told(outcome), checkpoint_id=checkpoint_id)
        return outcome

    def _work(self, policy: Retention, stop: StopFlag) -> Callable[[], RetentionOutcome]:
        """What the thread does; what it is told of this session is taken here, on the loop."""
        session, open_ids, aborted = self._session, self.open_ids, frozenset(self.aborted)
        root, epoch = session.root, session.epoch

        def work() -> RetentionOutcome:
            plan = plan_retention(root, policy, epoch=epoch, open_ids=open_ids, aborted=aborted)
            return apply_retention(root, plan, stop=stop)

        return work


def told(outcome: RetentionOutcome) -> str:
    """An outcome in one line."""
    parts = [f"removed {_names(outcome.removed)}" if outcome.removed else "removed nothing"]
    if outcome.finished:
        parts.append(f"finished removing {', '.join(outcome.finished[:_TOLD])}")
    if outcome.files:
        parts.append(f"removed {len(outcome.files)} files that were never named")
    if outcome.bytes_freed:
        parts.append(f"{outcome.bytes_freed:,} bytes freed")
    if outcome.kept:
        reasons = [f"{decision.name} ({decision.reason})" for decision in outcome.kept[:_TOLD]]
        parts.append(f"kept {len(outcome.kept)}: {', '.join(reasons)}")
    if outcome.failures:
        parts.append(f"failed: {'; '.join(outcome.failures[:_TOLD])}")
    return "; ".join(parts)


def _names(decisions: tuple[Decision, ...]) -> str:
    more = f" and {len(decisions) - _TOLD} more" if len(decisions) > _TOLD else ""
    return ", ".join(decision.name for decision in decisions[:_TOLD]) + more
