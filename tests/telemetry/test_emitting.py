"""`Telemetry`: over providers that come late, gauges of what lives, and one for the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterable

import pytest

from gym_ckpt_grpc.telemetry import Reading, Telemetry, catalogue, default_telemetry, emitting
from gym_ckpt_grpc.telemetry import attributes as at
from tests.telemetry.kept import Kept


class Source:
    """Shows two gauges of a service."""

    def __init__(self, service: str, marks: float = 1.0) -> None:
        self.place = {at.PARTICIPANT_KIND: "resources", at.SERVICE: service}
        self.marks = marks
        self.failing = False

    def readings(self) -> Iterable[Reading]:
        yield catalogue.MARKS_HELD, self.marks, self.place
        if self.failing:
            raise RuntimeError("changed while it was read")
        yield catalogue.BLOCKERS, 0, self.place


@pytest.mark.behaviour("C308")
def test_gauges_of_what_lives() -> None:
    """Each source once, and no longer than it lives."""
    kept = Kept()
    first, second = Source("one"), Source("two", 2)
    for source in (first, second, first):
        kept.telemetry.watch(source)
    who = {"participant_kind": "resources"}
    assert kept.points(catalogue.MARKS_HELD) == [({**who, "service": "one"}, 1), ({**who, "service": "two"}, 2)]
    second.marks = 5
    assert kept.value(catalogue.MARKS_HELD, service="two") == 5
    del first, source
    gc.collect()
    assert kept.points(catalogue.MARKS_HELD) == [({**who, "service": "two"}, 5)]
    kept.check_declared()


@pytest.mark.behaviour("C311")
def test_a_source_that_fails_hides_no_other() -> None:
    """It shows what it came to show; the others show all."""
    kept = Kept()
    bad, good = Source("bad"), Source("good")
    bad.failing = True
    kept.telemetry.watch(bad)
    kept.telemetry.watch(good)
    assert [labels["service"] for labels, _ in kept.points(catalogue.BLOCKERS)] == ["good"]
    assert kept.value(catalogue.MARKS_HELD, service="good") == 1


def test_sources_that_come_and_go_while_gauges_are_read() -> None:
    """The exporter's thread reads at any moment."""
    kept = Kept()
    failed: list[BaseException] = []
    living: list[Source] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                kept.telemetry._observe(catalogue.MARKS_HELD)
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for round_ in range(200):
            living[:] = [Source(f"{round_}-{index}") for index in range(10)]
            for index in range(10):
                kept.telemetry.watch(living[index])
    finally:
        stop.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert failed == []
    living.clear()
    gc.collect()
    assert kept.points(catalogue.MARKS_HELD) == []


def test_one_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads ask for it first."""
    monkeypatch.setattr(emitting, "_default", None)
    found: list[Telemetry] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(default_telemetry())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1


def test_an_instrument_that_is_not_in_the_catalogue() -> None:
    """Is not recorded, and nothing is raised."""
    kept = Kept()
    kept.telemetry.add(catalogue.Instrument("other", catalogue.Kind.COUNTER, "1", "no"), 1, {})
    assert kept.names() == set()


LATE = """
from gym_ckpt_grpc.telemetry import Switches, catalogue, default_telemetry
from tests.telemetry.test_emitting import Source
telemetry = default_telemetry()
telemetry.switches.set("checkpoint")
source = Source("one")
telemetry.watch(source)
with telemetry.span(catalogue.PREPARE):
    telemetry.add(catalogue.EVENTS_TOTAL, 1, {})

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))

with telemetry.span(catalogue.COMMIT):
    telemetry.add(catalogue.EVENTS_TOTAL, 1, {})
    telemetry.add(catalogue.PAUSE, 30, {})
assert telemetry.flush()
assert [span.name for span in spans.get_finished_spans()] == ["gym.checkpoint.commit"]
found = {
    metric.name: metric.data.data_points[0]
    for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics for metric in scope.metrics
}
assert found["gym.checkpoint.events_total"].value == 1
assert found["gym.checkpoint.marks_held"].value == 1
assert tuple(found["gym.checkpoint.pause_ms"].explicit_bounds) == catalogue.PAUSE.buckets
"""


def test_providers_that_are_set_after_our_import() -> None:
    """Global ones count from the moment they are set, for instruments that were made before as well."""
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=60)
