"""What the ledger needs of a place for files beyond the file layer of storage: appending, and locks.

Lines are appended in one write each. A line without its end at the end of a file was torn by a death or a full
disk: readers leave it out, and who appends next cancels it, so that a bad line anywhere else is damage. Nothing
here relies on the order in which processes append.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from gym_ckpt_grpc.protocol.errors import StateUnwritable
from gym_ckpt_grpc.storage import FileLayer, LocalFiles

END = b"\n"
CANCELLED = b"\x18"
"""Stands before the end of a line that is no row: it was torn, or names a file. JSON never has this byte."""


class AppendHandle(Protocol):
    """An existing file open for appending. Raises StateUnwritable."""

    def last_byte(self) -> bytes:
        """The byte at the end of the file as it is now, empty if the file is."""

    def append(self, data: bytes) -> None:
        """Append all of `data` in one write. A write that came short raises, and leaves what it wrote."""

    def sync(self) -> None:
        """Make the file's bytes durable."""

    def close(self) -> None:
        """Close the handle. Never raises."""


class Lock(Protocol):
    """An exclusive lock of one file, held until `release`, or until this process ends."""

    def release(self) -> None:
        """Give it up. Never raises."""


class LedgerFiles(FileLayer, Protocol):
    """A file layer that can append and lock."""

    def open_to_append(self, path: str) -> AppendHandle | None:
        """Open a file for appending; None if it does not exist. Raises StateUnwritable."""

    def lock(self, path: str, *, wait: bool = True) -> Lock | None:
        """Lock a file, made if missing, against every other process and thread.

        None if another has it and `wait` is false, or if its directory is not there. Raises StateUnwritable.
        """


class LocalLedgerFiles(LocalFiles):
    """Files of a POSIX file system that has `flock`."""

    def open_to_append(self, path: str) -> LocalAppendHandle | None:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return LocalAppendHandle(os.open(path, flags), path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unwritable("open", path, error) from error

    def lock(self, path: str, *, wait: bool = True) -> LocalLock | None:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, self.file_mode)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unwritable("open", path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:
            os.close(handle)
            raise _unwritable("lock", path, error) from error
        return LocalLock(handle)


class LocalAppendHandle:
    """A file of LocalLedgerFiles being appended to."""

    def __init__(self, handle: int, path: str) -> None:
        self._handle = handle
        self._path = path

    def last_byte(self) -> bytes:
        try:
            size = os.fstat(self._handle).st_size
            return os.pread(self._handle, 1, size - 1) if size else b""
        except OSError as error:
            raise _unwritable("read the end of", self._path, error) from error

    def append(self, data: bytes) -> None:
        # Not in a loop: a second write could land behind another process's line.
        try:
            written = os.write(self._handle, data)
        except OSError as error:
            raise _unwritable("append to", self._path, error) from error
        if written != len(data):
            raise StateUnwritable(f"cannot append to {self._path!r}: {written} of {len(data)} bytes were written")

    def sync(self) -> None:
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise _unwritable("sync", self._path, error) from error

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class LocalLock:
    """A `flock` held through an open handle: the system gives it up when the process dies."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def release(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _unwritable(action: str, path: str, error: OSError) -> StateUnwritable:
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return StateUnwritable(f"cannot {action} {path!r}: {error.strerror} ({name})")


@contextmanager
def locked(files: LedgerFiles, path: str) -> Iterator[None]:
    """Hold the lock of a file. Raises StateUnwritable if it cannot be had."""
    lock = files.lock(path)
    if lock is None:
        raise StateUnwritable(f"cannot lock {path!r}: its directory is gone")
    try:
        yield
    finally:
        lock.release()


# ---- lines -------------------------------------------------------------------------------------------------


def append_line(files: LedgerFiles, path: str, line: bytes, *, sync: bool) -> bool:
    """Append one line, which has its end, to an existing file; False if there is none. Raises StateUnwritable."""
    handle = files.open_to_append(path)
    if handle is None:
        return False
    try:
        # A tail that another process is writing this moment may look torn. Then the mark lands behind its line,
        # as a line of its own, and cancels nothing.
        torn = handle.last_byte() not in (b"", END)
        handle.append(CANCELLED + END + line if torn else line)
        if sync:
            handle.sync()
    finally:
        handle.close()
    return True


def whole_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each whole line of `data` that is not cancelled, without its end, and where it begins."""
    start = 0
    while (end := data.find(END, start)) >= 0:
        line = data[start:end]
        if not line.endswith(CANCELLED):
            yield start, line
        start = end + 1


def create_new(files: LedgerFiles, path: str) -> bool:
    """Create an empty file; False if one was there. Raises StateUnwritable."""
    try:
        files.create(path).close()
    except StateUnwritable as error:
        if isinstance(error.__cause__, FileExistsError):
            return False
        raise
    return True
