"""The file that carries an open checkpoint or restore from one command to the next.

Written whole and atomically, readable by its owner only, and held by one command at a time: an epoch is used by one
process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from gym_ckpt_grpc.coordinator import SessionState
from gym_ckpt_grpc.protocol.errors import UsageError

MODE = 0o600


class SessionFile:
    """One session's file. Every error is a UsageError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        return self.path.exists()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it against other commands; the lock beside it ends with this process, however that ends."""
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
        except OSError as error:
            raise UsageError(f"session {self}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_ino != os.stat(lock).st_ino:
                    raise BlockingIOError  # whoever had it has just ended it
            except OSError:
                raise UsageError(f"session {self} is in use by another command") from None
            try:
                yield
            finally:
                if not self.exists:
                    lock.unlink(missing_ok=True)
        finally:
            os.close(handle)

    def read(self) -> SessionState:
        """What the last command left."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise UsageError(f"there is no session {self}: `gym-ckpt prepare` or `restore` makes one") from None
        except OSError as error:
            raise UsageError(f"session {self}: {error.strerror}") from error
        with os.fdopen(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode) or mode & 0o022:
                raise UsageError(f"session {self} can be written by others: chmod 600 it if it is yours")
            data = file.read()
        try:
            return SessionState.from_json(data)
        except UsageError as error:
            raise UsageError(f"session {self}: {error}") from error

    def write(self, state: SessionState) -> None:
        """Replace it, durable. Raises UsageError if that is not possible; the old one is whole then."""
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(state.to_json())
                    file.flush()
                    os.fsync(handle)
                os.replace(temporary, self.path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise UsageError(f"session {self} cannot be written: {error.strerror}") from error

    def remove(self) -> None:
        """The session is over; a file that is gone already is fine."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
