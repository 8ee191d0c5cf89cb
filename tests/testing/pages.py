"""What the tests of documentation pages share: the blocks of a page, and a shell that runs their commands."""

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

from gym_ckpt_grpc.minigym.ports import free_ports

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = re.compile(r"\b[78]00\d\b")
LIMIT = 40.0


def blocks_of(page: str) -> list[tuple[str, str, str]]:
    """(language, file name, text) of each block of a page under docs. A block that is neither is an error."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    found = BLOCK.findall(text)
    assert len(found) * 2 == text.count("```"), f"{page} has a fence that is no block"
    return found


def check_every_block_is_run(page: str) -> None:
    """Every fence of the page is a named Python file that some command runs or imports, or a list of commands."""
    found = blocks_of(page)
    commands = "".join(text for language, _, text in found if language == "sh")
    for language, name, _ in found:
        assert language in ("python", "sh")
        assert (language == "python") is bool(name)
        assert not name or name in commands or any(f"from {Path(name).stem} import" in t for *_, t in found), name


class Shell:
    """Runs a page's commands in a directory: servers with `&`, `kill -9 $(jobs -p)`, and what must succeed."""

    def __init__(self, directory: Path, page: str) -> None:
        self.directory = directory
        self._blocks = blocks_of(page)
        self.output = ""
        self._jobs: list[subprocess.Popen[bytes]] = []
        ports = sorted({port for *_, text in self._blocks for port in PORT.findall(text)})
        self._ports = dict(zip(ports, map(str, free_ports(len(ports))), strict=True))  # free in every life
        bin = Path(sys.executable).parent
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("GYM_CKPT", "COV_"))},
            "PATH": f"{bin}:{os.environ['PATH']}",
            "PWD": str(directory),
        }

    def renumbered(self, text: str) -> str:
        """The text with free ports in place of those of the page."""
        return PORT.sub(lambda match: self._ports[match[0]], text)

    def run_page(self) -> None:
        """Write each file of the page and run each command, in the order in which they stand."""
        for language, name, text in self._blocks:
            if language == "python":
                self.write(name, text)
            else:
                for line in text.splitlines():
                    self.run(line)

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


def takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
