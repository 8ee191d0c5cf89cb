"""The client of GenerationService: one inference worker as its policy model server sees it.

Source: participants sections 7 and 8.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.capture import generation_wire
from gym_ckpt_grpc.control import (
    BackendInfo,
    Budget,
    CutAck,
    CutEvidence,
    CutPresence,
    Sweep,
    SweepHeader,
    error_from,
    open_channel,
)
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    InternalError,
    OutOfTime,
    PermissionDenied,
    Unauthenticated,
    WorkerUnavailable,
)
from gym_ckpt_grpc.protocol.generation_validation import MAX_CUTS
from gym_ckpt_grpc.telemetry import Telemetry
from gymckpt.v1 import generation_pb2 as pb
from gymckpt.v1 import generation_pb2_grpc

RECONNECT = 1.0
"""Seconds for which an unreachable backend is tried again: a channel notices a new process after half of that."""
PAUSE = 0.1


class GrpcGenerationBackend:
    """A `GenerationBackend` over a connection of its own, apart from those that carry generations.

    name: its key among the backends. address, token, allow_insecure, tls, telemetry: as `open_channel` says. Used from
    one event loop, which `close` must be called in.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        token: TokenSource | None = None,
        allow_insecure: bool = False,
        tls: ClientTls | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._name = name
        self._address = address
        self._token = token
        self._allow_insecure = allow_insecure
        self._tls = tls
        self._telemetry = telemetry
        self._channel: grpc.aio.Channel | None = None
        self._opened: Any = None

    @property
    def name(self) -> str:
        """Its key among the backends."""
        return self._name

    async def describe(self, budget: Budget) -> BackendInfo:
        """As `GenerationBackend.describe`."""
        return generation_wire.info_from(await self._ask(pb.GetBackendRequest(), budget))

    async def cut(self, sweep: Sweep, budget: Budget) -> AsyncGenerator[SweepHeader | Sequence[CutAck]]:
        """As `GenerationBackend.cut`. Acknowledgements are passed on unjudged.

        Raises InternalError for a stream that does not begin with its header. Closing it early ends the call.
        """
        left = budget.require(f"a sweep of {self._name}")
        call = self._stub().CutGenerations(generation_wire.sweep_to(sweep), timeout=left)
        begun = False
        try:
            async for message in call:
                part = message.WhichOneof("part")
                if part != ("acks" if begun else "header"):
                    raise InternalError(f"{self._name} sent {part or 'nothing'} in the wrong place of a sweep")
                if begun:
                    yield [generation_wire.ack_from(ack) for ack in message.acks.acks]
                else:
                    header, begun = message.header, True
                    yield SweepHeader(header.backend_id, header.incarnation_id, header.snapshot_id)
        except grpc.aio.AioRpcError as failure:
            raise self._error(failure) from failure
        finally:
            call.cancel()
        if not begun:
            raise InternalError(f"{self._name} ended a sweep without a header")

    async def check(self, cuts: Sequence[CutEvidence], budget: Budget) -> list[CutPresence]:
        """As `GenerationBackend.check`; any number of cuts."""
        presences: list[CutPresence] = []
        for begin in range(0, len(cuts), MAX_CUTS):
            part = [generation_wire.reference_to(cut) for cut in cuts[begin : begin + MAX_CUTS]]
            reply = await self._ask(pb.CheckCutsRequest(cuts=part), budget)
            if len(reply.presences) != len(part):
                raise InternalError(f"{self._name} answered for {len(reply.presences)} of {len(part)} cuts")
            presences += map(generation_wire.presence_from, reply.presences)
        return presences

    async def release(self, cut_ids: Sequence[str], budget: Budget) -> None:
        """As `GenerationBackend.release`; any number of ids."""
        for begin in range(0, len(cut_ids), MAX_CUTS):
            await self._ask(pb.ReleaseCutsRequest(cut_ids=cut_ids[begin : begin + MAX_CUTS]), budget)

    async def close(self) -> None:
        """Close the connection; calls under way end."""
        if self._channel is not None:
            await self._channel.close()
        self._channel, self._opened = None, None

    # ---- inside

    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = open_channel(
                self._address,
                token=self._token,
                allow_insecure=self._allow_insecure,
                tls=self._tls,
                dedicated=True,
                telemetry=self._telemetry,
            )
            self._opened = generation_pb2_grpc.GenerationServiceStub(self._channel)
        return self._opened

    async def _ask(self, request: Message, budget: Budget) -> Any:
        """One unary call. While nobody answers at the address it is tried again, for a moment."""
        method = type(request).__name__.removesuffix("Request")
        loop = asyncio.get_running_loop()
        until = loop.time() + RECONNECT
        while True:
            left = budget.require(f"{method} of {self._name}")
            try:
                return await getattr(self._stub(), method)(request, timeout=left)
            except grpc.aio.AioRpcError as failure:
                error = self._error(failure)
                if not isinstance(error, WorkerUnavailable) or loop.time() + PAUSE >= until:
                    raise error from failure
            await asyncio.sleep(min(PAUSE, budget.left()))

    def _error(self, failure: grpc.aio.AioRpcError) -> ControlError:
        """The typed error of a failed call; one that carries none is told by its status."""
        if (typed := error_from(failure)) is not None:
            typed.participant = typed.participant or self._name
            return typed
        kinds: dict[grpc.StatusCode, type[ControlError]] = {
            grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
            grpc.StatusCode.DEADLINE_EXCEEDED: OutOfTime,
            grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
            grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
        }
        code = failure.code()
        text = f"{self._address} gave {code.name} without a typed error: {(failure.details() or '')[:300]}"
        return kinds.get(code, InternalError)(text, participant=self._name)
