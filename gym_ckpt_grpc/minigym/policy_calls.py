"""One call on its way through the policy model server: admitted to capture, sent to its worker, written down.

The row of a reply is in the ledger before the caller gets the reply's end, so whatever was delivered is known. A call
that was cancelled before its reply was whole leaves no row. One whose caller leaves after that leaves a row that no
later call builds upon: whether the caller got the reply, nobody can know.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from gym_ckpt_grpc.capture import (
    CaptureAdmission,
    CaptureLedger,
    admission_to_json,
    coordinates_from_json,
    finished_cut,
)
from gym_ckpt_grpc.minigym.event_stream import data_of, event, split_events
from gym_ckpt_grpc.minigym.peers import Peers, Reply
from gym_ckpt_grpc.participants import GenerationCall
from gym_ckpt_grpc.protocol import EpisodeId
from gym_ckpt_grpc.protocol.errors import StaleAttempt, WorkerUnavailable

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Worker:
    """An inference worker. name: its key among the backends of the policy model's owner. url: base of its routes."""

    name: str
    url: str


class PolicyCall:
    """One call. request: the effective request. episode: None for an untagged call, which is not captured."""

    def __init__(
        self,
        call: GenerationCall,
        request: Mapping[str, Any],
        *,
        episode: EpisodeId | None,
        ledger: CaptureLedger | None,
    ) -> None:
        self._call = call
        self._request = request
        self._episode = episode
        self._ledger = ledger if episode is not None else None
        self._admission: CaptureAdmission | None = None

    async def admit(self) -> None:
        """Get a capture admission, if there is a ledger. Raises StaleAttempt for a fenced attempt."""
        if self._ledger is None or self._episode is None:
            return
        messages = self._request["messages"]
        self._admission = await asyncio.to_thread(
            self._ledger.admit, self._episode, self._call.call_id, messages, self._call.continuation
        )
        if self._admission is None:
            raise StaleAttempt(f"the ledger of {self._episode} is fenced", episodes=[self._episode])

    def register(self) -> dict[str, Any]:
        """What the worker is sent, from now on."""
        self._call.registered()
        sent = dict(self._request)
        if self._episode is not None:
            sent |= {"rollout_id": self._episode.rollout_id, "attempt": self._episode.attempt}
        if self._admission is not None:
            sent["capture"] = admission_to_json(self._admission)
        return sent

    async def finish(self, reply: dict[str, Any], message: Mapping[str, Any]) -> None:
        """Take the coordinates out of a whole reply and write its row. message: of the assistant, as delivered."""
        coordinates = reply.pop("capture", None)
        if self._ledger is None or self._admission is None:
            return
        if coordinates is None:
            await self.fail("the worker staged nothing")
            return
        staged = coordinates_from_json(coordinates)
        admission, self._admission = self._admission, None  # it has its row now
        await asyncio.to_thread(self._ledger.append_staged, admission, staged, reply["id"], message)
        if not staged.capture_failed:
            self._call.finished(finished_cut(staged))

    async def fail(self, reason: str) -> None:
        """Write down that the call has no tokens; nothing happens to one that has its row."""
        if self._ledger is not None and self._admission is not None:
            admission, self._admission = self._admission, None
            await asyncio.to_thread(self._ledger.append_failure, admission, reason)


async def ask(peers: Peers, worker: Worker, call: PolicyCall) -> Reply:
    """The worker's whole reply, its row written. Raises WorkerUnavailable if it cannot be asked."""
    try:
        reply = await peers.request("POST", worker.url + PATH, call.register())
    except (aiohttp.ClientError, TimeoutError) as error:
        await call.fail(f"the worker is gone: {error!r}")
        raise WorkerUnavailable(f"the inference worker {worker.name} cannot be asked: {error!r}") from error
    if reply.status >= 300:
        await call.fail(f"the worker answered {reply.status}")
    else:
        await call.finish(reply.body, reply.body["choices"][0]["message"])
    return reply


class Relay:
    """One streamed call. It reads the worker's events as they come, however long the caller's stream is paused.

    So a generation that ends while a checkpoint is open is known to be finished, and no worker waits for a caller.
    """

    def __init__(self, peers: Peers, worker: Worker, call: PolicyCall) -> None:
        self._peers = peers
        self._worker = worker
        self._call = call
        self._refused: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(), name=f"relay of {worker.name}")

    async def refused(self) -> Reply | None:
        """Wait for the reply's head: None if it is a stream, else the error. Raises WorkerUnavailable."""
        await asyncio.wait((self._refused, self._reading), return_when=asyncio.FIRST_COMPLETED)
        if not self._refused.done():
            await self._reading  # raises
        return await self._refused

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events for the caller. Raises what broke the worker's stream."""
        while (each := await self._events.get()) is not None:
            yield each
        await self._reading

    async def close(self) -> None:
        """Stop reading; the worker stops generating if it had not ended."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async with self._peers.stream("POST", self._worker.url + PATH, self._call.register()) as upstream:
                if upstream.status >= 300:
                    await self._call.fail(f"the worker answered {upstream.status}")
                    raw = b"".join([chunk async for chunk in upstream.chunks])
                    self._refused.set_result(Reply(upstream.status, orjson.loads(raw), upstream.headers))
                    return
                self._refused.set_result(None)
                async for each in split_events(upstream.chunks):
                    self._events.put_nowait(await self._seen(each))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            await self._call.fail(f"the worker's stream broke: {error!r}")
            raise WorkerUnavailable(f"the inference worker {self._worker.name} cannot be read: {error!r}") from error
        finally:
            self._events.put_nowait(None)

    async def _seen(self, each: bytes) -> bytes:
        """Write the row when the last event of the reply comes, which has the message and the coordinates."""
        data = data_of(each)
        if data is None or "message" not in data:
            return each
        await self._call.finish(data, data.pop("message"))
        return event(data)
