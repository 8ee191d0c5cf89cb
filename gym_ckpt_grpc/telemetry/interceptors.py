"""Both halves of the RPC layer: a span and a record per call, and one trace over both sides.

Trace context travels whether or not our spans are on: a trainer's own trace goes through us.

These are for grpc.aio. A trainer that calls with a synchronous stub takes `client_interceptor` of
`opentelemetry-instrumentation-grpc`, put in by its own `grpcext.intercept_channel`; our servers continue its trace.
What that package does wrong in grpc.aio is pinned in tests/telemetry/test_instrumentation_grpc.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, SpanKind, get_current_span

from gym_ckpt_grpc.protocol.errors import ERRORS, ControlError, ErrorCode
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.arity import method_name, wrap_handler
from gym_ckpt_grpc.telemetry.calls import CallObserver, CallRecord, beginning, ending
from gym_ckpt_grpc.telemetry.emitting import Telemetry, default_telemetry
from gym_ckpt_grpc.telemetry.propagation import attach, detach, extracted, injected, without_span
from gym_ckpt_grpc.telemetry.spans import CANCELLED

_KINDS = {
    "server": (catalogue.RPC_SERVER, SpanKind.SERVER),
    "client": (catalogue.RPC_CLIENT, SpanKind.CLIENT),
}


class _Call:
    """One call on one side, from its beginning to its one end. `context`: that of its span, None while spans are
    off."""

    __slots__ = ("_began", "_method", "_observer", "_side", "_span", "context")

    def __init__(
        self, side: str, method: str, parent: Context, telemetry: Telemetry, observer: CallObserver | None
    ) -> None:
        self._began = time.monotonic()
        self._side, self._method, self._observer = side, method, observer
        self._span = self.context = None
        if telemetry.switches.checkpoint:
            span, kind = _KINDS[side]
            attributes = beginning(method)
            self._span = telemetry.span(span, attributes, name=method.lstrip("/"), parent=parent, kind=kind)
            self.context = self._span.context

    def end(self, status: str) -> None:
        """It ended with this status; the second time does nothing."""
        observer, self._observer = self._observer, None
        if self._span is not None:
            facts = ending(self._side, status)
            self._span.finish(facts, status if len(facts) > 1 else "")
        if observer is not None:
            try:
                observer.call_ended(CallRecord(self._side, self._method, status, time.monotonic() - self._began))
            except Exception:  # telemetry never fails a call
                return


# ---- server --------------------------------------------------------------------------------------------------


_STATUSES: dict[Any, str] = {c: c.name for c in grpc.StatusCode} | {c.value[0]: c.name for c in grpc.StatusCode}
"""Status, as member or as number -> its name."""


def _set_status(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Name of the status that a handler has set by itself; OK if none."""
    try:
        return _STATUSES.get(context.code(), "OK")
    except Exception:  # a context that another interceptor has made up
        return "OK"


def _typed_status(error: BaseException) -> str | None:
    if isinstance(error, ControlError):
        return (ERRORS.get(error.code) or ERRORS[ErrorCode.INTERNAL]).grpc_status
    # GeneratorExit: a stream whose client went away while the core was writing is closed, not cancelled.
    return CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else None


class CallServerInterceptor(grpc.aio.ServerInterceptor):
    """A span and a record for each accepted call. Stands inside errors and auth, so it sees the typed exception.

    Build it where the server is built: a span that is current there is no parent of the server's calls, although
    their tasks inherit it.
    """

    def __init__(self, observer: CallObserver, telemetry: Telemetry | None = None) -> None:
        self.observer = observer
        self.telemetry = telemetry or default_telemetry()
        self._built_in = get_current_span()

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = method_name(handler_call_details.method)
        metadata: Any = handler_call_details.invocation_metadata
        return wrap_handler(
            await continuation(handler_call_details), lambda context: _Served(self, name, metadata, context)
        )

    def around(self) -> Context:
        """The context that this call has already, such as that of another interceptor."""
        current = otel_context.get_current()
        span = get_current_span(current)
        return without_span(current) if span is self._built_in and span is not INVALID_SPAN else current


class _Served:
    """A call on the server as a block. Not made of a generator: it stands around every call."""

    __slots__ = ("_attached", "_by", "_call", "_context", "_metadata", "_name")

    def __init__(self, by: CallServerInterceptor, name: str, metadata: Any, context: Any) -> None:
        self._by, self._name, self._metadata, self._context = by, name, metadata, context

    async def __aenter__(self) -> None:
        parent = extracted(self._metadata, self._by.around())
        self._call = _Call("server", self._name, parent, self._by.telemetry, self._by.observer)
        self._attached = attach(self._call.context or parent)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        detach(self._attached)
        if error is None or isinstance(error, grpc.aio.AbortError):
            self._call.end(_set_status(self._context))
        else:
            self._call.end(_typed_status(error) or "INTERNAL")


# ---- client --------------------------------------------------------------------------------------------------


class _Core:
    """One core for every arity."""

    def __init__(self, observer: CallObserver, telemetry: Telemetry) -> None:
        self._observer = observer
        self._telemetry = telemetry

    async def _begin(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        current = otel_context.get_current()
        parent = extracted(details.metadata, current)  # what the caller set goes before what is current
        call = _Call("client", method_name(details.method), parent, self._telemetry, self._observer)
        if call.context is not None or parent is current:
            details = _with_metadata(details, injected(details.metadata, call.context or current))
        try:
            answer = await continuation(details, request)
        except BaseException as error:  # cancelled, or failed in an interceptor further in
            refused = error.code().name if isinstance(error, grpc.aio.AioRpcError) else None
            call.end(refused or _typed_status(error) or "UNKNOWN")
            raise
        _when_done(answer, call)
        return answer


def _with_metadata(details: Any, metadata: grpc.aio.Metadata | None) -> Any:
    return details if metadata is None else details._replace(metadata=metadata)


def _when_done(answer: Any, call: _Call) -> None:
    """End the call with its answer. Nothing waits for it: a task that did would keep cancellation from the server."""

    def done(ended: Any) -> None:
        call.end(_status_name(ended))

    try:
        answer.add_done_callback(done)
    except Exception:  # another interceptor has awaited the call and gave its reply alone
        done(answer)


def _status_name(call: Any) -> str:
    """Status of a call that is done: its `code()` then answers without suspending, so no task is needed."""
    try:
        if call.cancelled():
            return CANCELLED
        answer = call.code()
        try:
            answer.send(None)
        finally:
            answer.close()
    except StopIteration as done:
        return str(done.value.name)
    except Exception:
        return "UNKNOWN"
    return "UNKNOWN"


class _UnaryUnary(_Core, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._begin(continuation, client_call_details, request)


class _UnaryStream(_Core, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._begin(continuation, client_call_details, request)


class _StreamUnary(_Core, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self._begin(continuation, client_call_details, request_iterator)


class _StreamStream(_Core, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self._begin(continuation, client_call_details, request_iterator)


def call_interceptors(
    observer: CallObserver, telemetry: Telemetry | None = None
) -> Sequence[grpc.aio.ClientInterceptor]:
    """Client interceptors that make a span of every call, tell this observer of it, and pass the trace on."""
    emitting = telemetry or default_telemetry()
    return [arity(observer, emitting) for arity in (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)]
