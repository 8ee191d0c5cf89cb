"""Both halves of measuring calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from gym_ckpt_grpc.protocol.errors import ERRORS, ControlError, ErrorCode
from gym_ckpt_grpc.telemetry.arity import method_name, wrap_handler
from gym_ckpt_grpc.telemetry.calls import CallObserver, CallRecord


def _tell(observer: CallObserver, record: CallRecord) -> None:
    with contextlib.suppress(Exception):  # telemetry never fails a call
        observer.call_ended(record)


def _set_status(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Name of the status that a handler has set by itself; OK if none."""
    code: Any = context.code()
    return next((c.name for c in grpc.StatusCode if code in (c, c.value[0])), "OK")


def _status_of(error: BaseException, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    if isinstance(error, ControlError):
        row = ERRORS.get(error.code) or ERRORS[ErrorCode.INTERNAL]
        return row.grpc_status
    if isinstance(error, grpc.aio.AbortError):
        return _set_status(context)
    # GeneratorExit: a stream whose client went away while the core was writing is closed, not cancelled.
    return "CANCELLED" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "INTERNAL"


class CallServerInterceptor(grpc.aio.ServerInterceptor):
    """Measures accepted calls. Stands inside errors and auth, so it sees the typed exception."""

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = method_name(handler_call_details.method)

        @contextlib.asynccontextmanager
        async def measured(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
            began, status = time.monotonic(), "OK"
            try:
                yield
                status = _set_status(context)
            except BaseException as error:
                status = _status_of(error, context)
                raise
            finally:
                _tell(self._observer, CallRecord("server", name, status, time.monotonic() - began))

        return wrap_handler(await continuation(handler_call_details), measured)


class _Core:
    """Tells the observer when a call is done; one core for every arity."""

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer

    def _watch(self, call: Any, details: grpc.aio.ClientCallDetails, began: float) -> Any:
        method = method_name(details.method)

        def done(ended: Any) -> None:
            status = "CANCELLED" if ended.cancelled() else _status_name(ended)
            _tell(self._observer, CallRecord("client", method, status, time.monotonic() - began))

        call.add_done_callback(done)
        return call


def _status_name(call: Any) -> str:
    """Status of a call that is done: its `code()` then answers without suspending, so no task is needed."""
    answer = call.code()
    try:
        answer.send(None)
    except StopIteration as done:
        return str(done.value.name)
    answer.close()
    return "UNKNOWN"


class _UnaryUnary(_Core, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        began = time.monotonic()
        return self._watch(await continuation(client_call_details, request), client_call_details, began)


class _UnaryStream(_Core, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        began = time.monotonic()
        return self._watch(await continuation(client_call_details, request), client_call_details, began)


def call_interceptors(observer: CallObserver) -> Sequence[grpc.aio.ClientInterceptor]:
    """Client interceptors that tell this observer of every call."""
    return [_UnaryUnary(observer), _UnaryStream(observer)]
