"""Server-sent events: whole events out of any chunks, and work that ends when its caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from gym_ckpt_grpc.minigym.event_stream import DONE, EventStream, data_of, event, split_events, while_connected

_EVENTS = [event({"n": 1, "text": "a\n\nb"}), event([2]), DONE]


async def _chunks(raw: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_come_whole_out_of_any_chunks(size: int) -> None:
    assert [each async for each in split_events(_chunks(b"".join(_EVENTS), size))] == _EVENTS
    assert [data_of(each) for each in _EVENTS] == [{"n": 1, "text": "a\n\nb"}, [2], None]


async def test_a_torn_stream_is_an_error_behind_its_whole_events() -> None:
    seen: list[bytes] = []

    async def read() -> None:
        async for each in split_events(_chunks(b"".join(_EVENTS)[:-1], 5)):
            seen.append(each)

    with pytest.raises(ValueError, match="within an event"):
        await read()
    assert seen == _EVENTS[:-1]
    with pytest.raises(ValueError, match="without data"):
        data_of(b"event: ping\n\n")


class _Caller:
    """An ASGI caller that reads until it leaves."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.got: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)


async def test_work_gives_its_result_raises_its_error_or_is_cancelled_with_its_caller() -> None:
    caller = _Caller()
    assert await while_connected(caller.receive, asyncio.sleep(0, 7)) == 7

    async def fails() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        await while_connected(caller.receive, fails())
    started, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> int:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1

    doing = asyncio.create_task(while_connected(caller.receive, waits()))
    await started.wait()
    caller.left.set()
    assert await doing is None
    assert ended.is_set()


async def test_a_stream_sends_each_event_alone_and_is_closed_once_however_it_ends() -> None:
    closed: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for each in _EVENTS:
            yield each

    async def close() -> None:
        closed.append("whole")

    caller = _Caller()
    await EventStream(events(), closed=close)({"type": "http"}, caller.receive, caller.send)
    head, *bodies = caller.got
    assert dict(head["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in dict(head["headers"])
    assert [message["body"] for message in bodies] == [*_EVENTS, b""]
    assert [message.get("more_body", False) for message in bodies] == [True, True, True, False]

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            yield DONE
            caller.left.set()
            await asyncio.Event().wait()
        finally:
            closed.append("iterator")

    async def close_late() -> None:
        closed.append("left")

    await EventStream(endless(), closed=close_late)({"type": "http"}, caller.receive, caller.send)
    assert closed == ["whole", "iterator", "left"]
