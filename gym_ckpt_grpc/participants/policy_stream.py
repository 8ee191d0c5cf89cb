"""A policy call whose reply is a stream of events, read while the session counts at its boundary.

The events are read by a task of the stream's own, so that the end of a reply that was on the wire when admission
closed is known, and kept, however slowly the loop takes them. Source: participants section 9.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gym_ckpt_grpc.participants.agent_sessions import SessionContext
from gym_ckpt_grpc.participants.policy_calls import PolicyRequest
from gym_ckpt_grpc.participants.refusals import raise_refusal


@dataclass(frozen=True, slots=True)
class StreamReply:
    """A reply that has begun. events: JSON-able, such as the `data` of server-sent events; body: of a failed one."""

    status: int
    headers: Mapping[str, str]
    events: AsyncIterator[Any]
    body: Any = None


StreamTransport = Callable[[PolicyRequest], AbstractAsyncContextManager[StreamReply]]
"""Sends a request to the policy server and nowhere else; leaving the block ends the call."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """The call failed."""

    error: Exception


class _End:
    """The stream has ended."""


_END = _End()


class PolicyStream(AbstractAsyncContextManager["PolicyStream"]):
    """One streamed call. Made by `PolicyClient.stream`; gives its events once it is entered.

    While it lasts the last boundary stands for the session, so the loop may do nothing with an event that a second
    run of it would not undo. The end of the stream, and an error, are given once no checkpoint is open; leaving the
    block early waits for that as well. Entering raises the ControlError that a gate answered, and what the
    transport raises.

    session: whose call. key: under which a whole reply is kept. waits: whether the session counts at its boundary.
    saw: told of the headers of the reply.
    """

    def __init__(
        self,
        session: SessionContext,
        request: PolicyRequest,
        transport: StreamTransport,
        *,
        key: str,
        waits: bool,
        saw: Callable[[Mapping[str, str]], None],
    ) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.body: Any = None
        self._session = session
        self._request = request
        self._transport = transport
        self._key = key
        self._waits = waits
        self._saw = saw
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._waiting = False
        self._ended = False

    async def __aenter__(self) -> Self:
        kept = self._session.take_restored_reply(self._key)
        if kept is not None:
            self.status, self.headers = kept["status"], kept["headers"]
            for event in kept["events"]:
                self._arrived.put_nowait(event)
            self._arrived.put_nowait(_END)
            return self
        if self._waits:
            self._session.begin_waiting()
            self._waiting = True
        self._reader = asyncio.create_task(self._read(), name=f"policy stream of {self._session.key}")
        try:
            begun = await self._next()
            self.status, self.headers, self.body = begun.status, begun.headers, begun.body
            if self.status >= 300:
                await self._stop()
                raise_refusal(self.status, self.body, self.headers)
        except BaseException as error:
            await self._leave(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._ended:
            raise StopAsyncIteration
        event = await self._next()
        if event is _END:
            self._ended = True
            raise StopAsyncIteration
        return event

    # ---- inside

    async def _next(self) -> Any:
        """What arrives next. An end or an error comes only when no checkpoint is open."""
        item = await self._arrived.get()
        if item is _END or isinstance(item, _Failed):
            await self._stop()
        if isinstance(item, _Failed):
            self._ended = True
            raise item.error
        return item

    async def _stop(self) -> None:
        """Wait no more; while a checkpoint is open, stay at the boundary until it is over."""
        if not self._waiting:
            return
        self._waiting = False
        self._session.end_waiting()
        if self._session.checkpoint_open:
            await self._session.stay()

    async def _leave(self, error: BaseException | None) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        if self._waiting and error is not None and not isinstance(error, Exception):
            # A cancellation goes through at once.
            self._waiting = False
            self._session.end_waiting(cancelled=True)
        await self._stop()

    async def _read(self) -> None:
        events: list[Any] = []
        try:
            async with self._transport(self._request) as reply:
                self._saw(reply.headers)
                self._arrived.put_nowait(reply)
                async for event in reply.events:
                    events.append(event)
                    self._arrived.put_nowait(event)
                if self._waits and reply.status < 300:
                    whole = {"status": reply.status, "headers": dict(reply.headers), "events": events}
                    self._session.keep(self._key, whole)
                self._arrived.put_nowait(_END)
        except Exception as error:
            self._arrived.put_nowait(_Failed(error))
