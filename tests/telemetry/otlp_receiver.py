"""A collector in the test's own process: a real OTLP server on loopback, which keeps what every process exports."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from tests.telemetry.traces import Seen, Trace, grouped

LIVE = "otel.sdk.span.live"
"""The SDK's own count of spans that began and did not end; exported where INTERNAL_METRICS is set."""
INTERNAL_METRICS = "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED"
KINDS = {1: "internal", 2: "server", 3: "client"}
STATUSES = {0: "unset", 1: "ok", 2: "error"}
LIMIT = 20.0
"""Seconds to wait for something to arrive."""


@dataclass(frozen=True)
class Point:
    """One point of a series as it was exported. value: of a histogram its count."""

    process: str
    name: str
    value: float
    attributes: dict[str, object] = field(compare=False)


class Collector(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
    """`with Collector() as collector:` with its address in `endpoint`. answering: cleared, it keeps calls waiting."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[bytes] = []
        """Every request as it came."""
        self.headers: list[dict[str, str]] = []
        self.answering = threading.Event()
        self.answering.set()
        self._spans: list[Seen] = []
        self._points: list[Point] = []
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
        trace_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        metrics_grpc.add_MetricsServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answering.set()
        self._server.stop(None).wait()

    # ---- what it serves: both services call their one method Export

    def Export(self, request: Any, context: Any) -> Any:
        """Keep a request of either service."""
        self.answering.wait()
        with self._changed:
            self.requests.append(request.SerializeToString())
            self.headers.append({str(name): str(value) for name, value in context.invocation_metadata()})
            if isinstance(request, trace_pb.ExportTraceServiceRequest):
                self._spans += _spans(request)
            else:
                self._points += _points(request)
            self._changed.notify_all()
        if isinstance(request, trace_pb.ExportTraceServiceRequest):
            return trace_pb.ExportTraceServiceResponse()
        return metrics_pb.ExportMetricsServiceResponse()

    # ---- what came

    @property
    def spans(self) -> list[Seen]:
        """Every span received, in the order of arrival."""
        with self._changed:
            return list(self._spans)

    @property
    def points(self) -> list[Point]:
        """Every point received, in the order of arrival: of a series the last one counts."""
        with self._changed:
            return list(self._points)

    def traces(self) -> list[Trace]:
        """The spans received by trace, the longest first."""
        return grouped(self.spans)

    def live(self) -> dict[str, float]:
        """Spans that had begun and not ended, by process, as of its last export. Only where INTERNAL_METRICS is set."""
        return {point.process: point.value for point in self.points if point.name == LIVE}

    def total(self, name: str, **attributes: object) -> float:
        """The sum over all processes of the last values of an instrument's series that have these attributes."""
        last = {
            (point.process, tuple(sorted(point.attributes.items(), key=str))): point
            for point in self.points
            if point.name == name
        }
        return sum(
            point.value
            for point in last.values()
            if all(point.attributes.get(label) == value for label, value in attributes.items())
        )

    def until(self, reached: Callable[[Collector], bool], limit: float = LIMIT) -> None:
        """Wait until what arrived is as wanted; fails with a drawing of it if that takes longer than `limit` s."""
        ends = time.monotonic() + limit
        with self._changed:
            while not reached(self):
                if not self._changed.wait(ends - time.monotonic()) and time.monotonic() >= ends:
                    raise AssertionError(f"not received within {limit} s; what came:\n{self.drawn()}")

    def drawn(self) -> str:
        """Every trace with its times."""
        return "\n".join(trace.drawn() for trace in self.traces()) or "no span"


def _spans(request: trace_pb.ExportTraceServiceRequest) -> Iterator[Seen]:
    for resource in request.resource_spans:
        process = _process(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    name=span.name,
                    process=process,
                    kind=KINDS.get(span.kind, str(span.kind)),
                    began=span.start_time_unix_nano / 1e6,
                    ended=span.end_time_unix_nano / 1e6,
                    status=STATUSES[span.status.code],
                    attributes=_attributes(span.attributes),
                    scope=scope.scope.name,
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                )


def _points(request: metrics_pb.ExportMetricsServiceRequest) -> Iterator[Point]:
    for resource in request.resource_metrics:
        process = _process(resource.resource.attributes)
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in _data(metric):
                    yield Point(process, metric.name, _value(point), _attributes(point.attributes))


def _data(metric: Any) -> Sequence[Any]:
    kind = metric.WhichOneof("data")
    return getattr(metric, kind).data_points if kind else ()


def _value(point: Any) -> float:
    if hasattr(point, "count"):
        return float(point.count)
    return float(getattr(point, point.WhichOneof("value") or "as_int"))


def _process(attributes: Iterable[Any]) -> str:
    """The name that a process gives itself, and the beginning of its instance id: two lives are two processes."""
    said = _attributes(attributes)
    instance = str(said.get("service.instance.id", ""))[:8]
    return f"{said.get('service.name', '?')}{f':{instance}' if instance else ''}"


def _attributes(attributes: Iterable[Any]) -> dict[str, object]:
    found: dict[str, object] = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, kind) if kind else None
    return found


def main() -> None:
    """Collect until stdin ends: `python -m tests.telemetry.otlp_receiver`, which says where it listens."""
    with Collector() as collector:
        print(collector.endpoint, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
