"""A coordinator served over a running fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import pytest_asyncio

from gym_ckpt_grpc.auth import TokenSource
from gym_ckpt_grpc.control import error_from, open_channel, wire
from gym_ckpt_grpc.coordinator import Coordinator
from gym_ckpt_grpc.coordinator.served import CoordinatorServer
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import coordinator_pb2 as pb
from gymckpt.v1 import coordinator_pb2_grpc
from tests.coordinator.fleet_of_nodes import Nodes

if TYPE_CHECKING:
    from gymckpt.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

T = TypeVar("T")
WITHIN = 20.0


async def typed(call: Awaitable[T]) -> T:
    """The reply, or the typed error of the refusal."""
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        error = error_from(failure)
        if error is None:
            raise
        raise error from failure


@dataclass
class Served:
    """A served coordinator and a client of it."""

    nodes: Nodes
    coordinator: Coordinator
    server: CoordinatorServer
    channel: grpc.aio.Channel

    @property
    def stub(self) -> CoordinatorServiceAsyncStub:
        return coordinator_pb2_grpc.CoordinatorServiceStub(self.channel)

    async def send(self, method: str, timeout: float = WITHIN, **fields: Any) -> Any:
        """One unary call; a refusal is raised as its typed error."""
        request = getattr(pb, f"{method}Request")(**fields)
        return await typed(getattr(self.stub, method)(request, timeout=timeout))

    async def refusal(self, method: str, **fields: Any) -> ControlError:
        try:
            reply = await self.send(method, **fields)
        except ControlError as error:
            return error
        raise AssertionError(f"{method} was not refused: {reply}")

    async def stream(self, method: str, timeout: float = WITHIN, **fields: Any) -> list[Any]:
        """A whole stream."""
        request = getattr(pb, f"{method}Request")(**fields)
        call = getattr(self.stub, method)(request, timeout=timeout)
        try:
            return [message async for message in call]
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure) or failure from failure

    async def prepared(self, checkpoint_id: str = "ck-1", **fields: Any) -> Any:
        reply = await self.send("PrepareCheckpoint", checkpoint_id=checkpoint_id, **fields)
        assert reply.state == pb.CHECKPOINT_STATE_PREPARED, reply
        return reply

    async def committed(self, in_flight: list[EpisodeId], checkpoint_id: str = "ck-1", **fields: Any) -> Any:
        await self.prepared(checkpoint_id)
        reply = await self.send(
            "CommitCheckpoint", checkpoint_id=checkpoint_id, scope=wire.episode_list(in_flight), **fields
        )
        assert reply.state == pb.CHECKPOINT_STATE_COMMITTED, reply
        return reply

    async def taken(self, in_flight: list[EpisodeId], checkpoint_id: str = "ck-1", **fields: Any) -> Any:
        """A published and resumed checkpoint."""
        await self.committed(in_flight, checkpoint_id, **fields)
        published = await self.send("PublishCheckpoint", checkpoint_id=checkpoint_id)
        await self.send("ResumeCheckpoint", checkpoint_id=checkpoint_id)
        return published

    async def until(self, text: str) -> Any:
        """The first event whose message has this text, past or future."""
        async for message in self.stub.WatchEvents(pb.WatchEventsRequest(), timeout=WITHIN):
            if text in message.event.message:
                return message.event
        raise AssertionError(f"no event says {text!r}")


@asynccontextmanager
async def serving(
    nodes: Nodes, *, token: TokenSource | None = None, coordinator: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Served]:
    async with (
        nodes.coordinator(**(coordinator or {})) as entered,
        CoordinatorServer(entered, **options) as server,
        open_channel(server.address, token=token) as channel,
    ):
        yield Served(nodes, entered, server, channel)


@pytest_asyncio.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    """One node of each kind."""
    fleet = await Nodes(tmp_path / "root").start()
    try:
        yield fleet
    finally:
        await fleet.stop()


@pytest_asyncio.fixture
async def served(nodes: Nodes) -> AsyncIterator[Served]:
    async with serving(nodes) as it:
        yield it
