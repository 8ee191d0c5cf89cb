"""Rows of a restore, written beside the live ledgers: all that can fail for want of space happens here.

Each import has a directory of its own under `imports/` and holds the lock in it, so that what a killed process left
behind is told from what is at work, and removed by the next import.
"""

from __future__ import annotations

import logging
import posixpath
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from gym_ckpt_grpc.capture.ledger_files import CANCELLED, END, LedgerFiles, Lock, locked
from gym_ckpt_grpc.capture.ledger_names import ROWS, LedgerPaths, name_of
from gym_ckpt_grpc.protocol.errors import StateUnwritable, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId

log = logging.getLogger(__name__)

WRITERS = 8
"""Files that are written at a time: syncs that come together cost a disk little more than one."""
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """An import that is written. files: target -> the file with its rows, None for a target without rows."""

    directory: str
    files: Mapping[EpisodeId, str | None]
    lock: Lock


def write_import(
    files: LedgerFiles, paths: LedgerPaths, lines: Mapping[EpisodeId, Sequence[bytes]], *, sync: bool
) -> WrittenRows:
    """Write the lines of each target's rows, which have their ends. sync: make them durable.

    Raises UsageError for two attempts of a rollout, StateUnwritable; nothing is left then.
    """
    if len({target.rollout_id for target in lines}) != len(lines):
        raise UsageError("an import has two attempts of one rollout")
    directory, lock = _begin(files, paths)
    try:
        written = _write_all(files, directory, lines, sync=sync)
    except BaseException:
        with suppress(StateUnwritable):  # what is left is removed by the next import
            _remove(files, directory)
        lock.release()
        raise
    return WrittenRows(directory, written, lock)


def _begin(files: LedgerFiles, paths: LedgerPaths) -> tuple[str, Lock]:
    """Make a directory and lock it, after removing those that nobody holds."""
    with locked(files, paths.lock):
        files.make_dirs(paths.imports)
        for name in files.names(paths.imports):
            left = posixpath.join(paths.imports, name)
            abandoned = files.lock(posixpath.join(left, _LOCK), wait=False)
            if abandoned is not None:
                try:
                    _remove(files, left)
                finally:
                    abandoned.release()
        directory = posixpath.join(paths.imports, uuid.uuid4().hex)
        files.make_dirs(directory)
        lock = files.lock(posixpath.join(directory, _LOCK))
    if lock is None:
        raise StateUnwritable(f"cannot lock {directory!r}: it is gone")
    return directory, lock


def _write_all(
    files: LedgerFiles, directory: str, lines: Mapping[EpisodeId, Sequence[bytes]], *, sync: bool
) -> dict[EpisodeId, str | None]:
    def write(target: EpisodeId) -> str | None:
        return _write(files, directory, target, lines[target], sync=sync) if lines[target] else None

    with ThreadPoolExecutor(WRITERS, "gymckpt-import") as threads:
        return dict(zip(lines, threads.map(write, lines), strict=True))


def _write(files: LedgerFiles, directory: str, target: EpisodeId, lines: Sequence[bytes], *, sync: bool) -> str:
    path = posixpath.join(directory, name_of(target) + ROWS)
    sink = files.create(path)
    try:
        # The first line names the file: who follows the target's ledger sees that it is another one now.
        sink.write(uuid.uuid4().hex.encode() + CANCELLED + END + b"".join(lines))
        if sync:
            sink.sync()
    finally:
        sink.close()
    return path


def remove_import(files: LedgerFiles, written: WrittenRows) -> None:
    """Remove what of an import was not put in place. Safe to repeat; never raises."""
    try:
        _remove(files, written.directory)
    except StateUnwritable as error:
        log.warning("an import was left behind, which the next one removes: %s", error)
    finally:
        written.lock.release()


def _remove(files: LedgerFiles, directory: str) -> None:
    for name in files.names(directory):
        files.remove(posixpath.join(directory, name))
    files.remove_dir(directory)
