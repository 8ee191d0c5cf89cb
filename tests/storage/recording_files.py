"""A file layer in memory that records operations, fails on demand, and shows what a crash or power loss leaves.

It keeps files and names as weakly as a file system may: bytes last once their file was synced, a change of a
directory (a name added, moved or removed) once the directory was. Until then each byte and each change may have
reached the disk or not, in any order; a rename within a directory is one change. A sync that failed has lost the
bytes: a later one says yes and saves nothing, unless more was written. Every operation that changes something is one
step; a publication is two (the new name, the old one removed), a `make_dirs` two per directory (made, parent synced).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
import posixpath
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage.files import NameTaken, reading, writing

ROOT = "/root"


class Loss(enum.Enum):
    """What an image keeps of what was not synced.

    CRASH: all. POWER: nothing, so that what was removed is there again. TORN: every change of a directory, no byte.
    HALF: the changes, and of the bytes those that `begin_sync` sent off, or the first half. ZEROS: the changes, and
    files of full length with zeros in them. LAST: of the changes of each directory the last one. BACK: new names,
    and what was removed is back. MIXED: any of it, by a seed.
    """

    CRASH = enum.auto()
    POWER = enum.auto()
    TORN = enum.auto()
    HALF = enum.auto()
    ZEROS = enum.auto()
    LAST = enum.auto()
    BACK = enum.auto()
    MIXED = enum.auto()


_BLOCK = 16  # bytes that reach a disk together, in MIXED; small, as the files of these tests are


@dataclass(frozen=True)
class Step:
    """One recorded operation."""

    kind: str
    path: str = ""
    other: str = ""
    inode: int = 0
    data: bytes = b""
    at: float = 0.0


@dataclass
class Fault:
    """Fail at the step of a number (from 0), before or after its effect, once or from there on."""

    at: int
    code: int
    after: bool = False
    for_good: bool = False

    def hits(self, number: int) -> bool:
        return number >= self.at if self.for_good else number == self.at


@dataclass(frozen=True)
class _Change:
    """One change of a directory: the name that went, if any, and the one that came."""

    gone: str
    new: str
    inode: int

    def apply(self, names: dict[str, int]) -> None:
        if self.gone:
            names.pop(self.gone, None)
        if self.new:
            names.pop(self.new, None)
            names[self.new] = self.inode


@dataclass
class _Node:
    """A file's bytes, or a directory's names; and what of them would survive a power loss.

    begun: bytes that `begin_sync` sent off. lost: a sync failed, and what was not durable then never will be.
    """

    is_dir: bool
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    begun: int = 0
    lost: bool = False
    modified: float = 0.0
    names: dict[str, int] = field(default_factory=dict)
    synced_names: dict[str, int] = field(default_factory=dict)
    changes: list[_Change] = field(default_factory=list)

    def copy(self) -> _Node:
        return _Node(
            self.is_dir,
            bytearray(self.data),
            self.synced,
            self.begun,
            self.lost,
            self.modified,
            dict(self.names),
            dict(self.synced_names),
            list(self.changes),
        )

    def change(self, change: _Change) -> None:
        change.apply(self.names)
        self.changes.append(change)

    def sync(self) -> None:
        if self.is_dir:
            self.synced_names, self.changes = dict(self.names), []
        elif not self.lost:
            self.synced = bytes(self.data)

    def lose(self, loss: Loss, rng: random.Random) -> None:
        """Keep what is durable, and of the rest what `loss` says."""
        names = dict(self.synced_names)
        for change in self._kept_changes(loss, rng):
            change.apply(names)
        self.names = names
        self.data = bytearray(self.synced + self._kept_bytes(bytes(self.data[len(self.synced) :]), loss, rng))
        self.synced_names, self.changes = dict(self.names), []
        self.synced, self.begun, self.lost = bytes(self.data), 0, False

    def _kept_changes(self, loss: Loss, rng: random.Random) -> list[_Change]:
        if loss is Loss.POWER:
            return []
        if loss is Loss.LAST:
            return self.changes[-1:]
        if loss is Loss.BACK:
            return [change for change in self.changes if change.new]
        if loss is Loss.MIXED:
            return [change for change in self.changes if rng.random() < 0.5]
        return self.changes

    def _kept_bytes(self, rest: bytes, loss: Loss, rng: random.Random) -> bytes:
        begun = max(0, self.begun - len(self.synced))
        if loss is Loss.HALF:
            return rest[: begun or len(rest) // 2]
        if loss is Loss.ZEROS:
            return bytes(len(rest))
        if loss is Loss.MIXED:
            kept = rest[: rng.choice((0, begun, len(rest), rng.randint(0, len(rest))))]
            blocks = (kept[at : at + _BLOCK] for at in range(0, len(kept), _BLOCK))
            return b"".join(block if rng.random() < 0.7 else bytes(len(block)) for block in blocks)
        return b""


def _copied(nodes: dict[int, _Node]) -> dict[int, _Node]:
    return {number: node.copy() for number, node in nodes.items()}


class RecordingFiles:
    """FileLayer in memory. `root` exists and is durable. steps: what was done, in order. now: the store's clock."""

    def __init__(self, root: str = ROOT) -> None:
        self.steps: list[Step] = []
        self.fault: Fault | None = None
        self.before: Callable[[Step], None] | None = None
        self.reads: list[tuple[str, int, int]] = []
        self.now = 0.0
        self._nodes = {0: _Node(True), 1: _Node(True)}
        name = root.strip("/")
        self._nodes[0].names[name] = self._nodes[0].synced_names[name] = 1
        self._begin()

    def _begin(self) -> None:
        """Take the present state as the one that images are made from."""
        self._numbers = itertools.count(max(self._nodes) + 1)
        self._base = _copied(self._nodes)

    def image(self, count: int, loss: Loss, *, seed: object = 0) -> RecordingFiles:
        """What is there after the first `count` steps and a loss. seed: of Loss.MIXED."""
        return next(image for *_, image in self.images(range(count, count + 1), [loss], seeds=[seed]))

    def images(
        self, counts: Iterable[int], losses: Iterable[Loss], *, seeds: Iterable[object] = (0,)
    ) -> Iterator[tuple[int, Loss, RecordingFiles]]:
        """An image for each of these rising numbers of steps and each loss; of Loss.MIXED one for each seed."""
        losses, seeds = list(losses), list(seeds)
        state, done = RecordingFiles(), 0
        state._nodes = _copied(self._base)
        for count in counts:
            for step in self.steps[done:count]:
                state._apply(step)
            done = count
            for loss in losses:
                for seed in seeds if loss is Loss.MIXED else seeds[:1]:
                    yield count, loss, state._after(loss, random.Random(f"{seed} {count}"), self.now)

    def _after(self, loss: Loss, rng: random.Random, now: float) -> RecordingFiles:
        image = RecordingFiles()
        image.now = now
        image._nodes = _copied(self._nodes)
        if loss is not Loss.CRASH:
            for node in image._nodes.values():
                node.lose(loss, rng)
        image._begin()
        return image

    def copy(self) -> RecordingFiles:
        """The same files, in a layer of their own."""
        return self._after(Loss.CRASH, random.Random(), self.now)

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

    # ---- steps

    def _do(self, action: str, step: Step) -> None:
        with writing(action, step.other or step.path):
            if (error := self._try(step)) is not None:
                raise error

    def _try(self, step: Step) -> OSError | None:
        """Take a step; the error it meets, if it is to fail."""
        number = len(self.steps)
        step = dataclasses.replace(step, at=self.now)
        if self.before is not None:
            self.before(step)
        if self.fault is None or not self.fault.hits(number):
            self._record(step)
            return None
        if self.fault.after:
            self._record(step)
        else:
            self._record(Step("lost" if step.kind == "fsync" else "failed", step.path, inode=step.inode))
        return OSError(self.fault.code, os.strerror(self.fault.code))

    def _record(self, step: Step) -> None:
        self._apply(step)
        self.steps.append(step)

    def _apply(self, step: Step) -> None:
        if step.kind == "mkdir" or step.kind == "create":
            directory, name = self._split(step.path)
            self._nodes[step.inode] = _Node(step.kind == "mkdir", modified=step.at)
            directory.change(_Change("", name, step.inode))
        elif step.kind == "write":
            node = self._nodes[step.inode]
            node.data += step.data
            node.modified, node.lost = step.at, False
        elif step.kind == "begin_sync":
            self._nodes[step.inode].begun = len(self._nodes[step.inode].data)
        elif step.kind == "fsync":
            self._nodes[step.inode].sync()
        elif step.kind == "lost":
            self._nodes[step.inode].lost = True
        elif step.kind == "link":
            source, old = self._split(step.path)
            target, new = self._split(step.other)
            if new in target.names:
                raise NameTaken(step.other)
            target.change(_Change("", new, source.names[old]))
        elif step.kind == "rename":
            source, old = self._split(step.path)
            target, new = self._split(step.other)
            if old not in source.names:
                raise FileNotFoundError(2, "No such file or directory", step.path)
            inode = source.names[old]
            if source is target:
                target.change(_Change(old, new, inode))
            else:
                source.change(_Change(old, "", 0))
                target.change(_Change("", new, inode))
        elif step.kind == "remove":
            directory, name = self._split(step.path)
            directory.change(_Change(name, "", 0))
        elif step.kind == "sync_dir":
            self._node(step.path).sync()

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
        return RecordingSource(self, path, node.data)

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
            return self._node(path).modified

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
        self._late: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._files._do("write", Step("write", self._path, inode=self._inode, data=bytes(data)))

    def begin_sync(self) -> None:
        # A write-back that fails is told by the next sync of this handle, and by no other.
        self._late = self._files._try(Step("begin_sync", self._path, inode=self._inode)) or self._late

    def sync(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            self._files._record(Step("lost", self._path, inode=self._inode))
            with writing("sync", self._path):
                raise late
        self._files._do("sync", Step("fsync", self._path, inode=self._inode))

    def close(self) -> None:
        pass


class RecordingSource:
    """A file being read."""

    def __init__(self, files: RecordingFiles, path: str, data: bytearray) -> None:
        self._files = files
        self._path = path
        self._data = data
        self._size = len(data)

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise StateCorrupt(f"{self._path!r} has {self._size} bytes; {length} at {offset} are not in it")
        self._files.reads.append((self._path, offset, length))
        with memoryview(self._data) as view:
            return bytes(view[offset : offset + length])  # once: the memory that reading takes is measured

    def close(self) -> None:
        pass
