"""The disk under a benchmark: a directory that is really on one, and how fast it is written plainly."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".bench-"
"""Beginning of the name of a work directory; git ignores it."""
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems whose figures would say nothing of a disk."""
_BLOCK = 4 << 20


class NotADisk(Exception):
    """The work directory lies in memory."""


@contextmanager
def work_directory(parent: str | None, *, on_disk: bool = True) -> Iterator[Path]:
    """A new directory under `parent` (the current one by default), removed with all in it at the end.

    Raises NotADisk if it would lie in memory, unless on_disk is False.
    """
    kind = filesystem(Path(parent or "."))
    if on_disk and kind in IN_MEMORY:
        raise NotADisk(f"{Path(parent or '.').absolute()} is on {kind}: give --directory on a disk")
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or "."))
    try:
        yield directory.resolve()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def filesystem(path: Path) -> str:
    """The type of the file system that a path is on, such as `ext4`; empty if the system does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted]
    return kinds[-1] if kinds else _longest_mount(lines, path)


def _longest_mount(lines: list[str], path: Path) -> str:
    """For file systems, such as btrfs, whose files have another device than their mount."""
    place = path.resolve()
    mounts = {line.split()[4]: line.partition(" - ")[2].split()[0] for line in lines}
    within = [mount for mount in mounts if place.is_relative_to(mount)]
    return mounts[max(within, key=len)] if within else ""


def write_plainly(source: Path, target: Path) -> None:
    """The same bytes once more, from memory: sequential writes of 4 MiB and one fsync, nothing else."""
    size = source.stat().st_size
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with (
            source.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            for start in range(0, size, _BLOCK):
                os.write(handle, view[start : start + _BLOCK])
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a tree, and have the file system know it before anything else is timed."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: Path) -> None:
    """Have a file or a tree in the page cache."""
    for file in [path] if path.is_file() else [each for each in sorted(path.rglob("*")) if each.is_file()]:
        with file.open("rb", buffering=0) as opened:
            while opened.read(_BLOCK):
                pass


def drop(path: Path) -> None:
    """Have a file or a tree, which is synced, out of the page cache."""
    for file in [path] if path.is_file() else [each for each in sorted(path.rglob("*")) if each.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
