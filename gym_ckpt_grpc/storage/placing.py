"""Giving finished files their final names: written beside the target, synced, named, directories synced."""

from __future__ import annotations

import posixpath
from contextlib import suppress
from types import TracebackType

from gym_ckpt_grpc.protocol.errors import CheckpointConflict, StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.documents import Document
from gym_ckpt_grpc.storage.files import FileLayer, NameTaken
from gym_ckpt_grpc.storage.names import temporary_name


class Temporary:
    """A file under construction in its final directory; removed on any exit unless it was named."""

    def __init__(self, files: FileLayer, directory: str) -> None:
        self._files = files
        self.path = f"{directory}/{temporary_name()}"
        self._named = False
        try:
            self.sink = files.create(self.path)
        except StateUnwritable:
            # Over a network it may be there although the call failed.
            with suppress(StateUnwritable):
                files.remove(self.path)
            raise

    def __enter__(self) -> Temporary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._named:
            return
        with suppress(StateUnwritable):
            self.sink.close()
        with suppress(StateUnwritable):
            self._files.remove(self.path)

    def finish(self) -> None:
        """Sync and close. Raises StateUnwritable."""
        self.sink.sync()
        self.sink.close()

    def publish(self, path: str) -> None:
        """Give it a name that must be free. Raises NameTaken, StateUnwritable."""
        self._files.publish(self.path, path)
        self._named = True

    def replace(self, path: str) -> None:
        """Give it a name that may be in use. Raises StateUnwritable."""
        self._files.replace(self.path, path)
        self._named = True


def write_temporary(files: FileLayer, directory: str, data: bytes) -> Temporary:
    """A finished temporary file with these bytes; the caller names or leaves it. Raises StateUnwritable."""
    temporary = Temporary(files, directory)
    try:
        temporary.sink.write(data)
        temporary.finish()
    except BaseException as error:
        temporary.__exit__(type(error), error, None)
        raise
    return temporary


def sync_up(files: FileLayer, directory: str, root: str) -> None:
    """Sync a directory and every parent up to the root: another writer may have made them and died."""
    while True:
        files.sync_dir(directory)
        if directory == root or directory == "/":
            return
        directory = posixpath.dirname(directory)


def read_existing(files: FileLayer, path: str) -> bytes | None:
    """What is under a name that is about to be written, or None.

    Raises StateUnwritable if it cannot be read: for a writer that is a failure to write, which may pass.
    """
    try:
        return documents.read_bytes(files, path)
    except StateNotFound:
        return None
    except StateCorrupt as error:
        raise StateUnwritable(error.message) from error


def create_once(files: FileLayer, path: str, data: bytes, *, root: str) -> bytes | None:
    """Create a small file under its final name, durable; its directory is made if missing.

    An equal one already there is synced and accepted. Returns None, or the bytes of a different one that is
    there. Raises StateUnwritable, also when only the last sync failed: then the same call again converges.
    """
    directory = posixpath.dirname(path)
    files.make_dirs(directory)
    with write_temporary(files, directory, data) as temporary:
        try:
            temporary.publish(path)
        except NameTaken:
            found = read_existing(files, path)
            if found != data:
                return found or b""
            files.sync_file(path)
    sync_up(files, directory, root)
    return None


def create_document(files: FileLayer, path: str, document: Document, *, root: str) -> None:
    """Create a JSON file as `create_once` does; an equal one is accepted.

    Raises CheckpointConflict if it says something else, StateUnwritable.
    """
    if create_once(files, path, documents.to_bytes(document), root=root) is not None:
        raise CheckpointConflict(f"{path!r} is there and says something else")


def replace_hint(files: FileLayer, path: str, data: bytes) -> None:
    """Replace a small file whole, and sync its directory, which must exist. Raises StateUnwritable."""
    directory = posixpath.dirname(path)
    with write_temporary(files, directory, data) as temporary:
        temporary.replace(path)
    files.sync_dir(directory)
