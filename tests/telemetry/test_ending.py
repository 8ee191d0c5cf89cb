"""Spans end on a thread of their own: in order, bounded, and at the exit of the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext

from gym_ckpt_grpc.telemetry.ending import SpanEnder


class Blocked(SpanProcessor):
    """Exports a span when it is let."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.exported: list[str] = []
        self.ends: list[int] = []
        self.threads: set[str] = set()
        self.error: BaseException | None = None

    def on_end(self, span: ReadableSpan) -> None:
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        self.exported.append(span.name)
        self.ends.append(span.end_time or 0)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    made = Blocked()
    yield made
    made.open.set()


def tracer_of(processor: SpanProcessor) -> Any:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer("test")


@pytest.mark.behaviour("C311")
def test_an_exporter_that_blocks_delays_nobody(blocked: Blocked) -> None:
    """Spans are handed on in order when it goes on, with the time of their true end."""
    ender, tracer = SpanEnder(), tracer_of(blocked)
    for name in ("a", "b", "c"):
        ender.end(tracer.start_span(name))
    assert blocked.entered.wait(10)
    after = time.time_ns()
    assert not ender.flush(0.01)
    blocked.open.set()
    assert ender.flush()
    assert blocked.exported == ["a", "b", "c"]
    assert all(end <= after for end in blocked.ends)
    assert blocked.threads == {"gymckpt-spans"}
    assert ender.dropped == 0


@pytest.mark.behaviour("C311")
def test_what_does_not_fit_is_dropped_and_counted(blocked: Blocked) -> None:
    """The queue is bounded; a callback that fails harms nothing."""
    told: list[int] = []

    def on_drop() -> None:
        told.append(1)
        raise ValueError("a bad counter")

    ender, tracer = SpanEnder(capacity=3, on_drop=on_drop), tracer_of(blocked)
    ender.end(tracer.start_span("under way"))
    assert blocked.entered.wait(10)
    for index in range(10):
        ender.end(tracer.start_span(str(index)))
    assert ender.dropped == len(told) == 7
    blocked.open.set()
    assert ender.flush()
    assert blocked.exported == ["under way", "0", "1", "2"]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()])
def test_an_exporter_that_raises(blocked: Blocked, error: BaseException) -> None:
    """The next spans are handed on all the same."""
    ender, tracer = SpanEnder(), tracer_of(blocked)
    blocked.open.set()
    blocked.error = error
    ender.end(tracer.start_span("lost"))
    assert ender.flush()
    blocked.error = None
    ender.end(tracer.start_span("next"))
    assert ender.flush()
    assert blocked.exported == ["next"]


def test_flush_waits_for_all_that_was_ended_before_it() -> None:
    """However the threads take turns: what was ended is there."""
    ended: list[str] = []

    class Fast(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span.name)

    ender, tracer = SpanEnder(), tracer_of(Fast())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for index in range(2000):
            ender.end(tracer.start_span(str(index)))
            if index % 3 == 0:
                assert ender.flush()
                assert ended[-1] == str(index)
    finally:
        sys.setswitchinterval(interval)


def test_many_threads_make_one_thread() -> None:
    """The first spans of a process may end on several threads at once; each ends once."""
    ended: list[str] = []

    class Fast(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span.name)

    ender, tracer = SpanEnder(), tracer_of(Fast())
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for index in range(50):
            ender.end(tracer.start_span(f"{number}-{index}"))

    before = threading.active_count()
    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert ender.flush()
    assert threading.active_count() == before + 1
    assert sorted(ended) == sorted(f"{number}-{index}" for number in range(8) for index in range(50))


def test_spans_that_record_nothing_start_no_thread() -> None:
    """As without an SDK, or where a sampler leaves them out."""
    ender = SpanEnder()
    before = threading.active_count()
    ender.end(NonRecordingSpan(SpanContext(1, 1, is_remote=False)))
    assert threading.active_count() == before
    assert ender.flush(0)


def test_the_thread_ends_with_its_ender() -> None:
    """A test, or a server that is made anew, leaves none behind."""
    ended = threading.Event()

    class Fast(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.thread = threading.current_thread()  # type: ignore[attr-defined]

    ender = SpanEnder()
    ender.end(tracer_of(Fast()).start_span("a"))
    assert ender.flush()
    del ender
    gc.collect()
    thread: threading.Thread = ended.thread  # type: ignore[attr-defined]
    thread.join(10)
    assert not thread.is_alive()


def test_a_process_that_can_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the interpreter: the span is dropped, and nothing is raised."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ender, span = SpanEnder(), tracer_of(SpanProcessor()).start_span("a")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ender.end(span)
    assert ender.dropped == 1
    assert ender.flush(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child() -> None:
    """It has a thread of its own, ends nothing of its parent's, and is not held up by a lock that was held."""
    program = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from gym_ckpt_grpc.telemetry.ending import SpanEnder
exported = []
class Keep(SpanProcessor):
    def on_end(self, span): exported.append(span.name)
provider = TracerProvider(); provider.add_span_processor(Keep())
tracer, ender = provider.get_tracer("t"), SpanEnder()
ender.end(tracer.start_span("parent's"))
assert ender.flush() and exported == ["parent's"]
ender._lock.acquire()
child = os.fork()
if child == 0:
    exported.clear()
    ender.end(tracer.start_span("child's"))
    ok = ender.flush() and exported == ["child's"]
    os._exit(0 if ok else 1)
ender._lock.release()
assert os.waitpid(child, 0)[1] == 0
ender.end(tracer.start_span("later"))
assert ender.flush() and exported == ["parent's", "later"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("seconds", [0, 30])
def test_the_exit_of_the_process(seconds: int) -> None:
    """Spans ended just before are exported by the provider's own hook; an exporter that blocks delays it by half a
    second at most."""
    program = f"""
import time
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from gym_ckpt_grpc.telemetry.ending import SpanEnder
class Slow(SpanProcessor):
    def on_end(self, span): time.sleep({seconds})
provider = TracerProvider()
provider.add_span_processor(Slow())
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
ender, tracer = SpanEnder(), provider.get_tracer("t")
for name in ("one", "two"):
    ender.end(tracer.start_span(name))
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert time.monotonic() - began < 20
    if seconds == 0:
        assert "one" in done.stdout
        assert "two" in done.stdout
