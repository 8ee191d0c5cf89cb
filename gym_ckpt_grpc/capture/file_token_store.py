"""`FileTokenStore`: token records in append-only logs of a directory.

Each process that writes has a log of its own, so several may share a directory: nobody appends to what another wrote,
and a log that ends in the middle of a record (its writer was killed) is simply done. A write is one append and one
sync, whatever number of records it has. Readers look for what was appended since their last look.

    log    = "gymckpt tokens 1\\n" frame*
    frame  = magic (4) | key bytes (2) | body bytes (4) | crc32 of the body (4) | key | crc32 of all that (4) | body
    magic  = "GTK+": the body is a record.  "GTK-": the body names the frame that is deleted, "<log> <offset>".

Numbers are big-endian. A log without records that count is removed, unless its writer lives (it holds a lock).
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gym_ckpt_grpc.capture.token_records import TokenRecord, cut_key, decode, encode, staging_key
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateUnwritable, Violation
from gym_ckpt_grpc.storage import LocalFiles

HEADER = b"gymckpt tokens 1\n"
SUFFIX = ".tokens"
LOG_BYTES = 64 << 20
"""Size at which a new log is begun, so that the space of deleted records comes back in pieces."""

_PUT, _DELETE = b"GTK+", b"GTK-"
_HEAD = struct.Struct(">4sHII")
_CHECK = struct.Struct(">I")
_MAX_KEY = 1024
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Log:
    """One log as read so far. live: key and offset of each frame that counts. targets: logs it deletes from."""

    name: str
    handle: int
    scanned: int = 0
    live: set[tuple[str, int]] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    warned: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the frame of a record is, and its body."""

    log: _Log
    offset: int
    body: int
    length: int
    checksum: int


class FileTokenStore:
    """A `TokenStore` on a file system. directory: made if it is missing; shared by any number of processes.

    Threads may share one. log_bytes: size at which a new log is begun.
    """

    def __init__(self, directory: str | os.PathLike[str], *, log_bytes: int = LOG_BYTES) -> None:
        self.directory = Path(directory).absolute()
        self._log_bytes = log_bytes
        self._files = LocalFiles()
        self._files.make_dirs(str(self.directory))
        self._writing = threading.Lock()
        self._reading = threading.RLock()
        self._logs: dict[str, _Log] = {}
        # Logs are read in any order, so a record that was replaced may come after the one that did it. All that are
        # not deleted are kept: once everything is read that is one per key, or several that were put side by side.
        self._places: dict[str, dict[tuple[str, int], _Place]] = {}
        self._deleted: set[tuple[str, int]] = set()
        self._appender = -1

    def put(self, records: Sequence[TokenRecord]) -> None:
        """As `TokenStore.put`. Raises InvalidArgument for a record under a key that is not its own."""
        if not records:
            return
        latest = {_checked_key(record): record for record in records}
        frames = [_frame(_PUT, key, encode(record)) for key, record in latest.items()]
        with self._writing:
            with self._reading:
                self._refresh()
                replaced = self._delete_frames(latest)
            self._append(b"".join([*frames, *replaced]))

    def get(self, key: str) -> TokenRecord | None:
        """As `TokenStore.get`."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, TokenRecord]:
        """As `TokenStore.get_many`."""
        with self._reading:
            self._refresh()
            bodies = {key: self._body(key) for key in keys if key in self._places}
        return {key: decode(body, key) for key, body in bodies.items()}

    def delete(self, keys: Sequence[str]) -> frozenset[str]:
        """As `TokenStore.delete`."""
        with self._writing:
            with self._reading:
                self._refresh()
                found = frozenset(key for key in keys if key in self._places)
                frames = self._delete_frames(found)
            if frames:
                self._append(b"".join(frames))
                with self._reading:
                    self._remove_spent()
        return found

    def keys(self, prefix: str = "") -> list[str]:
        """As `TokenStore.keys`."""
        with self._reading:
            self._refresh()
            return sorted(key for key in self._places if key.startswith(prefix))

    def close(self) -> None:
        """Close the files. Nothing may be asked afterwards."""
        with self._writing, self._reading:
            self._end_log()
            for log in self._logs.values():
                os.close(log.handle)
            self._logs.clear()
            self._places.clear()

    # ---- writing

    def _append(self, data: bytes) -> None:
        """Append to the own log, durably, then read it. A log whose write failed is never written again."""
        with _writing(f"{self.directory}"):
            if self._appender < 0:
                self._begin_log()
            size = os.fstat(self._appender).st_size
            try:
                _write_all(self._appender, data)
                os.fsync(self._appender)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._appender, size)
                self._end_log()
                raise
        with self._reading:
            self._refresh()
        if size + len(data) >= self._log_bytes:
            self._end_log()

    def _begin_log(self) -> None:
        path = self.directory / f"{uuid.uuid4().hex}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._appender = os.open(path, flags, 0o600)
        try:
            with suppress(OSError):  # without locks nobody may remove logs, which is all that they are for
                fcntl.flock(self._appender, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(self._appender, HEADER)
            os.fsync(self._appender)
            self._files.sync_dir(str(self.directory))
        except (OSError, StateUnwritable):
            self._end_log()
            raise

    def _end_log(self) -> None:
        if self._appender >= 0:
            os.close(self._appender)
        self._appender = -1

    # ---- reading

    def _refresh(self) -> None:
        """Take in what was appended since the last look, by this process and others."""
        try:
            names = {name for name in os.listdir(self.directory) if name.endswith(SUFFIX)}
        except OSError as error:
            raise StateCorrupt(f"cannot read {str(self.directory)!r}: {error.strerror}") from error
        for name in self._logs.keys() - names:
            self._drop(self._logs[name])
        self._deleted = {where for where in self._deleted if where[0] in names}
        for name in names - self._logs.keys():
            with suppress(FileNotFoundError):  # removed by another process just now
                handle = os.open(self.directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._logs[name] = _Log(name, handle)
        for log in self._logs.values():
            self._scan(log)

    def _scan(self, log: _Log) -> None:
        size = os.fstat(log.handle).st_size
        if not log.scanned:
            if size < len(HEADER):
                return
            if os.pread(log.handle, len(HEADER), 0) != HEADER:
                raise StateCorrupt(f"{str(self.directory / log.name)!r} is no log of staged tokens of version 1")
            log.scanned = len(HEADER)
        while log.scanned < size:
            start = log.scanned
            data = os.pread(log.handle, _HEAD.size + _MAX_KEY + _CHECK.size, start)
            found = _parse(data)
            if found is None:
                self._warn(log, data)
                return
            magic, key, begin, length, checksum = found
            if start + begin + length > size:
                return  # not all of it is there yet, or its writer was killed
            log.scanned = start + begin + length
            if magic == _PUT:
                self._add(key, _Place(log, start, start + begin, length, checksum))
            else:
                self._forget(key, os.pread(log.handle, length, start + begin), log)

    def _warn(self, log: _Log, data: bytes) -> None:
        if data.strip(b"\0") and len(data) > _HEAD.size and not log.warned:
            log.warned = True
            _log.warning("%s: what follows byte %d cannot be read", self.directory / log.name, log.scanned)

    def _add(self, key: str, place: _Place) -> None:
        where = (place.log.name, place.offset)
        if where in self._deleted:
            self._deleted.remove(where)
            return
        self._places.setdefault(key, {})[where] = place
        place.log.live.add((key, place.offset))

    def _forget(self, key: str, body: bytes, source: _Log) -> None:
        name, _, offset = body.decode("ascii", "replace").partition(" ")
        where = (name, int(offset) if offset.isdecimal() else -1)
        source.targets.add(name)
        log = self._logs.get(name)
        if log is None or where[1] >= log.scanned:
            self._deleted.add(where)  # to be met yet
        self._remove(key, where)

    def _remove(self, key: str, where: tuple[str, int]) -> None:
        places = self._places.get(key, {})
        place = places.pop(where, None)
        if place is not None:
            place.log.live.discard((key, place.offset))
            if not places:
                del self._places[key]

    def _delete_frames(self, keys: Iterable[str]) -> list[bytes]:
        return [
            _frame(_DELETE, key, f"{name} {offset}".encode())
            for key in sorted(keys)
            for name, offset in self._places.get(key, {})
        ]

    def _body(self, key: str) -> bytes:
        places = self._places[key]
        place = places[max(places)]
        data = os.pread(place.log.handle, place.length, place.body)
        if len(data) != place.length or zlib.crc32(data) != place.checksum:
            raise StateCorrupt(f"the staged record {key} is damaged in {str(self.directory / place.log.name)!r}")
        return data

    def _drop(self, log: _Log) -> None:
        for key, offset in list(log.live):
            self._remove(key, (log.name, offset))
        os.close(log.handle)
        del self._logs[log.name]

    def _remove_spent(self) -> None:
        """Remove logs in which nothing counts any more and that nobody writes, this process included."""
        for log in list(self._logs.values()):
            if not _spent(log, self._logs):
                continue
            with suppress(OSError):
                fcntl.flock(log.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._refresh()  # what its writer appended before it let go, and logs that it may be about
                if log.name in self._logs and _spent(log, self._logs):
                    os.unlink(self.directory / log.name)
                    self._drop(log)
                elif log.name in self._logs:
                    fcntl.flock(log.handle, fcntl.LOCK_UN)


def _spent(log: _Log, logs: dict[str, _Log]) -> bool:
    """Whether nothing in a log counts: no records, and no deletions from logs that are still there."""
    return log.scanned > len(HEADER) and not log.live and not any(name in logs for name in log.targets - {log.name})


def _checked_key(record: TokenRecord) -> str:
    own = (
        cut_key(record.capture_key, record.call_id, record.cut_id)
        if record.cut_id
        else staging_key(record.capture_key, record.call_id)
    )
    if record.key != own:
        problem = f"is {record.key[:200]!r}, the record's own is {own!r}"
        raise InvalidArgument(f"key {problem}", violations=[Violation("key", problem)])
    return own


def _frame(magic: bytes, key: str, body: bytes) -> bytes:
    name = key.encode()
    head = _HEAD.pack(magic, len(name), len(body), zlib.crc32(body)) + name
    return head + _CHECK.pack(zlib.crc32(head)) + body


def _parse(data: bytes) -> tuple[bytes, str, int, int, int] | None:
    """Magic, key, where the body begins, its length and checksum; None for what is no frame, or not all of it."""
    if len(data) < _HEAD.size:
        return None
    magic, name, length, checksum = _HEAD.unpack_from(data)
    begin = _HEAD.size + name + _CHECK.size
    if magic not in (_PUT, _DELETE) or name > _MAX_KEY or len(data) < begin:
        return None
    head = data[: _HEAD.size + name]
    if _CHECK.unpack_from(data, len(head))[0] != zlib.crc32(head):
        return None
    return magic, head[_HEAD.size :].decode("utf-8", "replace"), begin, length, checksum


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateUnwritable(f"cannot write staged tokens in {path!r}: {error.strerror}") from error
