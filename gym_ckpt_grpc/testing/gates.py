"""A step of a fake that a test can hold up, or fail."""

from __future__ import annotations

import asyncio


class Gate:
    """One hook of a fake owner. `count`: how often it was entered."""

    def __init__(self) -> None:
        self.count = 0
        self._error: Exception | None = None
        self._entered = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """From now on the step waits for `release`."""
        self._open.clear()

    def release(self) -> None:
        """Let the step go on."""
        self._open.set()

    def fail(self, error: Exception | None) -> None:
        """The step raises this from now on, once it is not held; with None it works again."""
        self._error = error

    async def reached(self, count: int = 1, *, within: float = 10.0) -> None:
        """Wait until the step was entered so often, at most `within` seconds; raises TimeoutError."""
        async with asyncio.timeout(within):
            while self.count < count:
                self._entered.clear()
                await self._entered.wait()

    async def step(self) -> None:
        """What the fake calls."""
        self.count += 1
        self._entered.set()
        await self._open.wait()
        if self._error is not None:
            raise self._error
