"""Who listens where on this host, as far as /proc tells: other users' processes keep their sockets to themselves."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_LISTEN = "0A"
_HERE = ("unix:", "127.", "localhost:", "[::1]:")


def is_here(address: str) -> bool:
    """Whether an address is certainly of this host."""
    return address.startswith(_HERE)


@dataclass(frozen=True, slots=True)
class Listening:
    """One process that listens. name: of its program, never its arguments."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


class Listeners:
    """The listening TCP ports and Unix sockets of this host at one moment."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._inodes: dict[str, set[str]] = defaultdict(set)
        for table in ("tcp", "tcp6"):
            for line in _lines(proc / "net" / table):
                fields = line.split()
                if fields[3] == _LISTEN:
                    self._inodes[str(int(fields[1].rpartition(":")[2], 16))].add(fields[9])
        for line in _lines(proc / "net" / "unix"):
            fields = line.split(maxsplit=7)
            if len(fields) == 8:
                self._inodes[f"unix:{fields[7]}"].add(fields[6])

    @property
    def known(self) -> bool:
        """Whether this host tells at all."""
        return (self._proc / "net" / "tcp").exists()

    def taken(self, address: str) -> bool:
        """Whether anybody listens at a port or socket of this host."""
        return bool(self._inodes.get(_key(address)))

    def at(self, address: str) -> list[Listening]:
        """The processes that listen there, as far as this user may know."""
        wanted = {f"socket:[{inode}]" for inode in self._inodes.get(_key(address), ())}
        return [self._named(pid) for pid in self._pids() if wanted and wanted & self._sockets(pid)]

    def _pids(self) -> list[int]:
        return sorted(int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit())

    def _sockets(self, pid: int) -> set[str]:
        try:
            return {os.readlink(entry) for entry in (self._proc / str(pid) / "fd").iterdir()}
        except OSError:
            return set()

    def _named(self, pid: int) -> Listening:
        return Listening(pid, "".join(_lines(self._proc / str(pid) / "comm", skip=0)) or "unknown")


def _key(address: str) -> str:
    return address if address.startswith("unix:") else address.rpartition(":")[2]


def _lines(path: Path, *, skip: int = 1) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[skip:]
    except OSError:
        return []
