"""A file layer in memory that records operations, fails on demand, and shows what a crash or power loss leaves.

It keeps files and names the way a journalling file system may: bytes last once their file was synced, a name
lasts once its directory was. Every operation that changes something is one step; a publication is two (the
new name, the old one removed), a `make_dirs` two per directory (made, parent synced).
"""

from __future__ import annotations

import copy
import enum
import itertools
import os
import posixpath
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage.files import NameTaken, reading, writing

ROOT = "/root"


class Loss(enum.Enum):
    """What an image keeps.

    CRASH: all. POWER: what was synced, no more. TORN: all names, synced bytes only. LAST: what was synced, and of
    the other new names of each directory the last one.
    """

    CRASH = enum.auto()
    POWER = enum.auto()
    TORN = enum.auto()
    LAST = enum.auto()


@dataclass(frozen=True)
class Step:
    """One recorded operation."""

    kind: str
    path: str = ""
    other: str = ""
    inode: int = 0
    data: bytes = b""


@dataclass
class Fault:
    """Fail at the step of a number (from 0), before or after its effect, once or from there on."""

    at: int
    code: int
    after: bool = False
    for_good: bool = False

    def hits(self, number: int) -> bool:
        return number >= self.at if self.for_good else number == self.at


@dataclass
class _Node:
    """A file's bytes, or a directory's names; and what of them would survive a power loss."""

    is_dir: bool
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    synced_names: dict[str, int] = field(default_factory=dict)


class RecordingFiles:
    """FileLayer in memory. `root` exists and is durable. steps: what was done, in order."""

    def __init__(self, root: str = ROOT) -> None:
        self.steps: list[Step] = []
        self.fault: Fault | None = None
        self.before: Callable[[Step], None] | None = None
        self.reads: list[tuple[str, int, int]] = []
        self._nodes = {0: _Node(True), 1: _Node(True)}
        name = root.strip("/")
        self._nodes[0].names[name] = self._nodes[0].synced_names[name] = 1
        self._begin()

    def _begin(self) -> None:
        """Take the present state as the one that images are made from."""
        self._numbers = itertools.count(max(self._nodes) + 1)
        self._base = copy.deepcopy(self._nodes)

    def image(self, count: int, loss: Loss) -> RecordingFiles:
        """What is there after the first `count` steps and a loss."""
        image = RecordingFiles()
        image._nodes = copy.deepcopy(self._base)
        for step in self.steps[:count]:
            image._apply(step)
        if loss is not Loss.CRASH:
            image._lose(loss)
        image._begin()
        return image

    def all_files(self) -> dict[str, bytes]:
        """Every file and its bytes."""
        found: dict[str, bytes] = {}
        self._walk(0, "", found)
        return found

    def damage(self, path: str, data: bytes) -> None:
        """Put other bytes into a file, durable, recording nothing."""
        node = self._node(path)
        node.data, node.synced = bytearray(data), data

    def put(self, path: str, data: bytes) -> None:
        """Put a file there, durable, recording nothing; its directory must exist."""
        directory = self._node(posixpath.dirname(path))
        number = next(self._numbers)
        self._nodes[number] = _Node(False, bytearray(data), data)
        directory.names[posixpath.basename(path)] = directory.synced_names[posixpath.basename(path)] = number

    def _walk(self, number: int, path: str, found: dict[str, bytes]) -> None:
        node = self._nodes[number]
        if not node.is_dir:
            found[path] = bytes(node.data)
        for name, child in sorted(node.names.items()):
            self._walk(child, f"{path}/{name}", found)

    def _lose(self, loss: Loss) -> None:
        for node in self._nodes.values():
            node.data = bytearray(node.synced)
            if loss is not Loss.TORN:
                new = {name: number for name, number in node.names.items() if name not in node.synced_names}
                last = dict(list(new.items())[-1:]) if loss is Loss.LAST else {}
                node.names = node.synced_names | last
            node.synced_names = dict(node.names)

    # ---- steps

    def _do(self, action: str, step: Step) -> None:
        number = len(self.steps)
        if self.before is not None:
            self.before(step)
        with writing(action, step.other or step.path):
            if self.fault is not None and self.fault.hits(number):
                if self.fault.after:
                    self._record(step)
                else:
                    self.steps.append(Step("failed"))
                raise OSError(self.fault.code, os.strerror(self.fault.code))
            self._record(step)

    def _record(self, step: Step) -> None:
        self._apply(step)
        self.steps.append(step)

    def _apply(self, step: Step) -> None:
        if step.kind == "mkdir" or step.kind == "create":
            directory, name = self._split(step.path)
            self._nodes[step.inode] = _Node(step.kind == "mkdir")
            directory.names[name] = step.inode
        elif step.kind == "write":
            self._nodes[step.inode].data += step.data
        elif step.kind == "fsync":
            self._nodes[step.inode].synced = bytes(self._nodes[step.inode].data)
        elif step.kind == "link":
            source, old = self._split(step.path)
            target, new = self._split(step.other)
            if new in target.names:
                raise NameTaken(step.other)
            target.names[new] = source.names[old]
        elif step.kind == "rename":
            source, old = self._split(step.path)
            target, new = self._split(step.other)
            if old not in source.names:
                raise FileNotFoundError(2, "No such file or directory", step.path)
            target.names[new] = source.names.pop(old)
        elif step.kind == "remove":
            directory, name = self._split(step.path)
            directory.names.pop(name, None)
        elif step.kind == "sync_dir":
            node = self._node(step.path)
            node.synced_names = dict(node.names)

    def _find(self, path: str) -> int | None:
        number = 0
        for name in path.strip("/").split("/"):
            node = self._nodes[number]
            if not node.is_dir or name not in node.names:
                return None
            number = node.names[name]
        return number

    def _node(self, path: str) -> _Node:
        number = self._find(path)
        if number is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self._nodes[number]

    def _split(self, path: str) -> tuple[_Node, str]:
        return self._node(posixpath.dirname(path)), posixpath.basename(path)

    # ---- FileLayer

    def make_dirs(self, path: str) -> None:
        number = self._find(path)
        if number is not None:
            if not self._nodes[number].is_dir:
                raise StateUnwritable(f"cannot make the directory {path!r}: Not a directory (ENOTDIR)")
            return
        parent = posixpath.dirname(path)
        self.make_dirs(parent)
        self._do("make the directory", Step("mkdir", path, inode=next(self._numbers)))
        self.sync_dir(parent)

    def create(self, path: str) -> RecordingSink:
        with writing("create", path):
            directory, name = self._split(path)
            if name in directory.names:
                raise FileExistsError(17, "File exists", path)
        number = next(self._numbers)
        self._do("create", Step("create", path, inode=number))
        return RecordingSink(self, path, number)

    def publish(self, temporary: str, path: str) -> None:
        with writing("name", path):
            self._node(temporary)
        if self._find(path) is not None:
            raise NameTaken(path)
        self._do("name", Step("link", temporary, path))
        self._do("remove", Step("remove", temporary))

    def replace(self, temporary: str, path: str) -> None:
        with writing("replace", path):
            self._node(temporary)
        self._do("replace", Step("rename", temporary, path))

    def remove(self, path: str) -> None:
        if self._find(path) is not None:
            self._do("remove", Step("remove", path))

    def move_dir(self, path: str, target: str) -> None:
        with writing("move", path):
            self._node(path)
            if self._find(target) is not None:
                raise OSError(39, "Directory not empty", target)
        self._do("move", Step("rename", path, target))

    def remove_dir(self, path: str) -> None:
        number = self._find(path)
        if number is not None:
            with writing("remove", path):
                if self._nodes[number].names:
                    raise OSError(39, "Directory not empty", path)
            self._do("remove", Step("remove", path))

    def sync_file(self, path: str) -> None:
        with writing("sync", path):
            self._node(path)
        self._do("sync", Step("fsync", path, inode=self._find(path) or 0))

    def sync_dir(self, path: str) -> None:
        with writing("sync the directory", path):
            self._node(path)
        self._do("sync the directory", Step("sync_dir", path))

    def open(self, path: str) -> RecordingSource:
        with reading(path):
            node = self._node(path)
        if node.is_dir:
            raise StateCorrupt(f"{path!r} is not a regular file")
        return RecordingSource(self, path, bytes(node.data))

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def is_dir(self, path: str) -> bool:
        number = self._find(path)
        return number is not None and self._nodes[number].is_dir

    def names(self, path: str) -> list[str]:
        with suppress(StateNotFound), reading(path):
            return sorted(self._node(path).names)
        return []

    def resolve(self, path: str) -> str:
        return path

    def modified(self, path: str) -> float:
        with reading(path):
            self._node(path)
        return 0.0

    def free_bytes(self, path: str) -> int | None:
        return None

    def probe(self, path: str) -> tuple[str, ...]:
        return ()


class RecordingSink:
    """A file being written."""

    def __init__(self, files: RecordingFiles, path: str, inode: int) -> None:
        self._files = files
        self._path = path
        self._inode = inode

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._files._do("write", Step("write", self._path, inode=self._inode, data=bytes(data)))

    def begin_sync(self) -> None:
        pass

    def sync(self) -> None:
        self._files._do("sync", Step("fsync", self._path, inode=self._inode))

    def close(self) -> None:
        pass


class RecordingSource:
    """A file being read."""

    def __init__(self, files: RecordingFiles, path: str, data: bytes) -> None:
        self._files = files
        self._path = path
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > len(self._data):
            raise StateCorrupt(f"{self._path!r} has {len(self._data)} bytes; {length} at {offset} are not in it")
        self._files.reads.append((self._path, offset, length))
        return self._data[offset : offset + length]

    def close(self) -> None:
        pass
