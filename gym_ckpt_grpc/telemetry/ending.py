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
import weakref
from collections.abc import Callable

from opentelemetry.trace import Span

CAPACITY = 8192
"""Ended spans that wait at most."""
EXIT_LIMIT = 0.5
"""Seconds that the exit of the process waits for them."""

_Waiting = queue.SimpleQueue[tuple[Span, int] | threading.Event | None]


class SpanEnder:
    """A daemon thread that ends spans in order. Started with the first span; anew in a forked child, which has
    nothing to do with the spans that its parent had ended."""

    def __init__(self, *, capacity: int = CAPACITY, on_drop: Callable[[], None] = lambda: None) -> None:
        self.dropped = 0
        self._capacity = capacity
        self._on_drop = on_drop
        self._at_exit = False
        self._begin_anew()
        _all.add(self)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._queue: _Waiting | None = None

    def end(self, span: Span) -> None:
        """End the span as of now. Never blocks, never raises."""
        try:
            if not span.is_recording():  # left out by a sampler, or no SDK: nothing is exported
                return
            waiting = self._queue or self._start()
            if waiting.qsize() < self._capacity:
                waiting.put((span, time.time_ns()))
                return
        except Exception:  # no thread can be started, for one: not at this stage of the process's exit
            pass
        self.dropped += 1
        with contextlib.suppress(Exception):
            self._on_drop()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until all that was ended so far has been handed on; whether that was so in time (seconds)."""
        waiting = self._queue
        if waiting is None:
            return True
        reached = threading.Event()
        waiting.put(reached)
        return reached.wait(timeout)

    def _start(self) -> _Waiting:
        with self._lock:
            if self._queue is not None:
                return self._queue
            waiting: _Waiting = queue.SimpleQueue()
            threading.Thread(target=_run, args=(waiting,), name="gymckpt-spans", daemon=True).start()
            weakref.finalize(self, waiting.put, None).atexit = False
            if not self._at_exit:
                # The hook of the provider that this span is of was registered before, so it runs after this one.
                atexit.register(_flush_at_exit, weakref.ref(self))
                self._at_exit = True
            self._queue = waiting
            return waiting


def _run(waiting: _Waiting) -> None:
    while (item := waiting.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        span, ended = item
        with contextlib.suppress(BaseException):  # an exporter that exits ends its own business, not this thread
            span.end(ended)
        del item, span  # what it carries is not kept until the next one comes


def _flush_at_exit(ender: weakref.ref[SpanEnder]) -> None:
    if (found := ender()) is not None:
        found.flush(EXIT_LIMIT)


_all: weakref.WeakSet[SpanEnder] = weakref.WeakSet()


def _after_fork() -> None:
    """The thread is not in the child, and the lock may have been held as it was made."""
    for ender in list(_all):
        ender._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
