"""`docs/operating.md`: each command runs, in the page's order, on the deployment that the page starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.processes import clean_env

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
PART = re.compile(
    r"<!-- (?:(?P<stays>stays)|(?P<killed>every server is killed)|(?P<fails>fails, )?prints: (?P<text>[^\n]+?)) -->"
    r"(?:\n```sh\n(?P<command>.*?)```)?",
    re.DOTALL,
)


@dataclass
class Terminal:
    """A shell's environment, kept from block to block, and what stays in other terminals."""

    directory: Path
    exports: str = ""
    staying: list[subprocess.Popen[str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def _shell(self, command: str) -> tuple[list[str], dict[str, str]]:
        tools = Path(sys.executable).parent
        env = clean_env(PATH=f"{tools}{os.pathsep}{os.environ['PATH']}", HOME=str(self.directory))
        return ["bash", "-c", f"set -eu -o pipefail\n{self.exports}{command}"], env

    def run(self, command: str) -> tuple[int, str]:
        """Exit status and everything printed."""
        argv, env = self._shell(command)
        ended = subprocess.run(
            argv, cwd=self.directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        self.exports += "".join(f"{line}\n" for line in command.splitlines() if line.startswith("export "))
        return ended.returncode, ended.stdout

    def stay(self, command: str) -> None:
        """Start what goes on in a terminal of its own, and wait until it is up."""
        argv, env = self._shell(f"exec {command}")
        popen = subprocess.Popen(
            argv, cwd=self.directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.staying.append(popen)
        assert popen.stdout is not None
        lines = []
        for line in popen.stdout:
            lines.append(line)
            if line.startswith("up;"):
                reader = threading.Thread(target=popen.stdout.read, daemon=True)
                reader.start()
                self.readers.append(reader)
                return
        raise AssertionError("".join(lines))

    def kill_servers(self) -> None:
        """SIGKILL to every server: the children of `up`."""
        for pid in _children(self.staying[-1].pid):
            os.kill(pid, signal.SIGKILL)
        assert self.staying[-1].wait(30) == 1

    def close(self) -> None:
        for popen in self.staying:
            popen.send_signal(signal.SIGINT)
            popen.wait(30)
        for reader in self.readers:
            reader.join(30)
        for popen in self.staying:
            if popen.stdout is not None:
                popen.stdout.close()


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def run_page(terminal: Terminal, page: str) -> Iterator[str]:
    """Run every block of a page in its order; each ends and prints as the page says. Gives what each printed."""
    parts = list(PART.finditer(page))
    assert sum(part["command"] is not None for part in parts) == page.count("```sh\n"), "every block says what it does"
    for part in parts:
        command = part["command"] or ""
        if part["stays"]:
            terminal.stay(command)
        elif part["killed"]:
            terminal.kill_servers()
        else:
            status, output = terminal.run(command)
            assert (status != 0) is bool(part["fails"]), f"{command}\n{output}"
            assert part["text"] in output, f"{command}\n{output}"
            yield output


def test_every_documented_command(terminal: Terminal) -> None:
    """Each prints what the page says, and none prints the token."""
    for output in run_page(terminal, PAGE.read_text(encoding="utf-8")):
        assert (terminal.directory / "gym" / "tokens" / "controller").read_text().strip() not in output


def test_the_page_shows_every_command() -> None:
    commands = "".join(part["command"] or "" for part in PART.finditer(PAGE.read_text(encoding="utf-8")))
    for name in "prepare commit publish resume restore retire forget watch doctor up status show verify".split():
        assert f"gym-ckpt {name} " in commands or f"gym-ckpt {name}\n" in commands, name
