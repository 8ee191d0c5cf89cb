"""The audit log: one JSON object per line and mutating call, whoever made it and however it ended.

Lines are written by a thread of their own; a call never waits for it, and never fails by it. What could not be
written is counted and warned of once. No line has a token, a payload or a whole request in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

MAX_WAITING = 10_000
"""Lines that may wait to be written; further ones are lost, and counted."""
MAX_VALUE = 256
"""Characters of one value: what a caller sends is cut to it."""
FLUSH_SECONDS = 5.0
"""How long closing waits for a disk that hangs."""
log = logging.getLogger("gym_ckpt_grpc.auth")


@dataclass(slots=True)
class CallNote:
    """What is found out about a call on its way inwards. role, name, checkpoint_id, episodes and trace_id stay empty
    for callers that are refused before it."""

    method: str
    began: float = field(default_factory=time.monotonic)
    role: str = ""
    name: str = ""
    by: str = ""
    trace_id: str = ""
    checkpoint_id: str = ""
    episodes: int | None = None


current_note: ContextVar[CallNote | None] = ContextVar("gym_ckpt_call_note", default=None)
"""The note of the call that this task serves; None if it is not audited."""


def line_of(note: CallNote, *, peer: str, code: str) -> bytes:
    """The line of an ended call."""
    values: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "method": note.method[:MAX_VALUE],
        "code": code,
        "role": note.role,
        "by": note.by,
        "certificate": note.name[:MAX_VALUE],
        "peer": peer[:MAX_VALUE],
        "checkpoint_id": note.checkpoint_id[:MAX_VALUE],
        "episodes": note.episodes,
        "seconds": round(time.monotonic() - note.began, 6),
        "trace_id": note.trace_id,
    }
    try:
        return orjson.dumps(values) + b"\n"
    except orjson.JSONEncodeError:  # text that has no UTF-8 form
        return orjson.dumps({key: ascii(value) for key, value in values.items()}) + b"\n"


def _is_torn(path: Path, descriptor: int) -> bool:
    """Whether an open file ends within a line: a full disk or a crash has left it so."""
    there = os.fstat(descriptor)
    if not stat.S_ISREG(there.st_mode) or not there.st_size:
        return False
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False  # one that may only be appended to


class AuditLog:
    """Appends lines to a file of mode 0600, in whole lines, so that several processes may share it.

    A file that was renamed or removed is opened anew for the next line. on_lost: told how many lines were lost, in
    any thread. `open` raises OSError if the file cannot be appended to at the start; blocking.
    """

    def __init__(self, path: str | os.PathLike[str], *, on_lost: Callable[[int], None] = lambda _: None) -> None:
        self.path = Path(path)
        self.lost = 0
        """Lines that could not be written."""
        self._on_lost = on_lost
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._accepted = self._done = 0
        self._thread: threading.Thread | None = None
        self._descriptor = -1
        self._torn = False
        self._warned = False

    def open(self) -> None:
        """Open the file, and begin to write."""
        self._reopen()
        self._thread = threading.Thread(target=self._run, name="gym-ckpt-audit", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Have a line written soon. Never blocks and never raises."""
        with self._lock:
            room = self._thread is not None and self._accepted - self._done < MAX_WAITING
            if room:
                self._accepted += 1
                self._waiting.put(line)
        if not room:
            self._lose(1, "too many lines wait to be written" if self._thread else "it is closed")

    def close(self) -> None:
        """Write what waits, and close the file; at most FLUSH_SECONDS. Blocks."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._waiting.put(None)
        if thread is None:
            return
        thread.join(FLUSH_SECONDS)
        if thread.is_alive():
            self._lose(self._accepted - self._done, f"it hangs for {FLUSH_SECONDS:.0f} s at its end")

    # ---- on the thread

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while lines[-1] is not None and len(lines) < 1000:
                    lines.append(self._waiting.get_nowait())
            ended = lines[-1] is None
            batch = [line for line in lines if line is not None]
            try:
                self._append(batch)
            except OSError as error:
                self._lose(len(batch), error.strerror or "of an error")
            self._done += len(batch)
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if not self._is_current():
            self._reopen()
        data = (b"\n" if self._torn else b"") + b"".join(lines)
        while data:
            written = os.write(self._descriptor, data)
            self._torn = not data[:written].endswith(b"\n")
            data = data[written:]
        self._warned = False

    def _is_current(self) -> bool:
        """Whether the open file still has its name: a rotation renames it."""
        if self._descriptor < 0:
            return False
        here = os.fstat(self._descriptor)
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def _reopen(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._descriptor = os.open(self.path, flags, 0o600)
        self._torn = _is_torn(self.path, self._descriptor)

    def _lose(self, count: int, why: str) -> None:
        if count < 1:
            return
        with self._lock:
            self.lost += count
            first, self._warned = not self._warned, True
        if first:
            log.warning("lines are missing in audit log %s: %s", self.path, why)
        with contextlib.suppress(Exception):
            self._on_lost(count)
