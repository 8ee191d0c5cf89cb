"""One core for server interceptors of every arity.

An interceptor gives an asynchronous context manager around the call; this module puts it around handlers that
return a message, that yield messages, and that write them through the context.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc


def method_name(method: object) -> str:
    """Full method name as text: grpc.aio hands it over as bytes on some paths, whatever its types say."""
    return method.decode("utf-8", "replace") if isinstance(method, bytes) else str(method)


Around = Callable[[grpc.aio.ServicerContext[Any, Any]], AbstractAsyncContextManager[None]]


def wrap_handler(handler: Any, around: Around) -> Any:
    """The same handler with `around` entered for the whole of each call; None stays None (unknown method)."""
    if handler is None:
        return None
    streams_in, streams_out = handler.request_streaming, handler.response_streaming
    inner = (
        (handler.stream_stream if streams_in else handler.unary_stream)
        if streams_out
        else (handler.stream_unary if streams_in else handler.unary_unary)
    )
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[streams_in, streams_out]
    behaviour = _streaming(inner, around) if streams_out else _single(inner, around)
    return make(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _single(inner: Any, around: Around) -> Any:
    async def behaviour(request: Any, context: Any) -> Any:
        async with around(context):
            answer = inner(request, context)
            return await answer if inspect.isawaitable(answer) else answer

    return behaviour


def _streaming(inner: Any, around: Around) -> Any:
    async def behaviour(request: Any, context: Any) -> AsyncIterator[Any]:
        async with around(context):
            answer = inner(request, context)
            if inspect.isawaitable(answer):  # writes through context.write
                await answer
            elif hasattr(answer, "__aiter__"):
                try:
                    async for message in answer:
                        yield message
                finally:  # where it is closed early: here and now, not later by the loop, in a task of its own
                    if hasattr(answer, "aclose"):
                        await answer.aclose()
            else:
                for message in answer:
                    yield message

    return behaviour
