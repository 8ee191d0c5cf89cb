"""Running `gym-ckpt` as a user does, and looking for what it may have left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LIMIT = 150.0
"""Seconds for one command."""
COMMAND = (sys.executable, "-c", "from gym_ckpt_grpc.cli import main; main()")
"""The script `gym-ckpt`, by the interpreter of the tests."""


def clean_env(**extra: str) -> dict[str, str]:
    """This environment without settings that a command would read."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GYM_CKPT_")}
    return {**kept, **extra}


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=LIMIT, env=clean_env(**env), check=False
    )


class Running:
    """A command that still runs; its output is read line by line."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.lines: list[str] = []
        self._new = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._new:
                self.lines.append(line)
                self._new.notify_all()
        with self._new:
            self._ended = True
            self._new.notify_all()

    def wait_for_line(self, text: str) -> None:
        """Wait until a line of standard error has this text."""

        def seen() -> bool:
            return any(text in line for line in self.lines)

        with self._new:
            assert self._new.wait_for(lambda: seen() or self._ended, LIMIT), self.lines
        assert seen(), f"ended before {text!r}: {''.join(self.lines)}"

    def interrupt(self) -> int:
        """Ctrl-C; gives the exit code."""
        self.popen.send_signal(signal.SIGINT)
        code = self.popen.wait(LIMIT)
        self._reader.join(LIMIT)
        return code


@contextmanager
def started(*arguments: str) -> Iterator[Running]:
    """Start a command in a session of its own; it is gone when the block ends."""
    popen = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_env(),
        start_new_session=True,
    )
    try:
        yield Running(popen)
    finally:
        popen.kill()
        popen.wait()
        for stream in (popen.stdout, popen.stderr):
            if stream is not None:
                stream.close()


def processes_naming(directory: Path) -> list[str]:
    """Command lines of living processes that name this directory, other than the tests'."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(directory) in line:
            found.append(line)
    return found


def until(reached: Callable[[], bool], limit: float = 10.0) -> bool:
    """Look again and again, briefly apart, until it is so; whether it became so."""
    ends = time.monotonic() + limit
    while not reached():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


def listening(ports: Sequence[int]) -> list[int]:
    """Those of these TCP ports on which somebody listens."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(int(fields[1].rpartition(":")[2], 16))
    return [port for port in ports if port in found]
