"""What holds a collection's rows back while a checkpoint or a restore has dispatch closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from gym_ckpt_grpc.protocol.errors import InvalidArgument, OutOfTime
from gym_ckpt_grpc.protocol.ids import EpisodeId

PATIENCE = 600.0
"""Seconds that a row waits for dispatch to open before it fails by name."""


class DispatchGate:
    """Holds rows back while a checkpoint or a restore has dispatch closed: `semaphore` of the framework's collection.

    Entered with `async with` around each row. limit: rows inside at once; None: no limit. patience: seconds that one
    of them waits for the gate to open; then OutOfTime names who keeps it closed. Waiting for a place among `limit` has
    no bound. Bound to the loop that it is first used on.
    """

    def __init__(self, limit: int | None = None, *, patience: float = PATIENCE) -> None:
        if limit is not None and limit < 1:
            raise InvalidArgument(f"limit is {limit}: at least one row must be let in")
        self._places = asyncio.Semaphore(limit) if limit is not None else None
        self._patience = patience
        self._closed: dict[object, str] = {}
        self._open = asyncio.Event()
        self._open.set()

    @property
    def patience(self) -> float:
        """Seconds that a row waits."""
        return self._patience

    @property
    def is_open(self) -> bool:
        """Whether a row that comes now goes on at once."""
        return not self._closed

    @property
    def reasons(self) -> tuple[str, ...]:
        """Who keeps it closed, the first one first."""
        return tuple(self._closed.values())

    def close(self, reason: str) -> Callable[[], None]:
        """Close it until the returned function is called; it may be called again. Open once nobody keeps it closed."""
        key = object()
        self._closed[key] = reason
        self._open.clear()

        def reopen() -> None:
            self._closed.pop(key, None)
            if not self._closed:
                self._open.set()

        return reopen

    @contextmanager
    def closed(self, reason: str) -> Iterator[None]:
        """Closed inside the block."""
        reopen = self.close(reason)
        try:
            yield
        finally:
            reopen()

    async def passed(self, waiting: str = "a row", episodes: Iterable[EpisodeId] = ()) -> None:
        """Return once it is open, without giving up the loop in between. Raises OutOfTime after `patience` seconds."""
        try:
            async with asyncio.timeout(None if self.is_open else self._patience):
                while not self.is_open:
                    await self._open.wait()
        except TimeoutError:
            text = f"{waiting} waited {self._patience:g} s for dispatch, closed by: {'; '.join(self.reasons)}"
            raise OutOfTime(text, episodes=episodes) from None

    async def __aenter__(self) -> Self:
        if self._places is not None:
            await self._places.acquire()
        try:
            await self.passed()
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._places is not None:
            self._places.release()
