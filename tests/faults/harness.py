"""Real processes for fault tests: started, signalled, and gone when the test ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from gym_ckpt_grpc.control import open_channel
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc

if TYPE_CHECKING:
    from gymckpt.v1.participant_pb2_grpc import ParticipantServiceAsyncStub as Stub

REPOSITORY = Path(__file__).parents[2]
LIMIT = 60.0


class Process:
    """One child that speaks lines."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def line(self) -> str:
        """The next line of standard output; fails if the process ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"ended with {self.popen.wait(LIMIT)}"
        return line.strip()

    def tell(self, text: str, *, answer: bool = True) -> None:
        """Send a line, and wait for its `ok`."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()
        if answer:
            assert self.line() == "ok"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.popen.wait(LIMIT)
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Participants:
    """Participant processes of one root, and the fleet file that names them."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.fleet_file = directory / "fleet.yaml"
        self.processes: dict[str, Process] = {}
        self.addresses: dict[str, str] = {}

    def start(self, kind: str, address: str = "127.0.0.1:0") -> Process:
        """Start a participant, or start it again where it was."""
        process = Process("tests.faults.participant_process", address, str(self.root), kind)
        self.processes[kind] = process
        self.addresses[kind] = process.line()
        servers = [{"kind": kind, "service": "scripted", "address": a} for kind, a in self.addresses.items()]
        self.fleet_file.write_text(yaml.safe_dump({"servers": servers}))
        return process

    @contextlib.asynccontextmanager
    async def stub(self, kind: str) -> AsyncIterator[Stub]:
        """A stub on a channel of its own."""
        async with open_channel(self.addresses[kind]) as channel:
            yield participant_pb2_grpc.ParticipantServiceStub(channel)

    async def phase(self, kind: str) -> pb.Phase.ValueType:
        """Where a participant stands."""
        async with self.stub(kind) as stub:
            return (await stub.GetStatus(pb.GetStatusRequest(), timeout=5)).status.phase

    async def seconds_until_idle(self, kind: str, limit: float) -> float:
        """How long it takes until a participant is open again, by its own stream of statuses."""
        began = time.monotonic()
        async with self.stub(kind) as stub:
            async for reply in stub.WatchStatus(pb.WatchStatusRequest(), timeout=limit):
                if reply.status.phase == pb.PHASE_IDLE:
                    return time.monotonic() - began
        raise AssertionError("the stream ended")

    def controller(self, *, lease: float, wait_in: str = "prepared") -> Process:
        """Start a controller and wait until it is where it should wait."""
        process = Process(
            "tests.faults.controller_process", str(self.fleet_file), self.root.as_uri(), str(lease), wait_in
        )
        while process.line() != wait_in:
            continue
        return process


@contextmanager
def participants(directory: Path, *kinds: str) -> Iterator[Participants]:
    """Participants of these kinds; every process is gone when the block ends."""
    running = Participants(directory)
    try:
        for kind in kinds:
            running.start(kind)
        yield running
    finally:
        for process in running.processes.values():
            process.kill()
