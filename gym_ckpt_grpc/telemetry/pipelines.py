"""What `configure` builds over OpenTelemetry's SDK: batches, a bounded queue, counted losses, and an end in time.

Imports the SDK, so it is imported by those who switch exporting on, and by nobody else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import DefaultAggregation, ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import Kind
from gym_ckpt_grpc.telemetry.emitting import SCOPE

LAST_SHARE = 0.25
"""Of the time for an end, what is left for cutting off an exporter that has not come to one."""
SDK_LIMIT = 30.0
"""Seconds that the SDK itself gives a shutdown."""
log = logging.getLogger(__name__)


class BoundedSpans(SpanProcessor):
    """The SDK's batches with a bound that is known: what does not fit, and what could not be exported, is counted.

    The SDK's own processor throws the oldest away without a number that is on by default. capacity: spans that wait.
    on_loss: told how many were lost, on any thread.
    """

    def __init__(self, exporter: SpanExporter, *, capacity: int, on_loss: Callable[[int], None]) -> None:
        self._begin_anew()
        self._capacity = capacity
        self._on_loss = on_loss
        self._batches = BatchSpanProcessor(
            _Handing(exporter, self._handed, on_loss),
            max_queue_size=capacity,
            max_export_batch_size=min(_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512), capacity),
        )

        _bounded.add(self)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Spans that no export was tried for yet."""
        return self._waiting

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue it, or count it as lost. Never blocks."""
        if not (span.context and span.context.trace_flags.sampled):
            return
        with self._lock:
            fits = self._waiting < self._capacity
            self._waiting += fits
        if fits:
            self._batches.on_end(span)
        else:
            self._on_loss(1)

    def _handed(self, count: int) -> None:
        with self._lock:
            self._waiting -= count

    def shutdown(self) -> None:
        """As the SDK does it: waits for the export under way, for half a minute. See `Pipelines.end`."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export what waits."""
        return self._batches.force_flush(timeout_millis)


_bounded: weakref.WeakSet[BoundedSpans] = weakref.WeakSet()


def _after_fork() -> None:
    """The SDK empties the queues of a forked child, and the locks may have been held as it was made."""
    for spans in list(_bounded):
        spans._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Handing(SpanExporter):
    """An exporter that tells how many spans it took, and how many of them it lost."""

    def __init__(self, inner: SpanExporter, on_hand: Callable[[int], None], on_loss: Callable[[int], None]) -> None:
        self._inner, self._on_hand, self._on_loss = inner, on_hand, on_loss

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._on_hand(len(spans))
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._on_loss(len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class PrometheusReader(PrometheusMetricReader):
    """The exporter's reader, with the names of the catalogue.

    By itself it would add the unit to names that have it already: `..._duration_ms_milliseconds`. For a set-up of
    your own, pass it to your MeterProvider. registry: its own if None.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        super().__init__(registry=self.registry, scope_info_enabled=False)

    def _receive_metrics(self, metrics_data: Any, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        if metrics_data is not None:
            metrics_data = _without_doubled_units(metrics_data)
        super()._receive_metrics(metrics_data, timeout_millis, **kwargs)


def _without_doubled_units(data: Any) -> Any:
    return dataclasses.replace(
        data,
        resource_metrics=[
            dataclasses.replace(
                resource,
                scope_metrics=[
                    dataclasses.replace(
                        scope,
                        metrics=[
                            dataclasses.replace(metric, unit=catalogue.prometheus_unit(metric.name, metric.unit))
                            for metric in scope.metrics
                        ],
                    )
                    for scope in resource.scope_metrics
                ],
            )
            for resource in data.resource_metrics
        ],
    )


def views() -> list[View]:
    """For each instrument its buckets, and no attribute that the catalogue does not give it: no id gets through."""
    return [
        View(
            instrument_name=instrument.name,
            meter_name=SCOPE,
            attribute_keys=set(instrument.attributes),
            aggregation=ExplicitBucketHistogramAggregation(instrument.buckets)
            if instrument.kind is Kind.HISTOGRAM
            else DefaultAggregation(),
        )
        for instrument in catalogue.INSTRUMENTS
    ]


class _Silent(WSGIRequestHandler):
    timeout = 10  # seconds that a client may stand still: it holds a thread and a file of ours

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


class _Server(ThreadingWSGIServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nor is a client that went away, or stood still."""


class _ServerOfIpv6(_Server):
    address_family = socket.AF_INET6


class MetricsPage:
    """`/metrics` on a thread of its own. Port 0 picks one; `address` says which. Raises OSError if it is taken."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        page, turn = make_wsgi_app(registry), threading.Lock()

        def one_at_a_time(environ: Any, start_response: Any) -> Any:
            with turn:  # the reader gives what two scrapes collect to one of them
                return page(environ, start_response)

        family, shown = (_ServerOfIpv6, f"[{host}]") if ":" in host else (_Server, host)
        self._server: WSGIServer = make_server(host, port, one_at_a_time, family, _Silent)
        self.address = f"{shown}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="gymckpt-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class Pipelines:
    """The providers of one process and what they export to. on_loss: told of lost spans. service_name, capacity
    (spans that wait at most): the SDK's variables say them if not given."""

    def __init__(
        self,
        *,
        spans: Sequence[SpanExporter] = (),
        metrics: Sequence[MetricExporter] = (),
        page: tuple[str, int] | None = None,
        service_name: str = "",
        capacity: int | None = None,
        on_loss: Callable[[int], None],
    ) -> None:
        capacity = capacity or _number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        # Counters begin at 0 in each incarnation, and this is what tells one from the next.
        identity = {"service.instance.id": str(uuid.uuid4())}
        resource = Resource.create({**identity, **({"service.name": service_name} if service_name else {})})
        self.page: MetricsPage | None = None
        readers: list[Any] = []
        if page is not None:
            shown = PrometheusReader()
            self.page = MetricsPage(shown.registry, *page)
            readers.append(shown)
        try:
            readers += [PeriodicExportingMetricReader(exporter) for exporter in metrics]
            # Their own hooks would wait at the exit of the process for as long as an exporter tries.
            self.meters = MeterProvider(readers, resource, shutdown_on_exit=False, views=views()) if readers else None
            self.processors = [BoundedSpans(exporter, capacity=capacity, on_loss=on_loss) for exporter in spans]
            self.tracers = TracerProvider(resource=resource, shutdown_on_exit=False) if spans else None
        except Exception:  # a variable of the SDK that it does not take
            if self.page is not None:
                self.page.close()
            raise
        for processor in self.processors:
            assert self.tracers is not None
            self.tracers.add_span_processor(processor)
        self._pid = os.getpid()
        steps: list[Callable[[], object]] = [processor.shutdown for processor in self.processors]
        if self.meters is not None:
            steps.append(functools.partial(self.meters.shutdown, timeout_millis=1000 * SDK_LIMIT))
        if self.page is not None:
            steps.append(self.page.close)
        self._steps = [_LateStep(step) for step in steps]
        exporters: list[SpanExporter | MetricExporter] = [*spans, *metrics]
        self._cut = _LateStep(lambda: [exporter.shutdown() for exporter in exporters])

    def end(self, timeout: float) -> bool:
        """Export what waits and close, in `timeout` seconds at most; whether all was done. Never raises.

        The SDK waits half a minute for an export under way, whatever its exporter's own limit is. It does so on
        threads of ours, and what has not ended towards the end of the time is cut off. Once.
        """
        if self._pid != os.getpid():
            return True  # a forked child: what was begun belongs to its parent
        ends = time.monotonic() + timeout
        for step in self._steps:
            step.begin()
        late = [step for step in self._steps if not step.ended(ends - LAST_SHARE * timeout)]
        if late:
            self._cut.begin()
            for step in (self._cut, *late):
                step.ended(ends)
        if lost := sum(processor.waiting for processor in self.processors):
            log.warning("telemetry ended with %d spans that could not be exported in %.1f s", lost, timeout)
        return not late


def _number(variable: str, default: int) -> int:
    """One of the SDK's own variables, whose bounds are kept here; its default for what is no number."""
    text = os.environ.get(variable, "")
    return max(1, int(text)) if text.strip().isdigit() else default


class _LateStep:
    """Something to be done at the end, on a daemon thread that waits for it from now on: an interpreter that is ending
    starts no thread any more."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._told, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="gymckpt-end", daemon=True).start()

    def _run(self) -> None:
        self._told.wait()
        with contextlib.suppress(Exception):
            self._step()
        self._done.set()

    def begin(self) -> None:
        """Do it now."""
        self._told.set()

    def ended(self, by: float) -> bool:
        """Wait for it until then, on the monotonic clock; whether it is done."""
        return self._done.wait(max(0.0, by - time.monotonic()))


def console_exporters(out: TextIO | None = None) -> tuple[SpanExporter, MetricExporter]:
    """What prints to standard error, or to `out`: standard output may be what a command is for."""
    stream = out or sys.stderr
    return (
        ConsoleSpanExporter(out=stream, formatter=lambda span: span.to_json(indent=None) + "\n"),
        ConsoleMetricExporter(out=stream, formatter=lambda data: data.to_json(indent=None) + "\n"),
    )


def otlp_exporters(
    endpoint: str | None, *, headers: Mapping[str, dict[str, str]], local: bool
) -> tuple[SpanExporter, MetricExporter]:
    """OTLP over gRPC. endpoint: None for what the SDK's variables say. headers: of `traces` and of `metrics`. local:
    whether it is on this host, where no proxy of the environment is meant (architecture section 3, fact 5)."""
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    options: Any = (("grpc.enable_http_proxy", 0),) if local else None
    return (
        OTLPSpanExporter(endpoint=endpoint, headers=headers["traces"], channel_options=options),
        OTLPMetricExporter(endpoint=endpoint, headers=headers["metrics"], channel_options=options),
    )
