"""Tasks with an owner.

A gRPC handler is cancelled when its client goes away, so work that must outlive a call runs in a task that is
owned here and that handlers merely wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import HookFailed
from gym_ckpt_grpc.protocol.errors import ControlError, OutOfTime, StaleCheckpoint

T = TypeVar("T")
log = logging.getLogger("gym_ckpt_grpc.control")


class TaskOwner:
    """Keeps tasks alive, hears their failures, and ends them at close."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def own(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, ControlError) else logging.WARNING
            log.log(level, "%s failed: %s", task.get_name(), error)

    async def close(self, limit: float = 5.0) -> None:
        """Cancel everything and wait, at most `limit` seconds."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit)


@contextlib.contextmanager
def hook_cancelled() -> Iterator[None]:
    """Around an author's hook: a cancellation that nobody has asked the running task for is the hook's own failure.

    It comes where the hook awaits a task that somebody cancelled. Raises HookFailed for it.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise HookFailed("a task that the hook awaited was cancelled") from error


def succeeded(task: asyncio.Task[Any] | None) -> bool:
    """Whether the task ended with a result."""
    return task is not None and task.done() and not task.cancelled() and task.exception() is None


def failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """The exception that a task ended with; None while it runs, for a result and for a cancelled one."""
    return task.exception() if task.done() and not task.cancelled() else None


async def set_within(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, at most so long; not `wait_for`, which can lose a cancellation before Python 3.12."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def await_within(task: asyncio.Task[T], budget: Budget, step: str) -> T:
    """Wait for owned work without becoming its owner; OutOfTime names the step when the budget ends first."""
    done, _ = await asyncio.wait({task}, timeout=budget.left())
    if not done:
        raise OutOfTime(f"{step} had not ended in time; it goes on, and the same call joins it")
    if task.cancelled():
        raise StaleCheckpoint(f"{step} was pre-empted: the checkpoint was resumed")
    return task.result()


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any] | None], limit: float) -> bool:
    """Cancel tasks and wait at most `limit` seconds; whether all have ended."""
    alive = [task for task in tasks if task is not None and not task.done()]
    for task in alive:
        task.cancel()
    if not alive:
        return True
    _, pending = await asyncio.wait(alive, timeout=limit)
    return not pending
