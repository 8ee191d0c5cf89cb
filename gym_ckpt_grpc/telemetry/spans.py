"""One span as a block, which ends once with the right status and costs one look-up while its group is off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.ending import SpanEnder
from gym_ckpt_grpc.telemetry.propagation import attach, detach

Value = str | bool | int | float
OK = "ok"
NOT_READY = "not_ready"
NOT_REACHED = "not_reached"
"""Outcome of a stage that was not begun, since an earlier one stopped."""
CANCELLED = "CANCELLED"
"""Outcome of work whose caller went away."""


def outcome_of(error: BaseException | None) -> str:
    """`ok`, the name of the error code, `CANCELLED`, or `INTERNAL` for what is no error of ours."""
    if error is None:
        return OK
    if isinstance(error, ControlError):
        return error.code.name
    return CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else "INTERNAL"


class ActiveSpan:
    """A span that is the current one inside its block. What the SDK raises goes no further.

    outcome: `ok` or what `failed` was told; an exception that leaves the block decides otherwise. The error's text is
    not recorded: it may quote what was sent.
    """

    __slots__ = ("_attached", "_ender", "_span", "outcome")

    def __init__(self, span: Span | None, ender: SpanEnder) -> None:
        self.outcome = OK
        self._span = span
        self._ender = ender
        self._attached: object | None = None

    @property
    def context(self) -> Context | None:
        """The context with this span in it, for work that begins elsewhere; None while the group is off, and after
        the end."""
        return set_span_in_context(self._span) if self._span is not None else None

    def set(self, name: str, value: Value) -> None:
        """One attribute, by a name of `attributes`."""
        if self._span is not None:
            with contextlib.suppress(Exception):
                self._span.set_attribute(name, value)

    def link(self, context: Context) -> None:
        """Link it to the span that is the current one in this context, such as that of an earlier process."""
        if self._span is not None:
            with contextlib.suppress(Exception):
                self._span.add_link(get_current_span(context).get_span_context())

    def failed(self, outcome: str) -> None:
        """The block succeeds as code goes, and is an error all the same."""
        self.outcome = outcome

    def finish(self, attributes: Mapping[str, Value], error: str = "") -> None:
        """End a span that is no block, with these attributes; the second time does nothing.

        error: the text of its error status; empty if it is none.
        """
        span, self._span = self._span, None
        if span is None:
            return
        with contextlib.suppress(Exception):
            span.set_attributes(attributes)
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
        self._ender.end(span)

    def __enter__(self) -> Self:
        if self._span is not None:
            self._attached = attach(set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.outcome = outcome_of(error)
        attached, self._attached = self._attached, None
        detach(attached)
        self.finish({at.OUTCOME: self.outcome}, "" if self.outcome in (OK, NOT_READY, NOT_REACHED) else self.outcome)


def start(
    tracer: Tracer,
    ender: SpanEnder,
    name: str,
    attributes: Mapping[str, Value],
    *,
    parent: Context | None = None,
    links: Sequence[Link] = (),
    kind: SpanKind = SpanKind.INTERNAL,
) -> ActiveSpan:
    """Begin a span, a child of the current one or of `parent`'s; not current before its block is entered."""
    try:
        span = tracer.start_span(name, parent, kind=kind, attributes=attributes, links=links)
    except Exception:
        return ActiveSpan(None, ender)
    return ActiveSpan(span, ender)
