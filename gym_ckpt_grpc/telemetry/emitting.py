"""`Telemetry`: the tracer, the instruments and the gauges of one process, or of one test."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import Link, SpanKind

from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import Instrument, Kind, SpanType
from gym_ckpt_grpc.telemetry.ending import SpanEnder
from gym_ckpt_grpc.telemetry.spans import ActiveSpan, Value, start
from gym_ckpt_grpc.telemetry.switches import Switches

SCOPE = "gym_ckpt_grpc"
"""Name of our tracer and meter."""

Reading = tuple[Instrument, float, Mapping[str, Value]]
"""What one gauge shows, and its attributes."""


class GaugeSource(Protocol):
    """Something with gauges, such as a participant."""

    def readings(self) -> Iterable[Reading]:
        """What each of its gauges shows now. Called on the exporter's thread: it must only read."""


class Telemetry:
    """Where spans and metrics go. The process's own providers by default, also those that are set later.

    switches: which groups of spans are made. Nothing here raises into the product. Ending and exporting a span never
    holds a call up; what a sampler, or a processor's `on_start`, does is done on the caller's thread.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        switches: Switches | None = None,
    ) -> None:
        self.switches = switches or Switches()
        self._made: dict[str, Any] = {}
        self._sources: list[weakref.ref[GaugeSource]] = []
        self._tracer: trace.Tracer = trace.NoOpTracer()
        with contextlib.suppress(Exception):
            self._tracer = trace.get_tracer(SCOPE, _version(), tracer_provider)
        with contextlib.suppress(Exception):
            meter = metrics.get_meter(SCOPE, _version(), meter_provider)
            for instrument in catalogue.INSTRUMENTS:
                self._made[instrument.name] = self._make(meter, instrument)
        self.ender = SpanEnder(on_drop=lambda: self.add(catalogue.SPANS_DROPPED, 1, {}))

    def _make(self, meter: metrics.Meter, instrument: Instrument) -> Any:
        name, unit, text = instrument.name, instrument.unit, instrument.meaning
        if instrument.kind is Kind.COUNTER:
            return meter.create_counter(name, unit, text).add
        if instrument.kind is Kind.HISTOGRAM:
            return meter.create_histogram(
                name, unit, text, explicit_bucket_boundaries_advisory=instrument.buckets
            ).record

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return self._observe(instrument)

        return meter.create_observable_gauge(name, [observe], unit, text)

    # ---- metrics

    def add(self, instrument: Instrument, amount: float, attributes: Mapping[str, Value]) -> None:
        """Count, or record in a histogram."""
        try:
            self._made[instrument.name](amount, attributes)
        except Exception:  # telemetry never fails what it measures
            return

    def watch(self, source: GaugeSource) -> None:
        """Ask this participant for its gauges from now on, for as long as it lives."""
        if all(known() is not source for known in list(self._sources)):
            # A list, copied and changed in one step each: the exporter's thread reads it at any moment.
            self._sources.append(weakref.ref(source, self._sources.remove))

    def _observe(self, instrument: Instrument) -> list[Observation]:
        found: list[Observation] = []
        for known in list(self._sources):
            with contextlib.suppress(Exception):  # one that fails hides no other
                if (source := known()) is not None:
                    readings = [
                        (value, dict(labels)) for what, value, labels in source.readings() if what is instrument
                    ]
                    found += [Observation(value, labels) for value, labels in readings]
        return found

    # ---- spans

    def span(
        self,
        span: SpanType,
        attributes: Mapping[str, Value] | None = None,
        *,
        name: str = "",
        parent: Context | None = None,
        links: Sequence[Link] = (),
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ActiveSpan:
        """A span as a block; nothing at all while its group is off. name: if not the type's own."""
        if not self.switches.checkpoint:
            return ActiveSpan(None, self.ender)
        return start(
            self._tracer, self.ender, name or span.name, attributes or {}, parent=parent, links=links, kind=kind
        )

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until ended spans have been handed to the provider; whether that was so in time."""
        return self.ender.flush(timeout)


def _version() -> str:
    try:
        return version("gym-ckpt-grpc")
    except PackageNotFoundError:
        return ""


_default: Telemetry | None = None
_making = threading.Lock()


def default_telemetry() -> Telemetry:
    """The one of this process, over the providers that OpenTelemetry has as global ones."""
    global _default
    if _default is None:
        with _making:
            if _default is None:
                _default = Telemetry()
    return _default
