"""C311: telemetry that blocks or fails changes nothing of what is measured."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import NoOpTracerProvider

from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.telemetry import Switches, Telemetry, catalogue
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc
from tests.control.scripted import Participant
from tests.telemetry.kept import Kept

pytestmark = pytest.mark.behaviour("C311")


class Exporter(SpanExporter):
    """Waits until it is let, or raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.error = error
        self.exported: list[str] = []
        if error is not None:
            self.open.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        self.exported += [span.name for span in spans]
        return SpanExportResult.SUCCESS


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter()
    yield made
    made.open.set()


def exporting(exporter: SpanExporter) -> Telemetry:
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider(shutdown_on_exit=False)
    return Telemetry(tracer_provider=tracers, meter_provider=meters, switches=Switches("checkpoint"))


async def cycle(root: Path, telemetry: Telemetry, *, calls: int = 1) -> None:
    """A checkpoint, a restore, a refused call, and so many looks at the status: all with the results they should
    have."""
    async with Participant(root, telemetry=telemetry) as p:
        assert p.channel is not None
        await p.channel.close()
        p.channel = open_channel(p.server.address, telemetry=telemetry)
        p.stub = participant_pb2_grpc.ParticipantServiceStub(p.channel)
        episodes = p.add("a", "b")
        assert (await p.prepare()).phase == pb.PHASE_PREPARED
        assert (await p.commit()).record_count == 2
        await p.resume()
        p.owner.live.clear()
        await p.restore(episodes)
        with pytest.raises(ControlError):
            await p.prepare("c2", epoch=0)
        for _ in range(calls):
            await p.status()
        await p.resume("r1")
        assert sorted(episode.rollout_id for episode in p.owner.live) == ["a", "b"]


async def test_an_exporter_that_blocks(tmp_path: Path, exporter: Exporter) -> None:
    """Field case 146: behind a processor that exports each span as it ends, a hundred calls and a whole checkpoint
    are done before the first export is."""
    telemetry = exporting(exporter)
    await cycle(tmp_path, telemetry, calls=100)
    assert exporter.entered.is_set()
    assert exporter.exported == []
    exporter.open.set()
    assert await asyncio.to_thread(telemetry.flush, 30)
    assert exporter.exported.count("gymckpt.v1.ParticipantService/GetStatus") >= 200
    assert "gym.checkpoint.commit" in exporter.exported


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
async def test_an_exporter_that_raises(tmp_path: Path, error: BaseException) -> None:
    """Whatever it raises."""
    telemetry = exporting(Exporter(error))
    await cycle(tmp_path, telemetry)
    assert telemetry.flush()


async def test_a_queue_that_is_full(tmp_path: Path, exporter: Exporter) -> None:
    """Spans are dropped and counted, and nothing waits."""
    kept = Kept()
    kept.telemetry.ender._capacity = 5
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    kept.telemetry._tracer = tracers.get_tracer("blocked")
    await cycle(tmp_path, kept.telemetry, calls=20)
    dropped = kept.telemetry.ender.dropped
    assert dropped >= 35
    assert kept.value(catalogue.SPANS_DROPPED) == dropped
    exporter.open.set()
    assert await asyncio.to_thread(kept.telemetry.flush, 30)


class Raising(SpanProcessor):
    """Fails at both ends of a span."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        raise ValueError("on_start")

    def on_end(self, span: ReadableSpan) -> None:
        raise ValueError("on_end")


class BadSampler(Sampler):
    def should_sample(self, *args: Any, **more: Any) -> Any:
        raise ValueError("sampler")

    def get_description(self) -> str:
        return "bad"


class BadInstrument:
    def add(self, *args: Any, **more: Any) -> None:
        raise ValueError("instrument")

    record = add


class BadMeters(NoOpMeterProvider):
    def get_meter(self, *args: Any, **more: Any) -> Any:
        raise ValueError("meter")


class BadTracers(NoOpTracerProvider):
    def get_tracer(self, *args: Any, **more: Any) -> Any:
        raise ValueError("tracer")


def raising_processor() -> Telemetry:
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(Raising())
    return Telemetry(tracer_provider=tracers, switches=Switches("checkpoint"))


def raising_sampler() -> Telemetry:
    tracers = TracerProvider(sampler=BadSampler(), shutdown_on_exit=False)
    return Telemetry(tracer_provider=tracers, switches=Switches("checkpoint"))


def raising_instruments() -> Telemetry:
    telemetry = Kept().telemetry
    for name in telemetry._made:
        telemetry._made[name] = BadInstrument().add
    return telemetry


def raising_providers() -> Telemetry:
    return Telemetry(tracer_provider=BadTracers(), meter_provider=BadMeters(), switches=Switches("checkpoint"))


def shut_down_providers() -> Telemetry:
    tracers, meters = TracerProvider(shutdown_on_exit=False), MeterProvider(shutdown_on_exit=False)
    telemetry = Telemetry(tracer_provider=tracers, meter_provider=meters, switches=Switches("checkpoint"))
    tracers.shutdown()
    meters.shutdown()
    return telemetry


@pytest.mark.parametrize(
    "make", [raising_processor, raising_sampler, raising_instruments, raising_providers, shut_down_providers]
)
async def test_parts_that_raise(tmp_path: Path, make: Callable[[], Telemetry]) -> None:
    """Each on its own: every call has the reply that it would have."""
    telemetry = make()
    await cycle(tmp_path, telemetry)
    assert telemetry.flush()


class HeldMetrics(MetricExporter):
    """An exporter of metrics that waits until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **more: Any) -> MetricExportResult:
        self.entered.set()
        self.open.wait(30)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **more: Any) -> None:
        self.open.set()


async def test_an_exporter_of_metrics_that_blocks(tmp_path: Path) -> None:
    """Calls go on while it does."""
    exporter = HeldMetrics()
    meters = MeterProvider([PeriodicExportingMetricReader(exporter, 10)], shutdown_on_exit=False)
    telemetry = Telemetry(meter_provider=meters, switches=Switches("none"))
    try:
        telemetry.add(catalogue.EVENTS_TOTAL, 1, {})
        assert await asyncio.to_thread(exporter.entered.wait, 20)
        await cycle(tmp_path, telemetry, calls=100)
        assert not exporter.open.is_set()
    finally:
        exporter.open.set()
        await asyncio.to_thread(meters.shutdown)


WITHOUT_SDK = """
import asyncio, logging, pathlib, sys, tempfile
logging.basicConfig(level=logging.WARNING)
for name in ("opentelemetry.sdk", "opentelemetry.instrumentation"):
    sys.modules[name] = None  # an import of it fails
from tests.control.scripted import Participant
from gym_ckpt_grpc.telemetry import default_telemetry

async def main(root):
    async with Participant(pathlib.Path(root)) as p:
        p.add("a")
        await p.prepare(); await p.commit(); await p.resume()
import threading
with tempfile.TemporaryDirectory() as root:
    asyncio.run(main(root))
assert default_telemetry().flush(0)
assert "gymckpt-spans" not in [thread.name for thread in threading.enumerate()]
"""


@pytest.mark.parametrize("groups", ["none", "checkpoint"])
def test_with_the_api_alone(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No SDK is installed: nothing is emitted, nothing is said, and no thread is started."""
    monkeypatch.setenv("GYM_CKPT_SPAN_GROUPS", groups)
    done = subprocess.run([sys.executable, "-c", WITHOUT_SDK], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
