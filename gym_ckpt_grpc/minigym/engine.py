"""Continuous batching: one decode loop that gives every active sequence one token a tick."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

Advance = Callable[[], bool | None]
"""Makes one token of one sequence: True when that was the last, None if it stood still and made none. Quick, and
without I/O that can wait."""

STILL = 0.001
"""Seconds between two ticks in which every sequence stands still: without a tick the loop would spin, and starve the
threads that make cuts durable."""


class Engine:
    """Decodes many sequences together, as an inference server does.

    tick: seconds from one token of a sequence to its next, >= 0; a slow tick delays all of them and is not
    caught up. A sequence joins at the next tick and leaves with its last token, with an error of its own, or
    when its caller is cancelled. Used as an async context manager, which owns the loop's task.
    """

    def __init__(self, *, tick: float = 0.004) -> None:
        if tick < 0:
            raise ValueError(f"tick {tick} is negative")
        self.tick = tick
        self._active: dict[asyncio.Future[None], Advance] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def active(self) -> int:
        """Number of sequences being decoded."""
        return len(self._active)

    async def run(self, advance: Advance) -> None:
        """Call `advance` once a tick until it returns True. What it raises ends this sequence only."""
        if self._task is None or self._task.done():
            raise RuntimeError("the engine is not running")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._active[done] = advance
        self._wake.set()
        try:
            await done
        finally:
            self._active.pop(done, None)

    def decode_once(self) -> bool:
        """One tick: one token for every sequence that is active now. False if all of them stood still."""
        moved = False
        for done, advance in tuple(self._active.items()):
            if done.done():
                continue
            try:
                finished = advance()
            except Exception as error:
                done.set_exception(error)
            else:
                moved = moved or finished is not None
                if finished:
                    done.set_result(None)
            if done.done():
                self._active.pop(done, None)
        return moved

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._decode(), name="minigym decode loop")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop decoding. Sequences still active end as cancelled."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for done in tuple(self._active):
            done.cancel()
        self._active.clear()

    async def _decode(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            if not self._active:
                self._wake.clear()
                await self._wake.wait()
                due = clock()
            due = max(due + self.tick, clock())
            await asyncio.sleep(due - clock() if self.tick else 0)
            if not self.decode_once():
                await asyncio.sleep(STILL)
