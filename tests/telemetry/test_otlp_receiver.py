"""The collector of the tests sees what is wrong: a harness that finds nothing would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, set_span_in_context

from tests.telemetry.otlp_receiver import INTERNAL_METRICS, Collector
from tests.telemetry.traces import Seen, Trace, grouped


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def test_what_an_sdk_exports_arrives(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans with parents, links and attributes, metrics, headers; and how many spans did not end."""
    monkeypatch.setenv(INTERNAL_METRICS, "true")
    resource = Resource.create({"service.name": "counter", "service.instance.id": "7"})
    exporter = OTLPMetricExporter(endpoint=collector.endpoint, insecure=True)
    meters = MeterProvider([PeriodicExportingMetricReader(exporter, 60_000)], resource=resource)
    tracers = TracerProvider(resource=resource, meter_provider=meters, shutdown_on_exit=False)
    sending = OTLPSpanExporter(endpoint=collector.endpoint, insecure=True, headers={"x-marked": "yes"})
    tracers.add_span_processor(BatchSpanProcessor(sending))
    tracer = tracers.get_tracer("here")
    meters.get_meter("here").create_counter("seen").add(2, {"by": "me"})

    one = tracer.start_span("one", attributes={"a": "b", "n": 3})
    two = tracer.start_span("two", set_span_in_context(one), links=[Link(one.get_span_context())])
    two.end()
    assert tracers.force_flush()
    assert meters.force_flush()
    collector.until(lambda c: bool(c.spans) and bool(c.live()))
    assert collector.live() == {"counter:7": 1}
    assert collector.total("seen", by="me") == 2
    [half] = collector.traces()
    assert [span.name for span in half.orphans] == ["two"]

    one.end()
    tracers.shutdown()
    meters.shutdown()
    collector.until(lambda c: len(c.spans) == 2)
    [trace] = collector.traces()
    trace.whole()
    assert (trace.root.name, trace.root.attributes) == ("one", {"a": "b", "n": 3})
    [child] = trace.children(trace.root)
    assert (child.name, child.process) == ("two", "counter:7")
    assert child.links == ((trace.trace_id, trace.root.span_id),)
    assert collector.live() == {"counter:7": 0}
    assert any(headers.get("x-marked") == "yes" for headers in collector.headers)
    assert any(b"counter" in request for request in collector.requests)


def spans() -> list[Seen]:
    return [
        Seen("t", "1", "", "gym.checkpoint.root", "a:1", began=0, ended=100),
        Seen("t", "2", "1", "gym.checkpoint.left", "b:2", began=10, ended=50),
        Seen("t", "3", "2", "/x.Y/Call", "b:2", "client", began=20, ended=30),
        Seen("u", "4", "", "other", "c", began=0, ended=1),
    ]


def test_a_tree() -> None:
    trace, other = grouped(spans())
    trace.whole()
    assert (trace.trace_id, other.root.name) == ("t", "other")
    assert [span.span_id for span in trace.under(trace.root)] == ["2", "3"]
    assert [span.span_id for span in trace.above(trace.spans[2])] == ["2", "1"]
    assert trace.processes == {"a", "b"}
    assert trace.only("/x.Y/Call", kind="client", process="b").ms == 10
    assert trace.of("/x.Y/Call", kind="server") == []


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        pytest.param(lambda found: [found[0], found[2]], "1 orphans", id="a span that never ended"),
        pytest.param(lambda found: [*found[:3], found[1]], "twice", id="a span that came twice"),
        pytest.param(lambda found: [*found[:3], Seen("t", "9", "", "again")], "2 roots", id="a second root"),
        pytest.param(lambda found: found[1:3], "0 roots", id="no root"),
    ],
)
def test_what_is_wrong_with_a_tree(spoiled: object, said: str) -> None:
    assert callable(spoiled)
    with pytest.raises(AssertionError, match=said):
        Trace(spoiled(spans())).whole()


def test_a_drawing() -> None:
    """Each span below its parent, where it stands in time, and what has no parent here."""
    lines = Trace([*spans()[:3], Seen("t", "5", "8", "lost", began=90, ended=100)]).drawn().splitlines()
    assert lines[0] == "trace t: 4 spans, 100.0 ms"
    assert [line.split()[0] for line in lines[1:]] == ["root", "left", "Call", "ORPHAN"]
    for line, begin in zip(lines[1:4], ("root", "  left", "    Call (client)"), strict=True):
        assert line.startswith(begin)
    bars = [line.split("|")[1] for line in lines[1:]]
    assert bars[0].count("=") == 40
    assert (bars[1].index("="), bars[1].count("=")) == (4, 16)
