"""`LocalFiles` with every system call of a history failing in turn, before or after its effect."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    ControlError,
    PublishUnknown,
    StateCorrupt,
    StateUnwritable,
)
from gym_ckpt_grpc.storage import CheckpointRoot
from tests.storage.crash_histories import HISTORIES, History, check, epoch_of, temporaries

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Not EACCES: where a link is refused with it, another way to name a file is tried."""

WRITES = ("mkdir", "chmod", "fchmod", "write", "writev", "fsync", "close", "link", "replace", "rename")
REMOVALS = ("unlink", "rmdir")
READS = ("fstat", "pread", "preadv", "listdir", "scandir", "stat", "lstat")
CALLS = ("open", *WRITES, *REMOVALS, *READS)
READS_BETWEEN = 5
CHOSEN = [
    history for history in HISTORIES if history.name in ("commit-on-base", "publish", "delete", "pin", "hold", "retain")
]


class Calls:
    """The system calls that touch a directory, counted, one of them failing. Nothing is synced really."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._handles: dict[int, tuple[str, bool]] = {}  # ours: the path, and whether it writes
        self.real = {name: getattr(os, name) for name in CALLS}
        self.counted: list[str] = []
        self.paths: list[str] = []
        self.fails_at: int | None = None
        self.code = 0
        self.after = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Stand in the place of the system's calls."""
        self.counted.clear()
        self.paths.clear()
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._standing_for(name))
            yield

    def _standing_for(self, name: str) -> Callable[..., Any]:
        def call(target: Any, *more: Any, **other: Any) -> Any:
            ours = target in self._handles if type(target) is int else str(target).startswith(self._root)
            if not ours:
                return self.real[name](target, *more, **other)
            return self._counted(name, target, *more, **other)

        return call

    def _counted(self, name: str, target: Any, *more: Any, **other: Any) -> Any:
        at = len(self.counted)
        path, writing = self._handles.get(target, (str(target), False))
        writes = writing if name == "close" else name in WRITES
        if name == "open":
            writes = bool(more and more[0] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY))
        self.paths.append(path)
        self.counted.append("write" if writes else "removal" if name in REMOVALS else "read")
        failure = OSError(self.code, os.strerror(self.code)) if at == self.fails_at else None
        if failure and not self.after and name != "close":  # a handle is gone even where its close fails
            raise failure
        done: Any = None if name == "fsync" else self.real[name](target, *more, **other)
        if name == "open" and failure is None:
            self._handles[done] = (path, writes)
        elif name == "open":
            self.real["close"](done)
        elif name == "close":
            del self._handles[target]
        if failure:
            raise failure
        return done


def ready(history: History, directory: Path, calls: Calls) -> CheckpointRoot:
    """The root before the history, made once and copied for each round."""
    kept = directory.with_name("kept")
    if not kept.exists():
        with calls.watched():
            root = CheckpointRoot(str(directory))
            root.sequence.claim("ctl", "run")
            history.prepare(root)
        shutil.copytree(directory, kept)
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(kept, directory)
    return CheckpointRoot(str(directory))


def positions(history: History, directory: Path, calls: Calls) -> list[int]:
    """Which calls to fail: every one that changes something, and some of those that only read."""
    root = ready(history, directory, calls)
    assert act(history, root, calls) is None
    reads = [at for at, kind in enumerate(calls.counted) if kind == "read"]
    return sorted({*range(len(calls.counted))} - set(reads) | set(reads[::READS_BETWEEN]))


@pytest.mark.behaviour("C173")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize("history", CHOSEN, ids=str)
def test_a_system_call_that_fails_is_typed_and_the_same_again_converges(
    history: History, after: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "root"
    directory.mkdir()
    calls, codes = Calls(directory), cycle(CODES)
    for at in positions(history, directory, calls):
        root = ready(history, directory, calls)
        left = set(temporaries(root.files, root.path))
        calls.fails_at, calls.code, calls.after = at, next(codes), after
        error = act(history, root, calls)
        calls.fails_at = None
        kind = calls.counted[at]
        if error is not None:
            assert root.path in error.message
            if kind == "write":
                assert isinstance(error, StateUnwritable | PublishUnknown)
                assert errno.errorcode[calls.code] in error.message
        if kind != "removal":
            assert set(temporaries(root.files, root.path)) <= left
        # Retention says nothing where it keeps what it cannot read now.
        check(history, root, finished=error is None and not (history.clean and kind == "read"))
        assert act(history, root, calls) is None
        check(history, root, finished=True)


def act(history: History, root: CheckpointRoot, calls: Calls) -> ControlError | None:
    epoch = epoch_of(root)
    try:
        with calls.watched():
            history.act(root, epoch)
    except (StateUnwritable, PublishUnknown, StateCorrupt, CheckpointConflict) as error:
        return error  # a conflict: a deletion of what cannot be read
    return None


@pytest.mark.behaviour("C231")
def test_a_checkpoint_that_cannot_be_read_now_is_listed_all_the_same(tmp_path: Path) -> None:
    """Nothing about a published checkpoint is taken for its absence but that its directory is not there."""
    directory = tmp_path / "root"
    directory.mkdir()
    calls = Calls(directory)
    root = ready(next(history for history in HISTORIES if history.name == "delete"), directory, calls)
    with calls.watched():
        whole = [entry.publication.checkpoint_id for entry in root.published()]
    assert whole == ["third", "second", "first"]
    about = [at for at, path in enumerate(calls.paths) if "/checkpoints/" in path]
    assert {calls.counted[at] for at in about} >= {"read"}
    for at in about:
        calls.fails_at, calls.code = at, errno.EIO
        with calls.watched(), suppress(StateCorrupt):
            assert [entry.publication.checkpoint_id for entry in root.published()] == whole
