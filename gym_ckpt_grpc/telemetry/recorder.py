"""`Recorder`: what one participant, or one coordinator, tells telemetry. It knows who it is, so that call sites do not.

Rule of counting: an operation is recorded once for what it did. A call that is answered from an earlier one's work
(`replayed`) is an event, not an operation. Source: telemetry sections 2 and 3.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from opentelemetry.context import Context
from opentelemetry.trace import Link

from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import Instrument, SpanType
from gym_ckpt_grpc.telemetry.emitting import GaugeSource, Telemetry, default_telemetry
from gym_ckpt_grpc.telemetry.spans import NOT_READY, OK, ActiveSpan, Value

COORDINATOR = "coordinator"
"""The participant kind of what a coordinator records."""
PUBLISH = "publish"
"""The one operation that is a step too."""


class Recorder:
    """Spans and metrics of one participant. kind: of the participant, or `coordinator`."""

    def __init__(self, kind: str, *, service: str = "", instance: str = "", telemetry: Telemetry | None = None) -> None:
        self.telemetry = telemetry or default_telemetry()
        self.kind = kind
        self._who: dict[str, Value] = {at.PARTICIPANT_KIND: kind}
        if service:
            self._who |= {at.SERVICE: service, at.INSTANCE: instance}

    @classmethod
    def of(cls, identity: ParticipantIdentity, telemetry: Telemetry | None = None) -> Recorder:
        """The one of a participant."""
        return cls(identity.kind.value, service=identity.service, instance=identity.instance, telemetry=telemetry)

    def operation(self, name: str, *, checkpoint_id: str = "", parent: Context | None = None) -> Timed:
        """A participant's operation as a block: `prepare`, `capture`, ... parent: if not the current span's context."""
        span = catalogue.OPERATIONS[name]
        attributes = {at.ID: checkpoint_id, **self._who}
        labels = {at.OPERATION: name, at.PARTICIPANT_KIND: self.kind}
        return Timed(self, span, attributes, catalogue.OPERATION_DURATION, labels, parent)

    def coordinate(
        self,
        span: SpanType,
        name: str,
        *,
        checkpoint_id: str = "",
        participants: int = 0,
        parent: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Timed:
        """A coordinator's operation as a block. name: as a participant's operation, or `publish`, which is a step of
        the checkpoint as well."""
        attributes: dict[str, Value] = {at.ID: checkpoint_id, at.PARTICIPANTS: participants}
        labels = {at.OPERATION: name, at.PARTICIPANT_KIND: COORDINATOR}
        return Timed(self, span, attributes, catalogue.OPERATION_DURATION, labels, parent, links)

    def step(
        self, span: SpanType, *, timed: bool = True, attempt: bool = False, parent: Context | None = None
    ) -> Timed:
        """A step of an operation as a block. timed: whether it has a duration metric. attempt: whether it counts as
        an attempt, apart from the volume: repeated side effects show there."""
        name = span.name.rpartition(".")[2]
        labels = {at.STEP: name, at.PARTICIPANT_KIND: self.kind}
        if attempt:
            self.count(catalogue.ATTEMPTS_TOTAL, labels=labels)
        return Timed(self, span, {}, catalogue.STEP_DURATION if timed else None, labels, parent)

    def count(self, instrument: Instrument, amount: float = 1, *, labels: Mapping[str, Value] | None = None) -> None:
        """Count, or record in a histogram, with this participant's kind."""
        self.telemetry.add(instrument, amount, {at.PARTICIPANT_KIND: self.kind, **(labels or {})})

    def event(self, name: str, *, times: int = 1, **more: str) -> None:
        """One happening, or so many of one kind. more: `operation` or `disposition`."""
        labels = {at.EVENT: name, **{at.PREFIX + word: value for word, value in more.items()}}
        self.count(catalogue.EVENTS_TOTAL, times, labels=labels)

    def volume(self, operation: str, *, records: int, size: int) -> None:
        """Records and bytes that were written (`commit`) or installed (`restore`). The caller sees to the once."""
        self.count(catalogue.RECORDS_TOTAL, records, labels={at.OPERATION: operation})
        self.count(catalogue.BYTES_TOTAL, size, labels={at.OPERATION: operation})

    def watch(self, source: GaugeSource) -> None:
        """Show this participant's gauges."""
        self.telemetry.watch(source)


class Timed:
    """One operation or step: a span, and its duration recorded once when the block ends.

    `replayed` makes an operation an event instead; `failed` and `not_ready` say what the block's end does not.
    """

    __slots__ = ("_began", "_ended", "_instrument", "_is_replay", "_labels", "_recorder", "span")

    def __init__(
        self,
        recorder: Recorder,
        span: SpanType,
        attributes: Mapping[str, Value],
        instrument: Instrument | None,
        labels: Mapping[str, Value],
        parent: Context | None,
        links: Sequence[Link] = (),
    ) -> None:
        self._recorder = recorder
        self._instrument = instrument
        self._labels = labels
        self._is_replay = False
        self._ended = False
        self._began = time.monotonic()
        self.span: ActiveSpan = recorder.telemetry.span(span, attributes, parent=parent, links=links)

    def set(self, name: str, value: Value) -> None:
        """One attribute of the span, by a name of `attributes`."""
        self.span.set(name, value)

    def replayed(self) -> None:
        """This call did nothing: it got what an earlier one reached."""
        self._is_replay = True
        self.span.set(at.REPLAYED, True)

    def not_ready(self) -> None:
        """A prepare that did not reach its cut: neither ok nor an error."""
        self.span.failed(NOT_READY)

    def failed(self, outcome: str) -> None:
        """An error that is not raised out of the block. outcome: the name of an error code."""
        self.span.failed(outcome)

    def end(self, outcome: str) -> None:
        """End what was never entered as a block, on any thread: for work that a block cannot hold. Once only."""
        self.span.failed(outcome)
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self.span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        self._ended = True
        seconds = time.monotonic() - self._began
        self.span.__exit__(kind, error, trace)
        outcome = self.span.outcome
        if self._is_replay and outcome in (OK, NOT_READY):
            self._recorder.event("replayed", operation=str(self._labels[at.OPERATION]))
        elif self._instrument is not None:
            self._recorder.telemetry.add(self._instrument, 1000 * seconds, {**self._labels, at.OUTCOME: outcome})
            if self._labels.get(at.OPERATION) == PUBLISH:
                labels = {at.STEP: PUBLISH, at.PARTICIPANT_KIND: COORDINATOR, at.OUTCOME: outcome}
                self._recorder.telemetry.add(catalogue.STEP_DURATION, 1000 * seconds, labels)
