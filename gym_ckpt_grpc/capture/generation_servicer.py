"""GenerationService: proto <-> values around a `CutEngine`, and its server.

Source: participants section 8.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc

from gym_ckpt_grpc.auth import Authenticator, ServerTls
from gym_ckpt_grpc.capture import generation_wire
from gym_ckpt_grpc.capture.cut_engine import CutEngine, CutSweep, Outcomes
from gym_ckpt_grpc.control import Budget, wire
from gym_ckpt_grpc.control.budget import MAX_DEADLINE
from gym_ckpt_grpc.control.serving import HostedService, ServiceHost, time_left
from gym_ckpt_grpc.protocol.errors import InternalError, OutOfTime
from gym_ckpt_grpc.protocol.generation_validation import validate_generation
from gym_ckpt_grpc.telemetry import CallObserver, Telemetry
from gymckpt.v1 import generation_pb2 as pb
from gymckpt.v1 import generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
MAX_BYTES = 512 * 1024
"""Bytes of acknowledgements in one message; a single larger one goes alone."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves one engine. Call `close` at the end."""

    def __init__(self, engine: CutEngine) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[Any]] = set()

    async def GetBackend(self, request: pb.GetBackendRequest, context: Context) -> pb.GetBackendResponse:
        return generation_wire.info_to(self._engine.describe())

    async def CutGenerations(
        self, request: pb.CutGenerationsRequest, context: Context
    ) -> AsyncIterator[pb.CutGenerationsResponse]:
        validate_generation("CutGenerations", request)
        budget = Budget(time_left(context, MAX_DEADLINE))
        info = self._engine.describe()
        header = pb.CutHeader(
            backend_id=info.backend_id, incarnation_id=info.incarnation_id, snapshot_id=uuid.uuid4().hex
        )
        yield pb.CutGenerationsResponse(header=header)
        calls = [(generation_wire.call_from(call), wire.seconds(call.age)) for call in request.calls]
        sweep = CutSweep(self._engine, calls, self._tasks)
        async with contextlib.aclosing(sweep.batches(budget)) as batches:
            async for batch in batches:
                for acks in _messages(batch):
                    yield pb.CutGenerationsResponse(acks=acks)

    async def CheckCuts(self, request: pb.CheckCutsRequest, context: Context) -> pb.CheckCutsResponse:
        validate_generation("CheckCuts", request)
        cuts = [generation_wire.reference_from(cut) for cut in request.cuts]
        left: float | None = context.time_remaining()
        presences = await _within(MAX_DEADLINE if left is None else left, self._engine.check(cuts), "CheckCuts")
        _same_count(len(cuts), len(presences))
        return pb.CheckCutsResponse(presences=[generation_wire.presence_to(presence) for presence in presences])

    async def ReleaseCuts(self, request: pb.ReleaseCutsRequest, context: Context) -> pb.ReleaseCutsResponse:
        validate_generation("ReleaseCuts", request)
        left = time_left(context, MAX_DEADLINE)
        released = await _within(left, self._engine.release(list(request.cut_ids)), "ReleaseCuts")
        _same_count(len(request.cut_ids), len(released))
        states = [pb.RELEASE_STATE_RELEASED if one else pb.RELEASE_STATE_UNKNOWN for one in released]
        return pb.ReleaseCutsResponse(states=states)

    async def close(self) -> None:
        """End cuts and releases that outlived their sweep."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _within(seconds: float, work: Awaitable[T], step: str) -> T:
    try:
        async with asyncio.timeout(Budget(seconds).left()):
            return await work
    except TimeoutError:
        raise OutOfTime(f"{step} was not done within its deadline") from None


def _same_count(asked: int, answered: int) -> None:
    if asked != answered:
        raise InternalError(f"the engine answered {answered} of {asked}")


def _messages(batch: Outcomes) -> list[pb.CutAcks]:
    """The batch as messages of at most MAX_BYTES."""
    messages = [pb.CutAcks()]
    size = 0
    for call, outcome in batch:
        ack = generation_wire.ack_to(call, outcome)
        size += ack.ByteSize()
        if messages[-1].acks and size > MAX_BYTES:
            messages.append(pb.CutAcks())
            size = ack.ByteSize()
        messages[-1].acks.append(ack)
    return messages


class GenerationServer(HostedService):
    """The control server of one inference worker, beside its data plane, in the same process and event loop.

    address: `host:port` (port 0 picks one; read `address` after the start) or `unix:path`. authenticator: None lets
    every local caller in, and is refused on an address that is not local; the role that may call is `peer`.
    allow_insecure: needed for plain text beyond this host. tls, audit_log: see ParticipantServer.
    """

    def __init__(
        self,
        engine: CutEngine,
        address: str = "127.0.0.1:0",
        *,
        authenticator: Authenticator | None = None,
        allow_insecure: bool = False,
        tls: ServerTls | None = None,
        audit_log: str | os.PathLike[str] | None = None,
        observer: CallObserver | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._servicer = GenerationServicer(engine)
        host = ServiceHost(
            SERVICE,
            address,
            identity=None,
            authenticator=authenticator,
            allow_insecure=allow_insecure,
            tls=tls,
            audit_log=audit_log,
            observer=observer,
            telemetry=telemetry,
        )
        super().__init__(host)

    def _add_servicer(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._servicer, server)

    async def stop(self, grace: float = 1.0) -> None:
        """Stop serving: calls under way have `grace` seconds."""
        await super().stop(grace)
        await self._servicer.close()
