"""Exporting to a collector over OTLP: from a part of this process, and from servers that it starts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from gym_ckpt_grpc.telemetry import Switches, Telemetry
from gym_ckpt_grpc.telemetry.switches import VARIABLE as GROUPS
from tests.telemetry.otlp_receiver import INTERNAL_METRICS

ON = "default,checkpoint"
"""The span groups that make a checkpoint's spans."""


def server_env(endpoint: str, groups: str = ON) -> dict[str, str]:
    """What makes a server process of ours export: its own variables, and the SDK's."""
    return {
        "GYM_CKPT_TELEMETRY": "otlp",
        GROUPS: groups,
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",  # ms
        "OTEL_METRIC_EXPORT_INTERVAL": "200",  # ms
        INTERNAL_METRICS: "true",
    }


@dataclass(frozen=True)
class Exporting:
    """Telemetry of a part of this process, under a name of its own."""

    telemetry: Telemetry
    _tracers: TracerProvider
    _meters: MeterProvider

    def send_spans(self) -> None:
        """Wait until every span that has ended is exported."""
        assert self.telemetry.flush(), "spans wait to be ended"
        assert self._tracers.force_flush(), "spans are not exported"

    def send_metrics(self) -> None:
        """Wait until the metrics, as they are now, are exported."""
        assert self._meters.force_flush(), "metrics are not exported"


@contextmanager
def exporting(service: str, endpoint: str, groups: str = ON) -> Iterator[Exporting]:
    """All of it is exported when the block ends. endpoint: of a collector."""
    resource = Resource.create({"service.name": service, "service.instance.id": uuid.uuid4().hex})
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint, insecure=True), 60_000)
    meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    tracers = TracerProvider(resource=resource, meter_provider=meters, shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
    made = Exporting(
        Telemetry(tracer_provider=tracers, meter_provider=meters, switches=Switches(groups)), tracers, meters
    )
    try:
        yield made
    finally:
        made.telemetry.flush()
        tracers.shutdown()
        meters.shutdown()
