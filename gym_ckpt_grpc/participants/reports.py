"""What every owner does alike: reports, lists in batches, and stopping several things side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import MAX_LISTED, PrepareReport


def make_report(
    limit: int, blocking: Blocking, restarts: Sequence[EpisodeId], counts: Mapping[str, int]
) -> PrepareReport:
    """A report of at most `limit` blockers, oldest first, and at most MAX_LISTED restarts, with exact counts."""
    return PrepareReport(
        blockers=blocking.oldest(limit),
        blocker_count=len(blocking),
        restarts=tuple(restarts[:MAX_LISTED]),
        restart_count=len(restarts),
        counts=dict(counts),
    )


def batches(episodes: Iterable[EpisodeId], size: int = MAX_LISTED) -> Iterator[Sequence[EpisodeId]]:
    """Cut a list into batches of `size`."""
    listed = list(episodes)
    for start in range(0, len(listed), size):
        yield listed[start : start + size]


def covers(retired: EpisodeId, episode: EpisodeId) -> bool:
    """Whether a retire of one attempt also stops this episode: the same rollout, the same or an earlier attempt."""
    return episode.rollout_id == retired.rollout_id and episode.attempt <= retired.attempt


async def run_side_by_side(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their end, a failure delays no other; then raise the first failure."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
