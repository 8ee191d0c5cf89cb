"""Secrets and certificates that live in files, are replaced while they are used, and whose last good content serves.

Contents are compared, not change times: two writes within one tick of a file system's clock look the same by time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

REFRESH_SECONDS = 1.0
"""How long a file's content is used before the file is looked at again."""
HANGS_SECONDS = 1.0
"""How long calls wait for a look at files; then they go on with what is known."""
MAX_FILE = 1 << 20
"""Bytes of a file that is read at all."""
log = logging.getLogger("gym_ckpt_grpc.auth")


class FileProblem(ValueError):
    """A file that cannot be used. The text names the file and never has anything of its content."""


class Kept(Generic[T]):
    """What `make` makes of some files, made again when they change.

    make: gets the contents, in the order of the paths; raises FileProblem. looked: told of the value after each look.
    what: the kind of file, for texts. Raises FileProblem at the start; later a file that is gone or broken leaves the
    last good value, and is warned of once.
    `value` and `version` may be read in any thread; `refresh` reads files, so never on an event loop.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        make: Callable[[Sequence[bytes]], T],
        *,
        looked: Callable[[T], None] = lambda _: None,
    ) -> None:
        self._looked = looked
        self._what = what
        self._paths = tuple(paths)
        self._make = make
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._watch: _Watch | None = None
        self._told = ""
        self.version = 1
        """Rises with each change of the value."""
        self._checked = time.monotonic()
        contents = self._read()
        self.value = make(contents)
        self._digests = _digests(contents)
        looked(self.value)

    def age(self) -> float:
        """Seconds since the files were looked at."""
        return time.monotonic() - self._checked

    def refresh(self) -> None:
        """Look at the files now. Blocks, and raises nothing."""
        with self._lock:
            listeners = tuple(self._listeners) if self._renew() else ()
            self._looked(self.value)
        for listener in listeners:
            listener()

    def _renew(self) -> bool:
        self._checked = time.monotonic()
        try:
            contents = self._read()
            changed = _digests(contents) != self._digests
            value = self._make(contents) if changed else self.value
        except FileProblem as problem:
            if str(problem) != self._told:
                self._told = str(problem)
                log.warning("%s; the one before goes on being used", problem)
            return False
        if self._told:
            self._told = ""
            log.warning("%s %s can be used again", self._what, ", ".join(map(str, self._paths)))
        if changed:
            self._digests, self.value = _digests(contents), value
            self.version += 1
        return changed

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Tell of each change from now on, in a thread of this object's; call what is returned to end that."""
        with self._lock:
            self._listeners.append(listener)
            if self._watch is None:
                self._watch = _Watch(self.refresh, self._what)

        def end() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)
                if not self._listeners and self._watch:
                    self._watch.end()
                    self._watch = None

        return end

    def _read(self) -> tuple[bytes, ...]:
        return tuple(read_file(self._what, path) for path in self._paths)


def _digests(contents: Sequence[bytes]) -> list[bytes]:
    """What stands for secrets that only have to be compared."""
    return [hashlib.sha256(content).digest() for content in contents]


def read_file(what: str, path: Path) -> bytes:
    """The content of a regular file. Raises FileProblem."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block
            raise FileProblem(f"{what} {path} is no regular file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise FileProblem(f"{what} {path} is missing or unreadable ({error.strerror})") from None
    if len(content) > MAX_FILE:
        raise FileProblem(f"{what} {path} is longer than {MAX_FILE} bytes")
    return content


class Looks:
    """Looks at files for the calls of one event loop: one look at a time, in a thread, for all that want one.

    Not each call for itself: on a disk that hangs they would take every thread that the process has for files, and
    callers without credentials could have them do so. look: blocks, and raises nothing.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._begun = 0
        self._since = 0.0
        self._task: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Wait for a look that begins from now on; not for one that takes longer than HANGS_SECONDS."""
        before = self._begun
        while True:
            under_way = self._task is not None and not self._task.done()
            if self._begun - under_way > before:
                return
            if self._task is None or not under_way:
                self._begun, self._since = self._begun + 1, time.monotonic()
                self._task = asyncio.create_task(asyncio.to_thread(self._look), name="look at credentials")
            left = self._since + HANGS_SECONDS - time.monotonic()
            ended, _ = await asyncio.wait([self._task], timeout=max(left, 0.0))  # goes on where this call is cancelled
            if not ended:
                return


class _Watch:
    """A thread that calls `look` every REFRESH_SECONDS until `end`."""

    def __init__(self, look: Callable[[], None], what: str) -> None:
        self._look = look
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=f"gym-ckpt-watch {what}", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            try:
                self._look()
            except Exception:
                log.exception("looking at files for changes failed; it goes on")

    def end(self) -> None:
        self._ended.set()
