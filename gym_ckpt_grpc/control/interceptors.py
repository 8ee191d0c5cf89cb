"""The errors interceptor: outermost, so that nothing leaks past it.

Inside, an error is a typed exception; here alone it becomes a gRPC status with details. Any other exception
becomes INTERNAL with an opaque incident id, since grpc would send its text to the client verbatim.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc

from gym_ckpt_grpc.control.decoding import decoding
from gym_ckpt_grpc.control.error_details import DETAILS_KEY, status_of, unexpected
from gym_ckpt_grpc.protocol.errors import ControlError, PermissionDenied, Unauthenticated
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.telemetry import CallObserver, method_name, wrap_handler


class ErrorsInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses. identity: whose errors these are; not told to refused callers."""

    def __init__(self, identity: ParticipantIdentity | None, observer: CallObserver | None = None) -> None:
        self._identity = identity
        self._observer = observer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        name = method_name(handler_call_details.method)

        @contextlib.asynccontextmanager
        async def typed(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
            try:
                yield
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await self._abort(name, error, context)

        try:
            handler = await continuation(handler_call_details)
        except Exception as error:
            return _refusing(partial(self._abort, name, error))
        return wrap_handler(decoding(handler), typed)

    async def _abort(self, method: str, error: Exception, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        known = error if isinstance(error, ControlError) else unexpected(error, f"serving {method}")
        if self._observer:
            with contextlib.suppress(Exception):
                self._observer.control_error(method, known.code)
        stranger = isinstance(known, Unauthenticated | PermissionDenied)
        status = status_of(known, None if stranger else self._identity)
        code = next(c for c in grpc.StatusCode if c.value[0] == status.code)
        await context.abort(code, status.message, ((DETAILS_KEY, status.SerializeToString()),))


def _refusing(abort: Callable[[Any], Awaitable[None]]) -> Any:
    """A handler that answers with a status before it reads any message: it serves calls of every arity."""

    async def behaviour(_requests: Any, context: Any) -> AsyncIterator[bytes]:
        await abort(context)
        yield b""

    return grpc.stream_stream_rpc_method_handler(behaviour)
