"""What one span site and one metric site cost, in a tight loop, by what listens."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from benchmarks.rounds import WrongResult
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.telemetry import (
    CallServerInterceptor,
    MetricsObserver,
    Recorder,
    Switches,
    Telemetry,
    call_interceptors,
    catalogue,
)
from gym_ckpt_grpc.telemetry import attributes as at

BATCH = 500
"""Visits between two exports: fewer spans than a batch of the SDK has, so that it exports when it is asked to."""
WHO = ParticipantIdentity(ParticipantKind.RESOURCES, "counter")


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way in which a process may be set up. end: waits until spans have ended, which a thread of ours sees to.
    export: waits until they are exported. runner: of the sites that are coroutines."""

    name: str
    telemetry: Telemetry
    runner: asyncio.Runner
    end: Callable[[], object] = nothing
    export: Callable[[], None] = nothing

    @property
    def recorder(self) -> Recorder:
        """Of a participant in that process."""
        return Recorder.of(WHO, self.telemetry)


OFF, SDK, READER, EXPORTED = "no SDK", "SDK, no reader", "SDK, a reader, spans off", "spans and metrics exported"
LATER = "exporting them later"
"""What the exporter's own thread does for a site, seconds after it."""


@contextmanager
def modes(endpoint: str) -> Iterator[list[Mode]]:
    """Each way, in this one process; none of them is global. endpoint: of a collector in another process."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from tests.telemetry.exporting import exporting

    off = Switches("none")
    bare = MeterProvider([], shutdown_on_exit=False)
    read = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    tracers = TracerProvider(shutdown_on_exit=False)
    with exporting("tight-loop", endpoint) as exported, asyncio.Runner() as runner:
        yield [
            Mode(OFF, Telemetry(switches=off), runner),
            Mode(SDK, Telemetry(tracer_provider=tracers, meter_provider=bare, switches=off), runner),
            Mode(READER, Telemetry(tracer_provider=tracers, meter_provider=read, switches=off), runner),
            Mode(EXPORTED, exported.telemetry, runner, exported.telemetry.flush, exported.send_spans),
        ]
    for provider in (bare, read):
        provider.shutdown()


# ---- the sites -----------------------------------------------------------------------------------------------


def spans(mode: Mode, times: int) -> None:
    """A step as the product writes it, without its metric: a block with two attributes."""
    recorder = mode.recorder
    for _ in range(times):
        with recorder.step(catalogue.WRITE, timed=False) as step:
            step.set(at.RECORDS, 12)
            step.set(at.BYTES, 3456)


def counters(mode: Mode, times: int) -> None:
    """One event, as the product counts it."""
    recorder = mode.recorder
    for _ in range(times):
        recorder.event("generation_cut", disposition="cut")


def histograms(mode: Mode, times: int) -> None:
    """One duration."""
    recorder = mode.recorder
    labels = {at.STEP: "write", at.OUTCOME: "ok"}
    for _ in range(times):
        recorder.count(catalogue.STEP_DURATION, 1.25, labels=labels)


class _Call:
    """A call that was answered at once, as a client's interceptor sees it."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def cancelled(self) -> bool:
        return False

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK


class _Context:
    """Of a call whose servicer sets no status, as grpc.aio has it."""

    def code(self) -> int:
        return 0


METHOD = "/gymckpt.v1.ParticipantService/Prepare"
DETAILS = grpc.aio.ClientCallDetails(METHOD, 5.0, grpc.aio.Metadata(("authorization", "Bearer x")), None, None)


def made(mode: Mode, times: int) -> None:
    """What the client's interceptors do for one call: a span, a metric, and the trace context that is sent."""
    interceptor: Any = call_interceptors(MetricsObserver(mode.telemetry), mode.telemetry)[0]

    async def answered(details: Any, request: Any) -> _Call:
        return _Call()

    async def loop() -> None:
        for _ in range(times):
            await interceptor.intercept_unary_unary(answered, DETAILS, None)

    mode.runner.run(loop())


def served(mode: Mode, times: int) -> None:
    """What the server's interceptor does for one call: the trace context that came, a span, a metric."""
    interceptor = CallServerInterceptor(MetricsObserver(mode.telemetry), mode.telemetry)
    context: Any = _Context()
    metadata: tuple[tuple[str, str], ...] = (("authorization", "Bearer x"),)
    if mode.telemetry.switches.checkpoint:  # with spans off no process of ours begins a trace
        metadata = (*metadata, ("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"))
    details: Any = SimpleNamespace(method=METHOD, invocation_metadata=metadata)

    async def answer(request: Any, context: Any) -> int:
        return 1

    async def found(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(answer)

    async def loop() -> None:
        for _ in range(times):
            handler: Any = await interceptor.intercept_service(found, details)
            await handler.unary_unary(None, context)

    mode.runner.run(loop())


SPAN, COUNTER, HISTOGRAM, MADE, SERVED = "span", "counter", "histogram", "call made", "call served"
SITES: Mapping[str, Callable[[Mode, int], None]] = {
    SPAN: spans,
    COUNTER: counters,
    HISTOGRAM: histograms,
    MADE: made,
    SERVED: served,
}


@dataclass(slots=True)
class Found:
    """Nanoseconds per site: one per sample, by (site, mode)."""

    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)


def measure(endpoint: str, samples: int, times: int) -> Found:
    """Each site in each mode, by turns. Processor time of all threads of this process."""
    found = Found()
    with modes(endpoint) as ways:
        for number in range(samples + 1):
            for name, site in SITES.items():
                for mode in ways:
                    taken, later = _once(site, mode, times if number else max(1, times // 10))
                    if number:
                        found.samples.setdefault((name, mode.name), []).append(taken)
                    if number and mode.name == EXPORTED:
                        found.samples.setdefault((name, LATER), []).append(later)
    return found


def _once(site: Callable[[Mode, int], None], mode: Mode, times: int) -> tuple[float, float]:
    """Nanoseconds at the site, our thread that ends spans included; and later, for the export."""
    gc.collect()
    here = later = 0
    for left in range(times, 0, -BATCH):
        began = time.process_time_ns()
        site(mode, min(BATCH, left))
        mode.end()
        ended = time.process_time_ns()
        mode.export()
        here, later = here + ended - began, later + time.process_time_ns() - ended
    return here / times, later / times


# ---- a collector in a process of its own ---------------------------------------------------------------------


@contextmanager
def collector() -> Iterator[str]:
    """Its endpoint. It is another process, so that its work is not counted as ours."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.telemetry.otlp_receiver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        endpoint = process.stdout.readline().strip()
        if not endpoint:
            raise WrongResult("the collector ended; what it wrote to stderr says why")
        yield endpoint
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
