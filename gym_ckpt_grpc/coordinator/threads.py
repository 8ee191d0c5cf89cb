"""Blocking storage work of an asynchronous caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.protocol.errors import OutOfTime

T = TypeVar("T")

HANG_LIMIT = 30.0
"""Seconds that a cancelled caller still waits for its thread: work in it cannot be taken back."""


async def in_thread(work: Callable[[], T], step: str, deadline: Deadline | None = None) -> T:
    """Run blocking work in a thread and wait for its end, through cancellations too.

    Raises OutOfTime naming the step if the deadline comes first; the thread then runs on without effect on the
    caller. A cancellation is raised after the work has ended, at most HANG_LIMIT later.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    future.add_done_callback(_heard)
    interrupted: asyncio.CancelledError | None = None
    limit = None if deadline is None else max(deadline.left(), 0.001)
    while not future.done():
        try:
            await asyncio.wait({future}, timeout=limit)
        except asyncio.CancelledError as error:
            interrupted = error
            limit = HANG_LIMIT if limit is None else min(limit, HANG_LIMIT)
            continue
        break
    if interrupted:
        raise interrupted
    if not future.done():
        raise OutOfTime(f"{step} had not ended in time; the storage does not answer")
    return future.result()


def _heard(future: asyncio.Future[T]) -> None:
    """Take the exception of work that nobody waits for any more, so that it is not reported as never retrieved."""
    if not future.cancelled():
        future.exception()
