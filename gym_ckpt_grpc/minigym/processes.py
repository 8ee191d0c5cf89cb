"""One server process in a session of its own: start, signal, wait, and never lose it.

The leader stays unreaped until its whole group is gone. Until then its process group id cannot be given to
anybody else, so a signal to the group never meets a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TETHER = str(Path(__file__).with_name("tether.py"))
_GONE_POLL = 0.005
_TAIL_BYTES, _TAIL_LINES = 4096, 20


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start a server.

    name: unique, names the log file. argv: program and arguments. port: of its HTTP server on 127.0.0.1,
    whose `health` path answers 200 when it is ready. env: added to this process's environment. tethered: dies
    with this process (Linux); without, the command has to see to that itself.
    """

    name: str
    argv: Sequence[str]
    port: int
    health: str = "/health"
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # it may have credentials of exporters
    tethered: bool = True


class ManagedProcess:
    """A started process. Made by `start`, ended by `kill` and `reap`; the event `exited` tells of its end."""

    def __init__(self, spec: ProcessSpec, popen: subprocess.Popen[bytes], log: Path, log_offset: int) -> None:
        self.spec, self.log, self.pid = spec, log, popen.pid
        self.exited = asyncio.Event()
        self._popen = popen
        self._log_offset = log_offset
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._on_exit)

    @classmethod
    def start(cls, spec: ProcessSpec, log_dir: Path) -> ManagedProcess:
        """Start it in its own session and process group, output appended to `<log_dir>/<name>.log`.

        Without an await, so that no cancellation comes between the start and the tracking. Raises OSError.
        """
        log = log_dir / f"{spec.name}.log"
        tether = [sys.executable, "-I", "-S", _TETHER, str(os.getpid())] if spec.tethered else []
        with log.open("ab") as output:
            offset = output.tell()
            popen = subprocess.Popen(
                [*tether, *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        try:
            return cls(spec, popen, log, offset)
        except BaseException:
            popen.kill()
            popen.wait()
            raise

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.exited.set()

    @property
    def ending(self) -> str | None:
        """How the leader ended (`exit code 3`, `SIGKILL`); None while it runs. Does not reap it."""
        if (code := self._popen.returncode) is not None:
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        if info.si_code == os.CLD_EXITED:
            return f"exit code {info.si_status}"
        return signal.Signals(info.si_status).name

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group; harmless once it is gone."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def group_gone(self) -> None:
        """Wait until the leader has exited and nothing of its group runs. Send SIGKILL first."""
        await self.exited.wait()
        while _runs(self.pid):  # noqa: ASYNC110 - nothing announces the end of a group
            await asyncio.sleep(_GONE_POLL)

    def reap(self) -> None:
        """SIGKILL to the group, then wait for the leader, which takes milliseconds. Safe to repeat."""
        if self._popen.returncode is not None:
            return
        self.signal(signal.SIGKILL)
        self._popen.wait()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exited.set()

    def tail(self) -> str:
        """The end of what this process wrote, at most 20 lines; nothing of an earlier life."""
        with self.log.open("rb") as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(self._log_offset, size - _TAIL_BYTES))
            lines = output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def _runs(group: int) -> bool:
    """Whether a process of the group runs. Zombies do not: in a container an orphan's may stay for ever."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", pid, "stat").read_text(errors="replace")
        except OSError:
            continue
        state, _, member_of = stat.rpartition(")")[2].split()[:3]
        if int(member_of) == group and state not in "ZX":
            return True
    return False
