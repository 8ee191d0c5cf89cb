"""The trace of one checkpoint or restore: its block's span, and every operation below that, whoever does it.

A block is entered and left, and its operations are done, by any task: those of a served coordinator by tasks of
several calls. So the block's span is never the current one of the task that entered it; it is made the current one
where something of the block is done. Source: telemetry section 2.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from opentelemetry.context import Context
from opentelemetry.trace import Link, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gym_ckpt_grpc.coordinator.codes import outcome_of_failure
from gym_ckpt_grpc.telemetry import ActiveSpan, Recorder, Timed
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import PREPARE_STAGES, SpanType
from gym_ckpt_grpc.telemetry.propagation import attach, detach
from gym_ckpt_grpc.telemetry.spans import NOT_REACHED, NOT_READY, OK, Value

_W3C = TraceContextTextMapPropagator()
TRACEPARENT = "traceparent"

PUBLISHED, RESTORED, DETACHED, ABORTED, ERROR = "published", "restored", "detached", "aborted", "error"
"""What a block came to."""
ASIDE = ("retire", "forget")
"""Operations that a trainer gives beside a block: how they end says nothing of it."""


def context_of(traceparent: str) -> Context | None:
    """A context whose current span is the one of this W3C text; None for an empty one, or for rubbish."""
    with suppress(Exception):
        context = _W3C.extract({TRACEPARENT: traceparent}, Context())
        if get_current_span(context).get_span_context().is_valid:
            return context
    return None


def _traceparent(context: Context | None) -> str:
    """The W3C text of a context's current span, or of this task's; empty if there is none."""
    carrier: dict[str, str] = {}
    with suppress(Exception):
        _W3C.inject(carrier, context)
    return carrier.get(TRACEPARENT, "")


@contextmanager
def _current(context: Context | None) -> Iterator[None]:
    """Make it the current one of this task; None changes nothing."""
    attached = attach(context) if context is not None else None
    try:
        yield
    finally:
        detach(attached)


@contextmanager
def _ended_by(timed: Timed | ActiveSpan) -> Iterator[None]:
    """A block with the outcome of its failure, also where that is one of many participants."""
    timed.__enter__()
    try:
        yield
    except BaseException as error:
        timed.failed(outcome_of_failure(error))
        raise
    finally:
        timed.__exit__(None, None, None)


class BlockTrace:
    """The trace of one block. Before `begin` it is that of no block: operations are children of the current span.

    traceparent: of the span that the checkpoint began with, perhaps in another process; empty if there is none.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.traceparent = ""
        self._recorder = recorder
        self._root: ActiveSpan | None = None
        self._began_in: Context | None = None
        self._asked: Sequence[Link] = ()
        self._inner: set[int] = set()
        self._failed: dict[str, str] = {}

    def begin(self, span: SpanType, checkpoint_id: str, *, traceparent: str = "") -> None:
        """The block is entered. traceparent: what another process of the same checkpoint has left."""
        earlier = context_of(traceparent)
        telemetry = self._recorder.telemetry
        self._root = telemetry.span(span, {at.ID: checkpoint_id}, parent=earlier, links=_links(earlier))
        context = self._root.context
        self._began_in = context if context is not None else earlier
        self.traceparent = traceparent if earlier is not None else _traceparent(self._began_in)
        self._inner = {_span_id(self._began_in)} if self._began_in is not None else set()

    def link(self, traceparent: str) -> None:
        """Link the block to another trace, such as that of the checkpoint which is restored."""
        other = context_of(traceparent)
        if self._root is not None and other is not None:
            self._root.link(other)

    def set(self, name: str, value: str) -> None:
        """One attribute of the block's span."""
        if self._root is not None:
            self._root.set(name, value)

    @property
    def _context(self) -> Context | None:
        """The current context with the block's span in it; None where nothing needs one: inside of it already."""
        if self._began_in is None or _span_id(None) in self._inner:
            return None
        return set_span_in_context(get_current_span(self._began_in))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is done here, and every task that begins here, belongs to the block."""
        context = self._context
        asked, self._asked = self._asked, _links(context) or self._asked
        try:
            with _current(context):
                yield
        finally:
            self._asked = asked

    def for_thread(self) -> contextvars.Context | None:
        """A context of its own for another thread, with the block's span in it; None where there is no span."""
        if self._began_in is None:
            return None
        context = contextvars.Context()
        context.run(attach, self._began_in)
        return context

    @contextmanager
    def operation(
        self, span: SpanType, name: str, *, checkpoint_id: str = "", participants: int = 0
    ) -> Iterator[Timed]:
        """One operation over the fleet, also where it fails, is cancelled, or is not ready in time.

        A child of the block's span; the caller's own span, if it is of another trace, is linked.
        """
        context = self._context
        at_root = context is None and self._began_in is not None and _span_id(None) == _span_id(self._began_in)
        links = self._asked if at_root else _links(context)
        with _current(context):
            timed = self._recorder.coordinate(
                span, name, checkpoint_id=checkpoint_id, participants=participants, links=links
            )
            try:
                with _ended_by(timed), self._known(timed.span.context):
                    yield timed
            finally:
                self._note(name, timed.span.outcome)

    def _note(self, name: str, outcome: str) -> None:
        """Remember how an operation ended that the block's own end may depend on; only the last time counts."""
        self._failed.pop(name, None)
        if outcome != OK and name not in ASIDE:
            self._failed[name] = outcome

    @contextmanager
    def entering(self, span: SpanType) -> Iterator[ActiveSpan]:
        """A coordinator is entered: no block's, and the root of its own trace unless the caller has a span."""
        made = self._recorder.telemetry.span(span)
        with _ended_by(made):
            yield made

    @contextmanager
    def _known(self, context: Context | None) -> Iterator[None]:
        """While it lasts, what is done below this span is inside the block."""
        if context is None or self._began_in is None:
            yield
            return
        mine = _span_id(context)
        self._inner.add(mine)
        try:
            yield
        finally:
            self._inner.discard(mine)

    @contextmanager
    def stages(self, timed: Timed) -> Iterator[Stages]:
        """The stages of one Prepare: those that are not reached have a span all the same."""
        stages = Stages(self._recorder, timed)
        try:
            yield stages
        finally:
            stages.close()

    def end(self, result: str, error: BaseException | None = None) -> None:
        """The block is over. result: what it came to if nothing failed; error: what left it.

        The span's outcome is that of what left it, else of an operation that failed and was not repeated with success.
        """
        if self._root is None:
            return
        failed = next(reversed(self._failed.values()), OK)
        outcome = failed if error is None else outcome_of_failure(error)
        if outcome != OK and result not in (PUBLISHED, RESTORED, DETACHED):
            result = NOT_READY if outcome == NOT_READY else ERROR
        self._root.set(at.RESULT, result)
        self._root.failed(outcome)
        self._root.__exit__(None, None, None)


def _span_id(context: Context | None) -> int:
    return get_current_span(context).get_span_context().span_id


def _links(context: Context | None) -> Sequence[Link]:
    """To the caller's own span, where the span to be begun in `context` is of another trace."""
    caller = get_current_span().get_span_context()
    if context is None or not caller.is_valid:
        return ()
    ours = get_current_span(context).get_span_context()
    return () if ours.trace_id == caller.trace_id else (Link(caller),)


class Stages:
    """The spans of one Prepare's stages, in order."""

    def __init__(self, recorder: Recorder, timed: Timed) -> None:
        self._recorder = recorder
        self._timed = timed
        self._left = list(PREPARE_STAGES)
        timed.set(at.STOPPED_AT, "")

    @contextmanager
    def stage(self, kind: str, participants: int) -> Iterator[ActiveSpan]:
        """One stage, also one without members. The first that is not ok is where the Prepare stopped."""
        self._left.remove(kind)
        span = self._span(kind, participants)
        try:
            with _ended_by(span):
                yield span
        finally:
            if span.outcome != OK:
                self._timed.set(at.STOPPED_AT, kind)

    def close(self) -> None:
        """The stages that were not reached."""
        for kind in self._left:
            with self._span(kind, 0) as span:
                span.failed(NOT_REACHED)

    def _span(self, kind: str, participants: int) -> ActiveSpan:
        attributes: dict[str, Value] = {at.STAGE: kind, at.PARTICIPANTS: participants}
        return self._recorder.telemetry.span(PREPARE_STAGES[kind], attributes)
