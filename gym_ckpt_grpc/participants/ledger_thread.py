"""The one thread in which a policy model owner uses its capture ledger, so that no file stops the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from gym_ckpt_grpc.control.generation import Ledger, Row, StagedRows
from gym_ckpt_grpc.protocol.ids import EpisodeId

P = ParamSpec("P")
T = TypeVar("T")


class LedgerThread:
    """Runs what touches the ledger, one after the other. Retires that come while it is busy become one batch."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._thread = ThreadPoolExecutor(1, "gymckpt-ledger")
        self._retiring: list[EpisodeId] = []
        self._batch: asyncio.Task[None] | None = None

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

    async def retire(self, episode: EpisodeId) -> None:
        """Fence an attempt and remove it and earlier ones, together with all others that come meanwhile."""
        self._retiring.append(episode)
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_task(self._retire_all(), name="fence ledgers")
        await asyncio.shield(self._batch)

    async def _retire_all(self) -> None:
        await self.run(lambda: None)  # wait for the thread: what comes until then is in this batch
        episodes, self._retiring, self._batch = self._retiring, [], None
        await self.run(self.ledger.retire, episodes)

    def close(self) -> None:
        """Let the thread end. Only at the end of the process."""
        self._thread.shutdown(wait=False)
