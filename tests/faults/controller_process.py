"""A controller in a process of its own: opens a checkpoint, says how far it is, and waits for standard input.

Arguments: fleet file, root, lease seconds, `wait_in` (`prepared`: waits with the checkpoint open; `preparing`: waits
inside a Prepare that cannot become ready).
"""

from __future__ import annotations

import asyncio
import sys

from gym_ckpt_grpc.coordinator import Coordinator, Fleet


async def control(fleet_file: str, root: str, lease: float, wait_in: str) -> None:
    """Open a checkpoint and stay in it."""
    fleet = Fleet.from_yaml(fleet_file)
    async with Coordinator(fleet, root=root, controller_id="controller", lease_ttl=lease) as coordinator:
        print("entered", flush=True)
        async with coordinator.checkpoint(deadline=300) as checkpoint:
            if wait_in == "preparing":
                print("preparing", flush=True)
                await checkpoint.prepare(ready_within=250)
            await checkpoint.prepare(ready_within=10)
            print("prepared", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await checkpoint.commit([])
            await checkpoint.publish()
        print("published", flush=True)


if __name__ == "__main__":
    asyncio.run(control(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]))
