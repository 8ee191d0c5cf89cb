"""A TLS channel that goes on when its certificate files change: new calls on a new connection, others on theirs.

A channel of gRPC keeps the credentials that it was made with, so that a long job would end with its certificate. Here
a second channel is made when the files have changed, and takes over once it is connected; so files that the server
does not accept leave the one before in use. The first is closed when its last call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import grpc

from gym_ckpt_grpc.auth import ClientTls

PATIENCE = 5.0
"""Seconds without a connection after which a new certificate is warned of."""
AGAIN = 1.0
"""Seconds between two tries to connect with it, and between two looks at calls that keep an old connection open."""
log = logging.getLogger("gym_ckpt_grpc.auth")

Open = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]


class _Line:
    """One channel of gRPC, and the calls that were begun on it.

    Calls are looked at, not counted: gRPC tells of no end of a call that is cancelled at some points, or is dropped.
    """

    def __init__(self, channel: grpc.aio.Channel, version: int) -> None:
        self.channel = channel
        self.version = version
        self.used = False
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()

    def begun(self, call: Any) -> None:
        self.used = True
        self._calls.add(call)

    async def close_when_empty(self) -> None:
        while True:
            if all(call.done() for call in self._calls):
                return await self.channel.close()
            await asyncio.sleep(AGAIN)


class _MultiCallable:
    """A method of whichever channel is current when it is called."""

    def __init__(self, line: Callable[[], _Line], make: Callable[[grpc.aio.Channel], Any]) -> None:
        self._line = line
        self._make = make
        self._made: tuple[_Line, Any] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        line = self._line()
        if self._made is None or self._made[0] is not line:
            self._made = (line, self._make(line.channel))
        call = self._made[1](*arguments, **options)
        line.begun(call)
        return call


class ReloadingChannel(grpc.aio.Channel):
    """See above. Made, used and closed in one event loop. open_with: makes a channel of these credentials."""

    def __init__(self, open_with: Open, tls: ClientTls) -> None:
        self._open_with = open_with
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired: set[_Line] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._closed = False
        self._current = self._open()
        self._end_listening = tls.listen(self._changed_elsewhere)
        if tls.version != self._current.version:  # changed just now, for other channels that have these files
            self._changed()

    # ---- the channel as everyone else's

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._method("unary_unary", *arguments, **options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._method("unary_stream", *arguments, **options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._method("stream_unary", *arguments, **options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._method("stream_stream", *arguments, **options)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Close every connection; calls under way have `grace` seconds."""
        self._closed = True
        self._end_listening()
        tasks = [task for task in (*self._tasks, self._renewing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lines, self._retired = {self._current, *self._retired}, set()
        await asyncio.gather(*(line.channel.close(grace) for line in lines))

    async def __aenter__(self) -> ReloadingChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _method(self, arity: str, *arguments: Any, **options: Any) -> Any:
        def make(channel: grpc.aio.Channel) -> Any:
            return getattr(channel, arity)(*arguments, **options)

        return _MultiCallable(self._line, make)

    def _line(self) -> _Line:
        if self._closed:  # the core crashes the process where a method is made of a channel that is closed
            raise grpc.aio.UsageError("Channel is closed.")
        return self._current

    # ---- changes

    def _open(self) -> _Line:
        version = self._tls.version
        return _Line(self._open_with(self._tls.credentials()), version)

    def _changed_elsewhere(self) -> None:
        """Called in another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody calls here any more
            self._loop.call_soon_threadsafe(self._changed)

    def _changed(self) -> None:
        if self._closed:
            return
        if self._renewing is not None:
            self._renewing.cancel()
        self._renewing = self._loop.create_task(self._renew(), name="renew a TLS channel")

    async def _renew(self) -> None:
        line = self._open()
        try:
            if self._current.used:
                await self._connected(line.channel)
        except BaseException:
            await line.channel.close()
            raise
        before, self._current = self._current, line
        self._retired.add(before)
        task = self._loop.create_task(before.close_when_empty(), name="end a TLS channel")
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, before))

    def _ended(self, line: _Line, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._retired.discard(line)

    async def _connected(self, channel: grpc.aio.Channel) -> None:
        """Wait until the server has accepted a connection: with TLS 1.3 it says so after the handshake only."""
        since, told = self._loop.time(), False
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN):
                    await channel.wait_for_state_change(state)
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await asyncio.sleep(AGAIN)
            if not told and self._loop.time() - since > PATIENCE:
                told = True
                log.warning("no connection with the changed %r yet; the one before goes on being used", self._tls)
