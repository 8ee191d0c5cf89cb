"""docs/embed.md: every block of it is run, as real processes on loopback, in the order in which it stands there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "embed.md"
BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = ("8001", "8002", "8003", "8004", "7001", "7002", "7003", "7004")
LIMIT = 40.0


def blocks() -> list[tuple[str, str, str]]:
    """(language, file name, text) of each block."""
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def test_every_block_is_run() -> None:
    """Every fence of the page is a named Python file that some command runs or imports, or a list of commands."""
    found = blocks()
    assert len(found) * 2 == PAGE.read_text(encoding="utf-8").count("```")
    commands = "".join(text for language, _, text in found if language == "sh")
    for language, name, _ in found:
        assert language in ("python", "sh")
        assert (language == "python") is bool(name)
        assert not name or name in commands or any(f"from {Path(name).stem} import" in t for *_, t in found)


def test_the_first_server_is_the_example() -> None:
    """One source: the page has examples/embed_resources.py, whose own part is about 30 lines."""
    shown = {name: text for _, name, text in blocks()}["embed_resources.py"]
    assert shown == (REPOSITORY / "examples" / "embed_resources.py").read_text(encoding="utf-8")
    code = [line for line in shown.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))]
    assert len(code) <= 35


class Shell:
    """Runs the page's commands in a directory: servers with `&`, `kill -9 $(jobs -p)`, and what must succeed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.output = ""
        self._jobs: list[subprocess.Popen[bytes]] = []
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        bin = Path(sys.executable).parent
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("GYM_CKPT", "COV_"))},
            "PATH": f"{bin}:{os.environ['PATH']}",
            "PWD": str(directory),
        }

    def renumbered(self, text: str) -> str:
        """The text with free ports in place of those of the page."""
        return re.sub("|".join(PORTS), lambda match: self._ports[match[0]], text)

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(self.renumbered(text), encoding="utf-8")

    def run(self, line: str) -> None:
        if line == "kill -9 $(jobs -p)":
            for job in self._jobs:
                self._kill(job)
        elif line.endswith(" &"):
            self._begin(line.removesuffix(" &"))
        else:
            done = subprocess.run(
                ["bash", "-ec", self.renumbered(line)],
                cwd=self.directory,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            self.output += done.stdout
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}\n{self._logs()}"

    def _begin(self, line: str) -> None:
        """A server; it is up once its HTTP port and its control port take connections."""
        words = shlex.split(self.renumbered(line.replace("$PWD", str(self.directory))))
        log = self.directory / f"job-{len(self._jobs) + 1}.log"
        with log.open("wb") as output:
            job = subprocess.Popen(
                words, cwd=self.directory, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )
        self._jobs.append(job)
        for port in (words[2], words[3].rpartition(":")[2]):
            ends = time.monotonic() + LIMIT
            while not takes_connections(int(port)):
                assert job.poll() is None, log.read_text()
                assert time.monotonic() < ends, f"{line}: nothing on port {port}\n{log.read_text()}"
                time.sleep(0.05)

    def _kill(self, job: subprocess.Popen[bytes]) -> None:
        if job.poll() is None:
            job.send_signal(signal.SIGKILL)
        job.wait()

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.directory.glob("job-*.log")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            self._kill(job)


def free_ports(count: int) -> list[str]:
    """Ports that nobody has at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_the_page_runs(tmp_path: Path) -> None:
    """The count goes on from three, and the rollout through all four servers ends as if nothing had happened."""
    with Shell(tmp_path) as shell:
        for language, name, text in blocks():
            if language == "python":
                shell.write(name, text)
            else:
                for line in text.splitlines():
                    shell.run(line)
        output = shell.output
    assert "{'count': 3}" in output
    assert "{'count': 4}" in output
    assert "{'reward': 4}" in output
    assert "continues: task-7" in output
    assert "continues: task-8" in output
    assert "{'reward': 20, 'turns': 20}" in output
