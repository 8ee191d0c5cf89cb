"""Server-sent events, and work that stops when its caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The last event of an OpenAI stream."""


class Receives(Protocol):
    """An ASGI `receive`."""

    def __call__(self) -> Awaitable[Any]: ...


def event(data: Any) -> bytes:
    """One event with JSON data."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def data_of(event: bytes) -> Any:
    """The JSON data of one event made by `event`; None for DONE. Raises ValueError for anything else."""
    if event == DONE:
        return None
    if not event.startswith(b"data: "):
        raise ValueError(f"an event without data: {event[:80]!r}")
    return orjson.loads(event.removeprefix(b"data: "))


async def split_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events in a stream of bytes, each whole with its blank line. Raises ValueError if the last one is torn."""
    left = b""
    async for chunk in chunks:
        *events, left = (left + chunk).split(b"\n\n")
        for each in events:
            yield each + b"\n\n"
    if left:
        raise ValueError(f"the stream ends within an event: {left[:80]!r}")


async def while_connected(receive: Receives, work: Coroutine[Any, Any, T]) -> T | None:
    """Do the work until it ends or the caller goes away (then it is cancelled, and the result is None).

    receive: of a request whose body has been read.
    """
    doing = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        doing.cancel()
        gone.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _disconnected(receive: Receives) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A reply of server-sent events, each sent in one body message; cancelled when the caller goes away.

    What the iterator raises breaks the stream off, which a reader notices. closed: awaited at the end, however it
    comes, also when the iterator was never begun.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, closed: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        finally:
            await self._closed()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for each in events:
                await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
