"""A network between a client and a server that a test can break: cut it, stall it, slow it, lose one reply.

    async with Network() as network:
        cable = await network.cable(served.address)
        channel = open_channel(cable.address)
        cable.lose_reply()

It forwards bytes on loopback, and reads only the frame heads of plain-text HTTP/2, to know where a reply ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

LOOPBACK = "127.0.0.1"
CHUNK = 64 << 10
_FRAME_HEAD = 9
_DATA, _HEADERS, _END_STREAM = 0, 1, 1


class Frames:
    """Splits the bytes that a server sends into HTTP/2 frames."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Whole frames, heads included."""
        self._buffer += data
        while len(self._buffer) >= _FRAME_HEAD:
            end = _FRAME_HEAD + int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < end:
                return
            frame, self._buffer = self._buffer[:end], self._buffer[end:]
            yield frame


def _answers(frame: bytes) -> bool:
    """Whether a frame is a part of a reply."""
    return frame[3] in (_DATA, _HEADERS)


def _ends_reply(frame: bytes) -> bool:
    """Whether a frame is the end of a reply: its trailers."""
    return frame[3] == _HEADERS and bool(frame[4] & _END_STREAM)


class Cable:
    """One way to one server, by an address of its own.

    address: for clients. connected: connections at this moment. lost: set once a reply was lost.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self.connected = 0
        self.lost = asyncio.Event()
        self._target = target
        self._losing = False
        self._cut = False
        self._delay = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def cut(self) -> None:
        """Break every connection, and refuse new ones until `mend`."""
        self._cut = True
        for link in self._links:
            link.cancel()

    def stall(self) -> None:
        """Keep the connections and carry nothing any more, as when a cable is pulled; until `mend`."""
        self._flowing.clear()

    def mend(self) -> None:
        """Carry everything again, at once: no cut, no stall, no delay."""
        self._cut, self._delay = False, 0.0
        self._flowing.set()

    def delay(self, seconds: float) -> None:
        """Each piece of data waits so long, in either direction, until `mend`."""
        self._delay = seconds

    def lose_reply(self) -> None:
        """The server carries out the next call and answers; the answer and its connection are lost on the way."""
        self.lost.clear()
        self._losing = True

    async def until(self, condition: Callable[[], bool], *, within: float = 10.0) -> None:
        """Wait until a condition on this cable holds, such as `lambda: cable.connected == 0`."""
        async with asyncio.timeout(within):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    # ---- inside

    async def lay(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._connect, LOOPBACK, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    async def remove(self) -> None:
        """End all of it."""
        assert self._server is not None
        self._server.close()
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            if not self._cut:
                await self._carry(reader, writer)
        except (asyncio.CancelledError, OSError):
            pass  # cut, or one of the ends has gone
        finally:
            self._links.discard(link)
            writer.transport.abort()
            self._changed.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await open_address(self._target)
        self.connected += 1
        self._changed.set()
        ways = [
            asyncio.create_task(self._pump(reader, far_writer), name="to the server"),
            asyncio.create_task(self._answer(far_reader, writer), name="to the client"),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.connected -= 1
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            await self._send(data, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames()
        while data := await reader.read(CHUNK):
            for frame in frames.feed(data):
                if self._losing and _answers(frame):
                    if _ends_reply(frame):
                        self._losing = False
                        self.lost.set()
                        return
                    continue
                await self._send(frame, writer)

    async def _send(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if self._delay:
            await asyncio.sleep(self._delay)
        await self._flowing.wait()
        writer.write(data)
        await writer.drain()


async def open_address(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to `host:port` or `unix:path`. Raises OSError; ValueError for another form of address."""
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:").removeprefix("//"))
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} is neither host:port nor unix:path")
    return await asyncio.open_connection(host.strip("[]"), int(port))


class Network:
    """Cables that end with the block."""

    def __init__(self) -> None:
        self._cables: list[Cable] = []

    async def cable(self, target: str) -> Cable:
        """A new cable to a server at `host:port` or `unix:path`."""
        cable = Cable(target)
        await cable.lay()
        self._cables.append(cable)
        return cable

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for cable in self._cables:
            with contextlib.suppress(OSError):
                await cable.remove()
