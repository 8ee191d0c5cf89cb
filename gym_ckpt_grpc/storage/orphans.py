"""What nobody needs and nobody removed: how old it is by the store's own clock, and files left under construction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.names import is_temporary
from gym_ckpt_grpc.storage.placing import Temporary
from gym_ckpt_grpc.storage.root import CheckpointRoot


class StoreClock:
    """Ages of files, in seconds, against a file written now into the same store: no two clocks are compared.

    The file is written at the first question only, and removed at once.
    """

    def __init__(self, root: CheckpointRoot) -> None:
        self._root = root
        self._now: float | None = None

    def age(self, path: str) -> float:
        """Seconds since a file was last written; negative if the store's clock was set back. Raises StateNotFound,
        StateCorrupt, StateUnwritable (a store that cannot be written to does not tell its time)."""
        if self._now is None:
            self._now = self._read()
        return self._now - self._root.files.modified(path)

    def _read(self) -> float:
        with Temporary(self._root.files, self._root.path) as probe:
            probe.sink.write(b"now")
            probe.sink.close()
            return self._root.files.modified(probe.path)


def age_of(root: CheckpointRoot, clock: StoreClock, directory: str) -> float | None:
    """Seconds since any file below a directory was written, None if there is none. Raises as `StoreClock.age`."""
    return min((clock.age(path) for path in files_below(root.files, directory)), default=None)


def size_of(files: FileLayer, path: str) -> int:
    """Bytes of a file, or of all files below a directory; what cannot be read counts 0."""
    total = 0
    with suppress(StateCorrupt):  # a directory
        for each in files_below(files, path):
            with suppress(StateNotFound, StateCorrupt):
                source = files.open(each)
                total += source.size
                source.close()
    return total


def files_below(files: FileLayer, path: str) -> Iterator[str]:
    """Every file below a directory, or the file itself; links as themselves, never followed. Raises StateCorrupt."""
    if not files.is_dir(path):
        yield path
        return
    for name in files.names(path):
        yield from files_below(files, f"{path}/{name}")


def under_construction(root: CheckpointRoot, checkpoint_ids: list[str]) -> tuple[list[str], dict[str, str]]:
    """Files that some writer has begun and not named: of the root itself, and in the directories of these checkpoints.

    Gives their paths, and the checkpoints whose directory cannot be read: id -> why. Raises StateCorrupt for one of the
    root itself.
    """
    found, unreadable = [], {}
    for directory in ("", "/sequence", "/pins", "/holds", "/checkpoints"):
        for name in root.files.names(root.path + directory):
            if is_temporary(name) and not root.files.is_dir(f"{root.path}{directory}/{name}"):
                found.append(f"{root.path}{directory}/{name}")
    for checkpoint_id in checkpoint_ids:
        try:
            below = list(files_below(root.files, root.location(checkpoint_id).directory))
        except StateCorrupt as error:
            unreadable[checkpoint_id] = error.message
            continue
        found += [path for path in below if is_temporary(path.rpartition("/")[2])]
    return found, unreadable
