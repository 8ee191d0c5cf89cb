"""`LocalFiles`: the file layer for POSIX file systems, network ones included.

A finished file gets its final name by a hard link, or by `renameat2(RENAME_NOREPLACE)` where links are
refused; never by O_EXCL on the final name, which a crash would leave half written. Nothing relies on fresh
attributes.

Directories: where a file system says that it cannot sync a directory (EINVAL, ENOTSUP), it is taken to keep
names by itself, and `probe` says so. Any other failure is an error.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage.files import NameTaken, reading, reason, writing
from gym_ckpt_grpc.storage.names import temporary_name

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES})
_NO_DIR_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_READ_SLICE = 1 << 30  # one read call returns at most about 2 GiB


class LocalFiles:
    """Files of a POSIX file system.

    file_mode, dir_mode: permission bits of what it makes, whatever the umask of the process.
    """

    def __init__(self, *, file_mode: int = 0o600, dir_mode: int = 0o700) -> None:
        self.file_mode = file_mode
        self.dir_mode = dir_mode

    def __repr__(self) -> str:
        return f"LocalFiles(file_mode={self.file_mode:#o}, dir_mode={self.dir_mode:#o})"

    def make_dirs(self, path: str) -> None:
        missing: list[str] = []
        current = path
        while not os.path.isdir(current):
            missing.append(current)
            parent = os.path.dirname(current)
            if parent == current:
                break
            current = parent
        for directory in reversed(missing):
            with writing("make the directory", directory):
                self._make_dir(directory)
            self.sync_dir(os.path.dirname(directory))

    def _make_dir(self, path: str) -> None:
        try:
            os.mkdir(path, self.dir_mode)
        except FileExistsError:
            # Another host was first; network file systems say so even where it is a directory.
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
            return
        os.chmod(path, self.dir_mode)

    def create(self, path: str) -> LocalSink:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with writing("create", path):
            handle = os.open(path, flags, self.file_mode)
            try:
                os.fchmod(handle, self.file_mode)
            except OSError:
                os.close(handle)
                with suppress(OSError):
                    os.unlink(path)
                raise
        return LocalSink(handle, path)

    def publish(self, temporary: str, path: str) -> None:
        self._publish(temporary, path)

    def _publish(self, temporary: str, path: str) -> bool:
        """Publish; False if it took a rename, since links are refused."""
        try:
            self._publish_by_link(temporary, path)
        except FileExistsError:
            raise NameTaken(path) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise StateUnwritable(f"cannot name {path!r}: {reason(error)}") from error
            self._publish_by_rename(temporary, path, error)
            return False
        return True

    def _publish_by_link(self, temporary: str, path: str) -> None:
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            # A network file system may repeat a link whose reply was lost: then the name is ours already.
            if not _same_file(temporary, path):
                raise
        with writing("remove", temporary):
            os.unlink(temporary)

    def _publish_by_rename(self, temporary: str, path: str, refusal: OSError) -> None:
        try:
            _rename_no_replace(temporary, path)
        except FileExistsError:
            raise NameTaken(path) from None
        except OSError as error:
            raise StateUnwritable(
                f"cannot name {path!r}: a hard link failed with {reason(refusal)}, "
                f"renameat2(RENAME_NOREPLACE) with {reason(error)}"
            ) from error

    def replace(self, temporary: str, path: str) -> None:
        with writing("replace", path):
            os.replace(temporary, path)

    def remove(self, path: str) -> None:
        with writing("remove", path), suppress(FileNotFoundError):
            os.unlink(path)

    def move_dir(self, path: str, target: str) -> None:
        with writing("move", path):
            os.rename(path, target)  # refused by the system where target has anything in it

    def remove_dir(self, path: str) -> None:
        with writing("remove", path), suppress(FileNotFoundError):
            os.rmdir(path)

    def sync_file(self, path: str) -> None:
        with writing("sync", path):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def sync_dir(self, path: str) -> None:
        self._sync_dir(path)

    def _sync_dir(self, path: str) -> bool:
        """Sync a directory; False if the file system cannot."""
        with writing("sync the directory", path):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            except OSError as error:
                if error.errno not in _NO_DIR_SYNC:
                    raise
                return False
            finally:
                os.close(handle)
        return True

    def open(self, path: str) -> LocalSource:
        with reading(path):
            # O_NONBLOCK: opening a pipe that nobody writes to must not hang.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(path, flags)
            status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(handle)
            raise StateCorrupt(f"{path!r} is not a regular file")
        return LocalSource(handle, path, status.st_size)

    def exists(self, path: str) -> bool:
        return self._kind_of(path) is not None

    def is_dir(self, path: str) -> bool:
        mode = self._kind_of(path)
        return mode is not None and stat.S_ISDIR(mode)

    def _kind_of(self, path: str) -> int | None:
        try:
            with reading(path):
                return os.lstat(path).st_mode
        except StateNotFound:
            return None

    def names(self, path: str) -> list[str]:
        try:
            with reading(path):
                return sorted(os.listdir(path))
        except StateNotFound:
            return []

    def resolve(self, path: str) -> str:
        with reading(path):
            return os.path.realpath(path)

    def modified(self, path: str) -> float:
        with reading(path):
            return os.lstat(path).st_mtime

    def free_bytes(self, path: str) -> int | None:
        with reading(path):
            status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def probe(self, path: str) -> tuple[str, ...]:
        notes: list[str] = []
        # Named like any file under construction, so that what a killed process leaves here is collected.
        first, second, final = (os.path.join(path, temporary_name()) for _ in range(3))
        try:
            for name in (first, second):
                sink = self.create(name)
                try:
                    sink.write(b"probe")
                    if name == first:  # one sync tells; the other would double the cost
                        sink.sync()
                finally:
                    sink.close()
            if not self._publish(first, final):
                notes.append("hard links are refused here; names are given by renameat2(RENAME_NOREPLACE)")
            self._probe_taken(second, final)
            if not self._sync_dir(path):
                notes.append("this file system cannot sync a directory; it is trusted to keep names")
        finally:
            for name in (first, second, final):
                with suppress(StateUnwritable):
                    self.remove(name)
        return tuple(notes)

    def _probe_taken(self, temporary: str, path: str) -> None:
        try:
            self.publish(temporary, path)
        except NameTaken:
            return
        raise StateUnwritable(f"{os.path.dirname(path)!r} gives one name to two files: creation is not exclusive")


class LocalSink:
    """A new file of LocalFiles being written."""

    def __init__(self, handle: int, path: str) -> None:
        self._handle = handle
        self._path = path
        self._size = 0
        self._begun = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        with writing("write", self._path):
            while rest:
                count = os.write(self._handle, rest)
                self._size += count
                rest = rest[count:]

    def begin_sync(self) -> None:
        # A failure is no news yet: the sync that follows reports it, since this call does not take it away.
        if _sync_file_range is not None and self._size > self._begun:  # a length of 0 would mean all of it
            _sync_file_range(self._handle, self._begun, self._size - self._begun, _SYNC_FILE_RANGE_WRITE)
        self._begun = self._size

    def sync(self) -> None:
        with writing("sync", self._path):
            os.fsync(self._handle)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            with writing("close", self._path):
                os.close(handle)


class LocalSource:
    """A file of LocalFiles open for reading."""

    def __init__(self, handle: int, path: str, size: int) -> None:
        self._handle = handle
        self._path = path
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise StateCorrupt(f"{self._path!r} has {self._size} bytes; {length} at {offset} are not in it")
        parts: list[bytes] = []
        with reading(self._path):
            while length:
                part = os.pread(self._handle, min(length, _READ_SLICE), offset)
                if not part:
                    raise StateCorrupt(f"{self._path!r} became shorter while it was read, at {offset}")
                parts.append(part)
                offset += len(part)
                length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            with suppress(OSError):
                os.close(handle)


def _same_file(first: str, second: str) -> bool:
    try:
        return os.path.samestat(os.lstat(first), os.lstat(second))
    except OSError:
        return False


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """`sync_file_range(2)`, which starts writing a part of a file back and does not wait; None where it is missing."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    call = getattr(library, "sync_file_range", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found


_sync_file_range = _find_sync_file_range()


def _rename_no_replace(source: str, target: str) -> None:
    """`renameat2(RENAME_NOREPLACE)`; raises OSError, with ENOSYS where there is none."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    call = getattr(library, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    if call(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)
