"""A server whose handlers do what a test says, in every arity, with the interceptors that a test gives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from opentelemetry.trace import SpanContext, get_current_span

from gym_ckpt_grpc.control.channel import CHANNEL_OPTIONS
from gym_ckpt_grpc.control.interceptors import ErrorsInterceptor
from gym_ckpt_grpc.control.serving import SERVER_OPTIONS
from gym_ckpt_grpc.telemetry import CallServerInterceptor, Telemetry, call_interceptors, observing

SERVICE = "test.v1.Echo"
ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def name_of(arity: str) -> str:
    """Name of the RPC span of this arity's method."""
    return f"{SERVICE}/{arity}"


class Echo:
    """Answers each message with itself. act: what every handler does first."""

    def __init__(self) -> None:
        self.act: Callable[[Any], Awaitable[None]] = self._nothing
        self.seen: list[SpanContext] = []
        self.metadata: list[dict[str, str]] = []
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.calls_cancelled = 0

    async def _nothing(self, context: Any) -> None:
        return None

    async def hang(self, context: Any) -> None:
        """An `act` that ends by cancellation only."""
        await asyncio.Event().wait()

    async def _begin(self, context: Any) -> None:
        self.seen.append(get_current_span().get_span_context())
        self.metadata.append({name: str(value) for name, value in context.invocation_metadata() or ()})
        self.entered.set()
        try:
            await self.act(context)
        except asyncio.CancelledError:
            self.calls_cancelled += 1
            self.cancelled.set()
            raise

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        await self._begin(context)
        return request

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await self._begin(context)
        yield request
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        told = b"".join([request async for request in requests])
        await self._begin(context)  # after reading: a status that meets a client's writing may be lost in grpc
        return told

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        told = [request async for request in requests]
        await self._begin(context)
        for request in told:
            yield request

    def handler(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self.unary_unary),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self.unary_stream),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self.stream_unary),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self.stream_stream),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)


def server_side(telemetry: Telemetry) -> grpc.aio.ServerInterceptor:
    """Our interceptor of servers."""
    return CallServerInterceptor(observing(telemetry, None), telemetry)


def errors_side(telemetry: Telemetry) -> grpc.aio.ServerInterceptor:
    """The interceptor that makes statuses of typed errors."""
    return ErrorsInterceptor(None, observing(telemetry, None))


def client_side(telemetry: Telemetry) -> Sequence[grpc.aio.ClientInterceptor]:
    """Our interceptors of clients."""
    return call_interceptors(observing(telemetry, None), telemetry)


@contextlib.asynccontextmanager
async def serving(echo: Echo, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> AsyncIterator[str]:
    """The address of a server."""
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((echo.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def echoing(
    echo: Echo,
    telemetry: Telemetry,
    *,
    server: Sequence[grpc.aio.ServerInterceptor] | None = None,
    client: Sequence[grpc.aio.ClientInterceptor] | None = None,
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to it; our interceptors on both sides unless others are given."""
    chain = [errors_side(telemetry), server_side(telemetry)] if server is None else server
    async with serving(echo, chain) as address:
        interceptors = client_side(telemetry) if client is None else client
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors) as channel:
            yield channel


def call(channel: grpc.aio.Channel, arity: str, *, metadata: Any = None, timeout: float = 10) -> Any:
    """One call begun, of this arity, of two messages where the client sends a stream."""

    async def messages() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    method = getattr(channel, arity)(f"/{SERVICE}/{arity}")
    request = messages() if arity.startswith("stream") else b"ab"
    return method(request, timeout=timeout, metadata=metadata)


async def finish(begun: Any, arity: str) -> bytes:
    """All that the call answers."""
    if arity.endswith("stream"):
        return b"".join([message async for message in begun])
    answer: bytes = await begun
    return answer
