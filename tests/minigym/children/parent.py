"""A supervisor to be killed: `parent.py LOG_DIR STAND_IN`. Prints the pids of its two children and waits."""

import asyncio
import signal
import sys
from pathlib import Path

from gym_ckpt_grpc.minigym.ports import free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.supervisor import Supervisor


async def main() -> None:
    specs = [
        ProcessSpec(f"child{number}", [sys.executable, sys.argv[2], str(port)], port)
        for number, port in enumerate(free_ports(2))
    ]
    async with Supervisor(Path(sys.argv[1])) as supervisor:
        await supervisor.start(specs)
        print(*supervisor.pids.values(), flush=True)
        await asyncio.Event().wait()


# A background job of a shell is started with SIGINT ignored; this one wants to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.run(main())
