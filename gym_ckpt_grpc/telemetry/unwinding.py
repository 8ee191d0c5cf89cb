"""A SIGTERM that lets a process end its work, in the order in which its blocks close, and only then ends it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def unwinding_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind the block as Ctrl-C does, and end the process by that signal after it. A second one ends it
    at once.

    By default the signal ends a process before any block closes; uvicorn, too, raises it again as soon as its own
    connections are closed. Only in the main thread; elsewhere, or where SIGTERM is ignored or has a handler that is not
    Python's, it changes nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) in (signal.SIG_IGN, None):
        yield
        return
    told = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        if told:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
