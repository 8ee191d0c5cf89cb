"""A participant in a process of its own, driven by lines on standard input: `live NAME`, `run NAME`, `park NAME`,
`block SECONDS` (blocks the event loop), `restarted`... It prints its address first, and `ok` after each line."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from gym_ckpt_grpc.control import ControlPlane, ParticipantServer
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.control.scripted import ScriptedOwner


def obey(owner: ScriptedOwner, line: str) -> None:
    """Do what one line says."""
    verb, _, rest = line.partition(" ")
    if verb == "live":
        owner.live[EpisodeId(rest)] = {"name": rest}
    elif verb == "run":
        owner.live[EpisodeId(rest)] = {"name": rest}
        owner.running.add(EpisodeId(rest))
    elif verb == "park":
        owner.park(EpisodeId(rest))
    elif verb == "block":
        time.sleep(float(rest))  # the event loop, on purpose
    elif verb == "swallow":
        owner.opens.open.clear()
    else:
        raise ValueError(line)


async def serve(address: str, root: Path, kind: str) -> None:
    """Serve until standard input ends."""
    owner = ScriptedOwner()
    owner.kind = ParticipantKind(kind)
    plane = ControlPlane(owner, ParticipantIdentity(owner.kind, "scripted"), roots=[str(root)])
    async with ParticipantServer(plane, address) as server:
        print(server.address, flush=True)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().strip():
            obey(owner, line)
            print("ok", flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
