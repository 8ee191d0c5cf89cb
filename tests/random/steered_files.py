"""Local files whose writes a test holds up or fails. Nothing is synced: no sequence loses power."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from gym_ckpt_grpc.protocol.errors import StateUnwritable
from gym_ckpt_grpc.storage import LocalFiles
from gym_ckpt_grpc.storage.local_files import LocalSink

OK, ENOSPC, HOLD_START, HOLD_PUBLISH = "ok", "enospc", "hold_start", "hold_publish"
MODES = (OK, ENOSPC, HOLD_START, HOLD_PUBLISH)
MANIFEST = "manifest.json"
REAL_LIMIT = 60.0
MAX_HELD = 3
"""Threads held at once: a participant has one more, so that it can still answer."""


class _UnsyncedSink(LocalSink):
    def sync(self) -> None:
        return None


class SteeredFiles(LocalFiles):
    """mode: what happens to a write that begins (HOLD_START) or names its manifest (HOLD_PUBLISH), until `steer`.

    on_hold is told 1 when a thread begins to wait here, and minus their number when they go on.
    """

    def __init__(self, on_hold: Callable[[int], None]) -> None:
        super().__init__()
        self._on_hold = on_hold
        self._mode = OK
        self._change = threading.Condition()
        self.held = 0
        self.publishing = 0

    @property
    def mode(self) -> str:
        return self._mode

    def steer(self, mode: str) -> None:
        """Change the mode; what was held goes on."""
        with self._change:
            if mode == self._mode:
                return
            self._mode = mode
            if self.held:
                self._on_hold(-self.held)  # here and not by the threads: from now on they count as at work
                self.held = 0
            self._change.notify_all()

    def _wait_while(self, mode: str) -> None:
        with self._change:
            if self._mode != mode or self.held >= MAX_HELD:
                return
            self.held += 1
            self._on_hold(1)
            assert self._change.wait_for(lambda: self._mode != mode, timeout=REAL_LIMIT)

    def create(self, path: str) -> LocalSink:
        self._wait_while(HOLD_START)
        if self._mode == ENOSPC:
            raise StateUnwritable(f"cannot create {path!r}: {os.strerror(errno.ENOSPC)} (ENOSPC)")
        sink = super().create(path)
        return _UnsyncedSink(sink._handle, sink._path)

    def publish(self, temporary: str, path: str) -> None:
        if not path.endswith(MANIFEST):
            super().publish(temporary, path)
            return
        self.publishing += 1
        try:
            self._wait_while(HOLD_PUBLISH)
            super().publish(temporary, path)
        finally:
            self.publishing -= 1

    def sync_file(self, path: str) -> None:
        return None

    def sync_dir(self, path: str) -> None:
        return None
