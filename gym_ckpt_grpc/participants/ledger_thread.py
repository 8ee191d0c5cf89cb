"""The one thread in which a policy model owner uses its capture ledger, so that no file stops the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from gym_ckpt_grpc.control.generation import Ledger, Row, StagedRows
from gym_ckpt_grpc.protocol.ids import EpisodeId

P = ParamSpec("P")
T = TypeVar("T")


class LedgerThread:
    """Runs what touches the ledger, one after the other.

    retiring: fences attempts and removes them and earlier ones. discarding: removes exactly these.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._thread = ThreadPoolExecutor(1, "gymckpt-ledger")
        self.retiring = _Batches(self, lambda episodes: ledger.retire(episodes))
        self.discarding = _Batches(self, lambda episodes: ledger.discard(episodes))

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it in the thread. Cancelled, what has begun goes on, and the next waits for its end."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **kwargs))

    async def stage(self, rows: Mapping[EpisodeId, Sequence[Row]]) -> StagedRows:
        """Stage rows; cancelled, what was staged is dropped."""
        staging = self._thread.submit(self.ledger.stage, rows)
        try:
            return await asyncio.wrap_future(staging)
        except asyncio.CancelledError:
            self._thread.submit(self._drop, staging)
            raise

    def _drop(self, staging: Future[StagedRows]) -> None:
        if not staging.cancelled() and staging.exception() is None:
            self.ledger.drop(staging.result())

    def close(self) -> None:
        """Let the thread end. Only at the end of the process."""
        self._thread.shutdown(wait=False)


class _Batches:
    """Work whose cost is mostly that of its syncs: what comes while the thread is busy is done in one batch."""

    def __init__(self, thread: LedgerThread, work: Callable[[Sequence[EpisodeId]], object]) -> None:
        self._thread = thread
        self._work = work
        self._waiting: list[EpisodeId] = []
        self._batch: asyncio.Task[None] | None = None

    async def add(self, episodes: Iterable[EpisodeId]) -> None:
        """Do it for these, together with all others that come meanwhile. Cancelled, it is done all the same."""
        self._waiting += episodes
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_task(self._do(), name="batch of the ledger")
        await asyncio.shield(self._batch)

    async def _do(self) -> None:
        await self._thread.run(lambda: None)  # wait for the thread: what comes until then is in this batch
        episodes, self._waiting, self._batch = self._waiting, [], None
        await self._thread.run(self._work, episodes)
