"""A trainer in a process of its own that releases a checkpoint, then writes it: to be killed in between.

`python -m tests.e2e.killed_trainer PLAN CAPTURE_KEY...` prints `released ID` when the fleet is open again, waits for a
line, and begins to write; `durable` when that is done. It never publishes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gym_ckpt_grpc.auth import TokenFile
from gym_ckpt_grpc.coordinator import Coordinator
from gym_ckpt_grpc.minigym.deployment import Deployment
from gym_ckpt_grpc.protocol.ids import EpisodeId


async def main(plan_file: str, *keys: str) -> None:
    plan, scope = Deployment.load(Path(plan_file)), [EpisodeId.from_capture_key(key) for key in keys]
    token = TokenFile(plan.token_file("controller"))
    async with (
        Coordinator(plan.fleet(), root=plan.root.as_uri(), controller_id="killed", token=token) as coordinator,
        coordinator.checkpoint() as checkpoint,
    ):
        await checkpoint.prepare()
        await checkpoint.capture(scope)
        await checkpoint.reopen()
        print(f"released {checkpoint.id}", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await checkpoint.commit(scope)
        print("durable", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
