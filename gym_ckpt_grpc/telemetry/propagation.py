"""W3C trace context in gRPC metadata: `traceparent` and `tracestate`, and nothing else.

It is W3C's on both sides whatever propagator the process has as its global one, so that one checkpoint is one trace
over processes with different set-ups. Baggage is not sent: what a trainer keeps there is not ours to pass on.
Source: telemetry section 2, https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextvars import Token
from typing import Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = Iterable[tuple[str, str | bytes]]
_W3C = TraceContextTextMapPropagator()
_PARENT = "traceparent"
_FIELDS = frozenset(_W3C.fields)


def extracted(metadata: Metadata | None, current: Context) -> Context:
    """`current` with the span that the metadata name; `current` itself where they name none, several, or rubbish."""
    try:
        found = [(name, value) for name, value in metadata or () if name in _FIELDS and isinstance(value, str)]
        if not found:
            return current
        carrier = {field: [value for name, value in found if name == field] for field in _FIELDS}
        return current if len(set(carrier[_PARENT])) != 1 else _W3C.extract(carrier, current)
    except Exception:
        return current


def injected(metadata: Metadata | None, context: Context) -> grpc.aio.Metadata | None:
    """The metadata with this context's span in place of any other; None where the context has no span to name."""
    carrier: dict[str, str] = {}
    try:
        _W3C.inject(carrier, context)
        if not carrier:
            return None
        kept: list[Any] = [(name, value) for name, value in metadata or () if name not in _FIELDS]
        return grpc.aio.Metadata(*kept, *carrier.items())
    except Exception:
        return None


def without_span(context: Context) -> Context:
    """The context with no current span: what begins in it is the root of a trace."""
    return set_span_in_context(INVALID_SPAN, context)


def leave_trace() -> None:
    """What the running task does from here on is no part of the call that began it, which it may outlive for long."""
    attach(without_span(otel_context.get_current()))


def attach(context: Context) -> object | None:
    """Make it the current one. To be given to `detach` at the end, whatever it is; None if that failed."""
    try:
        return otel_context.attach(context)
    except Exception:
        return None


def detach(attached: Any) -> None:
    """Undo `attach`. Silent in another task than that of `attach`: a stream that nobody reads to its end is closed by
    the loop, in a task of its own, and the task whose context it was is gone by then."""
    if attached is None:
        return
    if isinstance(attached, Token):
        with contextlib.suppress(ValueError, RuntimeError):
            attached.var.reset(attached)
    else:
        otel_context.detach(attached)
