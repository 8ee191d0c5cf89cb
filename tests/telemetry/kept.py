"""Telemetry that a test keeps in memory: every span that began, every span that ended, every metric."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind

from gym_ckpt_grpc.telemetry import Switches, Telemetry, catalogue
from gym_ckpt_grpc.telemetry.attributes import PREFIX, SPANS_ONLY
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
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(self._spans)
        self._reader = InMemoryMetricReader()
        self._meters = MeterProvider([self._reader], shutdown_on_exit=False)
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

    def check_declared(self) -> None:
        """Fail unless every span and every series of ours has declared attributes only, and no metric an id."""
        kinds = {span.name: set(span.attributes) for span in catalogue.SPANS}
        for span in self._spans.began:
            name = "{rpc.method}" if span.kind in (SpanKind.CLIENT, SpanKind.SERVER) else span.name
            assert name in kinds, f"span {span.name} is not in the catalogue"
            strange = set(span.attributes or ()) - kinds[name]
            assert not strange, f"span {span.name} has undeclared {sorted(strange)}"
        declared = {instrument.name: set(instrument.attributes) for instrument in catalogue.INSTRUMENTS}
        for name, attributes, _ in self._series():
            assert name in declared, f"instrument {name} is not in the catalogue"
            strange = set(attributes) - declared[name] | set(attributes) & SPANS_ONLY
            assert not strange, f"{name} has labels {sorted(strange)}"

    # ---- metrics

    def _series(self, histograms: str = "count") -> list[tuple[str, dict[str, object], float]]:
        """(instrument, attributes, value) of each series. histograms: what stands for the value of one."""
        data = self._reader.get_metrics_data()
        return [
            (metric.name, dict(point.attributes or {}), getattr(point, histograms, getattr(point, "value", 0)))
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        ]

    def points(self, instrument: Instrument | str) -> list[tuple[dict[str, object], float]]:
        """(attributes without prefix, value) of each series; the value of a histogram is its count."""
        name = instrument if isinstance(instrument, str) else instrument.name
        return [(short(attributes), value) for found, attributes, value in self._series() if found == name]

    def value(self, instrument: Instrument | str, **labels: object) -> float:
        """The sum over the series that have these labels; 0 if there is none."""
        return sum(
            value for found, value in self.points(instrument) if all(found.get(k) == v for k, v in labels.items())
        )

    def total(self, instrument: Instrument, **labels: object) -> float:
        """The sum of all that a histogram recorded in the series that have these labels."""
        series = [
            (short(attributes), sum_) for name, attributes, sum_ in self._series("sum") if name == instrument.name
        ]
        return sum(sum_ for found, sum_ in series if all(found.get(k) == v for k, v in labels.items()))

    def start_of(self, instrument: Instrument) -> int:
        """When the first series of a counter or histogram began, in nanoseconds since the epoch."""
        data = self._reader.get_metrics_data()
        assert data is not None
        return min(
            point.start_time_unix_nano or 0
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == instrument.name
            for point in metric.data.data_points
        )

    def names(self) -> set[str]:
        """Every instrument that has a series."""
        return {name for name, _, _ in self._series()}
