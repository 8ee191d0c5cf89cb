"""An office in a process of its own, served over gRPC; commands come as lines on stdin, replies as JSON on stdout.

python -m benchmarks.served --count N --size BYTES --seed N --share S --root DIR [--revisions]

It ends when its stdin does, so that it never outlives whoever started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.loads import IDENTITY, seals
from benchmarks.office import Office, RevisedOffice, Traffic
from benchmarks.rounds import WrongResult
from benchmarks.sessions import make_sessions
from gym_ckpt_grpc.control import ControlPlane, ParticipantServer
from gym_ckpt_grpc.storage import path_to_uri

_START_LIMIT, _REPLY_LIMIT, _END_LIMIT = 600.0, 120.0, 30.0
_LINE = 64 << 20


async def serve_office(given: argparse.Namespace) -> None:
    """Serve until stdin ends."""
    made = make_sessions(given.count, size=given.size, seed=given.seed)
    kind = RevisedOffice if given.revisions else Office
    office = kind({each["session_id"]: each for each in made})
    del made
    plane = ControlPlane(office.owner, IDENTITY, roots=[path_to_uri(given.root)])
    async with ParticipantServer(plane) as server:
        traffic = Traffic(office, given.share, random.Random(f"traffic {given.seed}"))
        _reply({"address": server.address})
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            await _obey(line.decode().strip(), office, traffic)
        await traffic.stop()


async def _obey(command: str, office: Office, traffic: Traffic) -> None:
    if command == "start":
        traffic.start()
    elif command == "stop":
        await traffic.stop()
    reply: dict[str, Any] = {"changes": traffic.changes, "longest": traffic.take_longest()}
    if command == "seals":
        reply["seals"] = {key: digest.hex() for key, digest in seals(office.sessions).items()}
    _reply(reply)


def _reply(reply: dict[str, Any]) -> None:
    print(json.dumps(reply), flush=True)


class ServedOffice:
    """A running office process, as its starter sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.address = ""
        self._process = process

    async def ask(self, command: str, *, limit: float = _REPLY_LIMIT) -> dict[str, Any]:
        """Send a command (`start`, `stop`, `seals`, or none) and give the reply. Raises WrongResult, TimeoutError."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self._process.stdin.drain()
        return await self.reply(limit)

    async def reply(self, limit: float) -> dict[str, Any]:
        """The next reply."""
        assert self._process.stdout is not None
        async with asyncio.timeout(limit):
            line = await self._process.stdout.readline()
        if not line:
            raise WrongResult("the office process ended; what it wrote to stderr says why")
        found: dict[str, Any] = json.loads(line)
        return found


@asynccontextmanager
async def office_process(
    root: Path, *, count: int, size: int, seed: int, share: float, revisions: bool
) -> AsyncIterator[ServedOffice]:
    """Start an office and end it, whatever happens; its traffic does not run yet."""
    command = ["-m", "benchmarks.served", "--count", str(count), "--size", str(size), "--seed", str(seed)]
    command += ["--share", str(share), "--root", str(root), *(["--revisions"] if revisions else [])]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        limit=_LINE,
    )
    try:
        office = ServedOffice(process)
        office.address = (await office.reply(_START_LIMIT))["address"]
        yield office
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let it end by itself, and kill it if it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_LIMIT):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve an office."""
    parser = argparse.ArgumentParser(description="Serve an office over gRPC.")
    for name in ("--count", "--size", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--share", type=float, required=True, help="of the sessions that change per second")
    parser.add_argument("--root", required=True)
    parser.add_argument("--revisions", action="store_true")
    asyncio.run(serve_office(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
