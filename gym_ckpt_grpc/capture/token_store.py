"""Where staged tokens stand: the port, and the event loop's face of it.

Source: participants section 13.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gym_ckpt_grpc.capture.token_records import TokenRecord
from gym_ckpt_grpc.protocol.errors import UsageError

T = TypeVar("T")


class TokenStore(Protocol):
    """Keeps token records by key. Every call blocks; threads may share it."""

    def put(self, records: Sequence[TokenRecord]) -> None:
        """Make all of them durable before returning; an earlier record of a key is replaced.

        What a call of this names is readable in any process at once. Raises StateUnwritable; then some, all or none
        may be there.
        """

    def get(self, key: str) -> TokenRecord | None:
        """The record of a key, None if there is none. Raises StateCorrupt."""

    def get_many(self, keys: Sequence[str]) -> dict[str, TokenRecord]:
        """The records of these keys that there are. Raises StateCorrupt naming the first that cannot be read."""

    def delete(self, keys: Sequence[str]) -> frozenset[str]:
        """Remove records; gives the keys that had one. Raises StateUnwritable."""

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin like this, sorted."""


@dataclass(slots=True)
class _Write:
    """Records to put or keys to delete, and who waits for it (None: nobody)."""

    records: Sequence[TokenRecord]
    keys: Sequence[str]
    done: asyncio.Future[frozenset[str]] | None


class AsyncTokenStore:
    """A token store for one event loop: calls do not block it, and writes that come together are one.

    While a write is on its way, all that is asked for meanwhile becomes the next one. So many cuts made at one
    moment cost as many syncs as two of them do. Close it at the end.
    """

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        self._waiting: list[_Write] = []
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        # Threads of its own: the loop's common ones may all be busy where a cut has a second.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="token store")
        # Another: what is built is stored while the next is built, so a sweep short of time has its first cuts.
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="token records")

    async def put(self, records: Sequence[TokenRecord]) -> None:
        """Return once all are durable. Raises StateUnwritable. Cancelling it leaves the write under way."""
        await self._ask(records, ())

    async def delete(self, keys: Sequence[str]) -> frozenset[str]:
        """Remove records, after all that was asked for before; gives the keys that had one."""
        return await self._ask((), keys)

    def discard(self, keys: Sequence[str]) -> None:
        """As `delete`, but nobody waits, and a failure is dropped: for records that no acknowledgement names."""
        if not self._closed:
            self._enqueue(_Write((), keys, None))

    async def get(self, keys: Sequence[str]) -> dict[str, TokenRecord]:
        """The records of these keys that there are. Raises StateCorrupt."""
        return await self._run(lambda: self.store.get_many(keys))

    async def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin like this, sorted."""
        return await self._run(lambda: self.store.keys(prefix))

    async def build(self, record: Callable[[], TokenRecord]) -> TokenRecord:
        """Build a record, which takes a while with a long context, beside the event loop and the store's own work."""
        return await asyncio.get_running_loop().run_in_executor(self._builder, record)

    async def close(self) -> None:
        """Finish the writes under way, refuse later ones."""
        self._closed = True
        if self._writer is not None:
            await asyncio.wait([self._writer])
        self._threads.shutdown(wait=False)
        self._builder.shutdown(wait=False)

    # ---- inside

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _ask(self, records: Sequence[TokenRecord], keys: Sequence[str]) -> frozenset[str]:
        if self._closed:
            raise UsageError("the token store is closed")
        done: asyncio.Future[frozenset[str]] = asyncio.get_running_loop().create_future()
        self._enqueue(_Write(records, keys, done))
        return await done

    def _enqueue(self, write: _Write) -> None:
        self._waiting.append(write)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="token store writer")

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # whoever is about to ask in this loop turn takes part
                writes, self._waiting = self._waiting, []
                await self._write(writes)
        finally:
            self._writer = None

    async def _write(self, writes: list[_Write]) -> None:
        """All puts, then all deletions: a key is deleted after it was put, and never put again."""
        puts = [write for write in writes if write.records]
        deletions = [write for write in writes if not write.records]
        await self._step(puts, lambda: self._put(puts))
        await self._step(deletions, lambda: self.store.delete([key for write in deletions for key in write.keys]))

    def _put(self, writes: list[_Write]) -> frozenset[str]:
        self.store.put([record for write in writes for record in write.records])
        return frozenset()

    async def _step(self, writes: list[_Write], work: Callable[[], frozenset[str]]) -> None:
        if not writes:
            return
        result: frozenset[str] | Exception
        try:
            result = await self._run(work)
        except Exception as error:
            result = error
        for write in writes:
            if write.done is None or write.done.done():
                continue  # nobody waits any more
            if isinstance(result, Exception):
                write.done.set_exception(result)
            else:
                write.done.set_result(result.intersection(write.keys))
