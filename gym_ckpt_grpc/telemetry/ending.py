"""Ending spans off the caller's thread.

Where a user's set-up exports each span as it ends, ending one takes as long as the network does. A call must not wait
for that, so that spans are ended, with the time of their true end, on a thread of ours. The queue is bounded; what
does not fit is dropped and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

from opentelemetry.trace import Span

CAPACITY = 8192
"""Ended spans that wait at most."""
EXIT_LIMIT = 0.5
"""Seconds that the exit of the process waits for them."""


class SpanEnder:
    """A daemon thread that ends spans in order. Started with the first span; anew in a forked child."""

    def __init__(self, *, capacity: int = CAPACITY, on_drop: Callable[[], None] = lambda: None) -> None:
        self.dropped = 0
        self._capacity = capacity
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Span, int]] = queue.SimpleQueue()
        self._pid = 0
        self._idle = threading.Event()

    def end(self, span: Span) -> None:
        """End the span as of now. Never blocks, never raises."""
        ended = time.time_ns()
        if self._pid != os.getpid():
            self._start()
        if self._queue.qsize() >= self._capacity:
            self.dropped += 1
            with contextlib.suppress(Exception):
                self._on_drop()
            return
        self._idle.clear()
        self._queue.put((span, ended))

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until all that was ended so far has been handed on; whether that was so in time."""
        return self._pid != os.getpid() or self._idle.wait(timeout)

    def _start(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            self._queue, self._idle = queue.SimpleQueue(), threading.Event()
            self._idle.set()
            if self._pid == 0:
                # The providers' own hooks were registered before the first span, so they run after this one.
                atexit.register(self.flush, EXIT_LIMIT)
            threading.Thread(
                target=self._run, args=(self._queue, self._idle), name="gymckpt-spans", daemon=True
            ).start()
            self._pid = os.getpid()

    def _run(self, waiting: queue.SimpleQueue[tuple[Span, int]], idle: threading.Event) -> None:
        while True:
            span, ended = waiting.get()
            with contextlib.suppress(Exception):
                span.end(ended)
            if waiting.empty():
                idle.set()
                if not waiting.empty():  # one came in between
                    idle.clear()
