"""The end of a checkpoint: opening admission, tried until it works, telling what became of the records, and freeing
what was installed for nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.error_details import log
from gym_ckpt_grpc.control.ports import Opening, OpeningCause
from gym_ckpt_grpc.control.steps import opened
from gym_ckpt_grpc.control.tasks import hook_cancelled, set_within
from gym_ckpt_grpc.control.watchdog import TaskKind
from gym_ckpt_grpc.control.work import Work
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase

FIRST_BACKOFF, LAST_BACKOFF = 0.1, 5.0


async def open_admission(
    core: Core,
    work: Work,
    cause: OpeningCause,
    wanted: Callable[[], bool],
    failed: Callable[[Exception], None] = lambda error: None,
) -> None:
    """Call the owner's hook until it succeeds, with back-off, as long as `wanted`. failed: told of each try that did.

    `work.retry_open` cuts a pause short: a controller's Resume gets in between two tries.
    """
    backoff = FIRST_BACKOFF
    while wanted():
        work.retry_open.clear()
        try:
            with hook_cancelled():
                await core.owner.open_admission(Opening(cause))
            opened(core, work, cause)
            return
        except Exception as error:
            log.error("opening admission failed, trying again: %s", error)
            core.recorder.event("open_failed")
            failed(error)
        await set_within(work.retry_open, backoff * random.uniform(0.8, 1.2))
        backoff = min(backoff * 2, LAST_BACKOFF)


async def give_up(core: Core, work: Work, phase: Phase) -> None:
    """Back to IDLE after a close or an install that failed, without fencing the id.

    Does nothing once another call has taken the work out of `phase`: a late failure must not open what a newer
    checkpoint has closed.
    """

    def wanted() -> bool:
        return core.work is work and core.machine.phase is phase

    with core.watchdog.running(TaskKind.REOPEN, work.checkpoint_id):
        await open_admission(core, work, OpeningCause.CLOSE_FAILED, wanted)
    if wanted():
        work.end()
        core.end_open(fenced=False)


def tell_fate(core: Core, work: Work, *, durable: bool) -> None:
    """Tell the owner, once, whether the records of a checkpoint are in storage or never will be."""
    if work.fate_told:
        return
    work.fate_told = True
    try:
        core.owner.write_ended(work.checkpoint_id, durable)
    except Exception as error:
        log.error("the owner failed on the end of the write of %s: %s", work.checkpoint_id, error)


async def free_restored(core: Core, episodes: Iterable[EpisodeId]) -> None:
    """Free what a Restore made live, side by side; one whose hook fails keeps no other from being freed."""
    listed = list(episodes)
    results = await asyncio.gather(*map(core.owner.delete_restored, listed), return_exceptions=True)
    for episode, result in zip(listed, results, strict=True):
        if isinstance(result, BaseException):
            log.error("freeing restored %s failed: %r", episode, result)
