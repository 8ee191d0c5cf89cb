"""Pausing Python's garbage collector while a great many objects are made that all stay."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000  # objects; fewer are walked over in a millisecond or two


class _Pauses:
    """How many pauses there are in this process, and whether the collector goes on after the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if self._count == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count = max(0, self._count - 1)
            if self._count == 0 and self._was_on:
                self._was_on = False
                _settle()
                gc.enable()

    def forget(self) -> None:
        """In a forked child: of the threads that paused, only the one that forked is there, and it may never end."""
        self._lock = threading.Lock()
        self._count = 0
        if self._was_on:
            self._was_on = False
            gc.enable()


def _settle() -> None:
    """Count what was made as old at once; else the very next collection would walk over all of it.

    `unfreeze` gives everything to the oldest generation. Where the process has frozen something of its own, that has
    to stay frozen.
    """
    if gc.get_count()[0] > _MANY and gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.forget)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector of the whole process for the length of a block.

    For bulk decoding and encoding: each collection walks over all that was made so far, which is a third of a restore.
    Memory is freed as ever where the last reference goes; only cycles wait. May be nested and used from several threads
    and tasks at once: the collector goes on when the last block ends, however it ends, if it was on when the first
    began. A process forked inside of a block has it on again.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()
