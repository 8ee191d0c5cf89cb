"""The file layer: the interface behind which every path call of this project's storage lives.

It is kept to what an object store can do as well: objects are created under a temporary name and *published*
under their final name only if that is free, or *replace* another whole; there is no append, and a time of writing
means something only beside another of the same store. Where a store has no directories, `make_dirs`, `sync_dir` and
`remove_dir` do nothing, and `move_dir` has one object stand for all below it (removal.py). `LocalFiles`
(local_files.py) is the one for file systems; tests bring their own, which fail on purpose or keep what a power loss
would leave.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from gym_ckpt_grpc.protocol.errors import GymCkptError, StateCorrupt, StateNotFound, StateUnwritable


class NameTaken(GymCkptError):
    """`FileLayer.publish` found its final name in use. Nothing was changed; the temporary file is there."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} already exists")
        self.path = path

    def __reduce__(self) -> tuple[type[NameTaken], tuple[str]]:
        return (NameTaken, (self.path,))


class FileSink(Protocol):
    """A new file being written through one handle. `close` may be called again."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`, which may be put to another use afterwards. Raises StateUnwritable."""

    def begin_sync(self) -> None:
        """Let what was written begin to reach the disk, so that `sync` finds less to do; a hint. Never raises."""

    def sync(self) -> None:
        """Make all that was written durable, through the handle that wrote it. Raises StateUnwritable."""

    def close(self) -> None:
        """Close the handle. Raises StateUnwritable for a write error that shows only now."""


class FileSource(Protocol):
    """A file open for reading. `size` is in bytes, taken when it was opened."""

    @property
    def size(self) -> int:
        """Number of bytes in the file."""

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset`. Raises StateCorrupt if there are fewer."""

    def close(self) -> None:
        """Close the handle. Never raises."""


class FileLayer(Protocol):
    """What storage asks of a place that keeps files. Paths are absolute texts with `/` between names.

    Writes raise StateUnwritable, reads StateNotFound (nothing there) or StateCorrupt (there and unreadable);
    each names the path.
    """

    def make_dirs(self, path: str) -> None:
        """Make the directory and its missing parents, syncing each parent of a new one. Is one: fine."""

    def create(self, path: str) -> FileSink:
        """Create a new file for writing; it must not exist."""

    def publish(self, temporary: str, path: str) -> None:
        """Give a finished file its final name, if that is free; the temporary name is gone afterwards.

        Both are in one directory, which is not synced here. Raises NameTaken, or StateUnwritable: then the
        final name may or may not be there.
        """

    def replace(self, temporary: str, path: str) -> None:
        """Give a finished file a name that may be in use: readers see the old file or the new one, whole."""

    def remove(self, path: str) -> None:
        """Remove a file. Nothing there: fine."""

    def move_dir(self, path: str, target: str) -> None:
        """Give a directory a name that must be free, in the directory it is in; neither is synced here."""

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory. Nothing there: fine."""

    def sync_file(self, path: str) -> None:
        """Make an existing file durable."""

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def open(self, path: str) -> FileSource:
        """Open a regular file for reading; links and devices are refused."""

    def exists(self, path: str) -> bool:
        """Whether there is something of that name, a dangling link included. Raises StateCorrupt if nobody can tell."""

    def is_dir(self, path: str) -> bool:
        """Whether there is a directory of that name, which is not a link. Raises StateCorrupt if nobody can tell."""

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if it does not exist."""

    def resolve(self, path: str) -> str:
        """The path with every link in it followed; what does not exist stays as it is."""

    def modified(self, path: str) -> float:
        """When a file was last written, in seconds on the clock of the store: only differences mean something.

        Raises StateNotFound, StateCorrupt.
        """

    def free_bytes(self, path: str) -> int | None:
        """Bytes that may still be written below a directory, or None if unknown."""

    def probe(self, path: str) -> tuple[str, ...]:
        """Check that files can be made and published in this directory, and that a taken name is refused.

        Returns notes for people about what is done differently here. Raises StateUnwritable.
        """


@contextmanager
def writing(action: str, path: str) -> Iterator[None]:
    """Turn an OSError of a write into StateUnwritable with action, path and reason."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise StateUnwritable(f"cannot {action} {path!r}: {reason(error)}") from error


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn an OSError of a read into StateNotFound or StateCorrupt with path and reason."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StateNotFound(f"there is no {path!r}") from error
    except (OSError, ValueError) as error:
        raise StateCorrupt(f"cannot read {path!r}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The text and the name of an OSError's number, such as `No space left on device (ENOSPC)`."""
    if isinstance(error, OSError) and error.errno:
        return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"
    return str(error)


def file_size(files: FileLayer, path: str) -> int:
    """How many bytes a file has. Raises StateNotFound, StateCorrupt."""
    source = files.open(path)
    source.close()
    return source.size


def read_file(files: FileLayer, path: str, *, limit: int) -> bytes:
    """Read a whole small file. Raises StateNotFound, or StateCorrupt if it has more than `limit` bytes."""
    source = files.open(path)
    try:
        if source.size > limit:
            raise StateCorrupt(f"{path!r} has {source.size} bytes, more than the {limit} that such a file may have")
        return source.read(0, source.size)
    finally:
        source.close()
