"""Telemetry that a test keeps in memory: every span that began, every span that ended, every metric."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from gym_ckpt_grpc.telemetry import Switches, Telemetry
from gym_ckpt_grpc.telemetry.attributes import PREFIX
from gym_ckpt_grpc.telemetry.catalogue import Instrument, SpanType


class _Spans(SpanProcessor):
    def __init__(self) -> None:
        self.began: list[Span] = []
        self.ended: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.began.append(span)

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


def short(attributes: Mapping[str, object] | None) -> dict[str, object]:
    """Attributes without the prefix that ours have."""
    return {name.removeprefix(PREFIX): value for name, value in (attributes or {}).items()}


def _id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


class Kept:
    """`telemetry` goes into the thing under test; the rest reads what it emitted. groups: of spans."""

    def __init__(self, groups: str = "default,checkpoint") -> None:
        self._spans = _Spans()
        tracers = TracerProvider()
        tracers.add_span_processor(self._spans)
        self._reader = InMemoryMetricReader()
        self._meters = MeterProvider([self._reader])
        self.telemetry = Telemetry(tracer_provider=tracers, meter_provider=self._meters, switches=Switches(groups))

    # ---- spans

    @property
    def spans(self) -> list[ReadableSpan]:
        """The ended spans, in the order of their ends."""
        assert self.telemetry.flush(), "spans wait to be ended"
        return list(self._spans.ended)

    def of(self, span: SpanType | str) -> list[ReadableSpan]:
        """The ended spans of one type."""
        name = span if isinstance(span, str) else span.name
        return [ended for ended in self.spans if ended.name == name]

    def only(self, span: SpanType | str) -> ReadableSpan:
        """The one ended span of a type."""
        found = self.of(span)
        assert len(found) == 1, f"{len(found)} spans of {span}: {[s.name for s in self.spans]}"
        return found[0]

    def parent(self, span: ReadableSpan) -> str:
        """The name of a span's parent; empty for a root, `?` for one that is not here."""
        if span.parent is None:
            return ""
        names = {_id_of(began): began.name for began in self._spans.began}
        return names.get(span.parent.span_id, "?")

    def all_ended(self) -> None:
        """Fail unless each span that began has ended exactly once."""
        ended = [_id_of(span) for span in self.spans]
        began = [_id_of(span) for span in self._spans.began]
        assert sorted(ended) == sorted(began), f"{len(began)} began, {len(ended)} ended"

    # ---- metrics

    def points(self, instrument: Instrument | str) -> list[tuple[dict[str, object], float]]:
        """(attributes without prefix, value) of each series; the value of a histogram is its count."""
        name = instrument if isinstance(instrument, str) else instrument.name
        data = self._reader.get_metrics_data()
        found = []
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        found += [
                            (short(point.attributes), getattr(point, "count", getattr(point, "value", 0)))
                            for point in metric.data.data_points
                        ]
        return found

    def value(self, instrument: Instrument | str, **labels: object) -> float:
        """The sum over the series that have these labels; 0 if there is none."""
        return sum(
            value for found, value in self.points(instrument) if all(found.get(k) == v for k, v in labels.items())
        )

    def names(self) -> set[str]:
        """Every instrument that has a series."""
        data = self._reader.get_metrics_data()
        return {
            metric.name
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
