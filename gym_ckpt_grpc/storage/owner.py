"""`owner`: the heartbeat counter of whoever owns a root. Replaced whole, and compared for change only."""

from __future__ import annotations

import os
import socket
from typing import ClassVar

import msgspec

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.documents import Document
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.part_manifest import Count
from gym_ckpt_grpc.storage.placing import replace_hint


class Owner(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who owns a root, and a counter that moves while it lives.

    host, boot_id, pid_space, pid, started: where it runs, to see whether its process is gone. pid_space tells
    containers of one host apart; started is the process's start in clock ticks since boot, or 0 if unknown.
    """

    FORMAT: ClassVar[str] = "gymckpt.owner"

    format: str = "gymckpt.owner"
    schema_version: int = 1
    epoch: Count
    controller_id: str
    counter: Count
    host: str = ""
    boot_id: str = ""
    pid_space: str = ""
    pid: Count = 0
    started: Count = 0

    @classmethod
    def here(cls, *, epoch: int, controller_id: str, counter: int = 0) -> Owner:
        """This process as the owner."""
        return cls(
            epoch=epoch,
            controller_id=controller_id,
            counter=counter,
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid_space=_pid_space(),
            pid=os.getpid(),
            started=_process_start(os.getpid()) or 0,
        )

    def beat(self) -> Owner:
        """The next heartbeat."""
        return msgspec.structs.replace(self, counter=self.counter + 1)

    def is_gone(self) -> bool:
        """Whether the process certainly ended: it ran on this host, and since this boot, and is not there."""
        here = (socket.gethostname(), _boot_id(), _pid_space())
        if not (self.boot_id and self.pid_space and self.pid and self.started):
            return False
        if (self.host, self.boot_id, self.pid_space) != here:
            return False  # only its counter can tell
        return _process_start(self.pid) != self.started


def write_owner(files: FileLayer, root: str, owner: Owner) -> None:
    """Replace the heartbeat. Raises StateUnwritable."""
    replace_hint(files, f"{root}/owner", documents.to_bytes(owner))


def read_owner(files: FileLayer, root: str) -> Owner | None:
    """The present owner; None if there is none or the file cannot be read."""
    try:
        return documents.read(files, f"{root}/owner", Owner)[0]
    except (StateNotFound, StateCorrupt):
        return None


def _boot_id() -> str:
    return _read_proc("/proc/sys/kernel/random/boot_id").strip()


def _pid_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of stat); None if it is not there or unknown."""
    # The command's name, in parentheses, may hold anything.
    fields = _read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] != "Z" else None


def _read_proc(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
