"""Steps of operations that run in owned tasks and threads, each with a span, a duration and an outcome of its own.

A task copies the context it was created in, so that a step is a child of the call that began it, and ends by itself
when that call has long ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.ports import OpeningCause
from gym_ckpt_grpc.control.tasks import succeeded
from gym_ckpt_grpc.control.watchdog import TaskKind
from gym_ckpt_grpc.control.work import Work
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.storage import PartManifestInfo, WriteStopped
from gym_ckpt_grpc.telemetry import Timed, catalogue, outcome_of
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import SpanType
from gym_ckpt_grpc.telemetry.spans import CANCELLED, OK

T = TypeVar("T")


@contextlib.contextmanager
def step(core: Core, work: Work, span: SpanType, *, attempt: bool = False) -> Iterator[Timed]:
    """A step of an owned task as a block. attempt: whether it counts as one."""
    with core.recorder.step(span, attempt=attempt) as timed:
        try:
            yield timed
        except BaseException as error:
            timed.end(_outcome(work, error))
            raise


def _outcome(work: Work, error: BaseException | None) -> str:
    """What was cut off by a Resume or by the lease has the code of its waiters: no caller went away."""
    if isinstance(error, asyncio.CancelledError | WriteStopped):
        return ErrorCode.STALE_CHECKPOINT.name if work.ended else CANCELLED
    return outcome_of(error)


async def written(
    core: Core, work: Work, write: Callable[[], tuple[PartManifestInfo, T]]
) -> tuple[PartManifestInfo, T]:
    """Run a write on a thread, which goes on where the Commit that waits for it is cancelled.

    Its span, duration and age are those of the thread. Volume counts when the write has succeeded, once for a
    checkpoint, also if nobody waits any more.
    """
    timed = core.recorder.step(catalogue.WRITE, attempt=True)
    background = core.watchdog.enter(TaskKind.WRITE, work.checkpoint_id)

    def ended(outcome: str) -> None:
        if core.watchdog.leave(background):
            timed.end(outcome)

    def on_thread() -> tuple[PartManifestInfo, T]:
        background.thread = threading.get_ident()
        try:
            part, more = write()
        except BaseException as error:
            ended(_outcome(work, error))
            raise
        timed.set(at.RECORDS, part.record_count)
        timed.set(at.BYTES, part.bytes)
        if not work.counted:
            work.counted = True
            core.recorder.volume("commit", records=part.record_count, size=part.bytes)
        ended(OK)
        return part, more

    background.abandon = lambda: ended(CANCELLED)
    try:
        return await core.in_thread(on_thread)
    except BaseException as error:
        if not background.thread:  # no thread had taken it up, and none will
            ended(_outcome(work, error))
        raise


def opened(core: Core, work: Work, cause: OpeningCause) -> None:
    """The doors are open again: the price of this closing, once."""
    if not work.pause_told:
        work.pause_told = True
        pause = core.clock() - work.closed_at
        core.recorder.count(catalogue.PAUSE, 1000 * pause, labels={at.CAUSE: cause.value})


@contextlib.contextmanager
def preempting(core: Core, task: asyncio.Task[Any] | None, operation: str) -> Iterator[None]:
    """Around the ending of work by a Resume or an expired lease: what still ran, and came to nothing, counts."""
    ran = task is not None and not task.done()
    yield
    if ran and not succeeded(task):
        core.recorder.event("preempted", operation=operation)
