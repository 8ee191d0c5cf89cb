"""The control server beside a real data plane, in one process and loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import uvicorn

from gym_ckpt_grpc.control import wire
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Participant, context


@pytest.mark.behaviour("C151")
async def test_a_control_call_does_not_wait_behind_data_calls(tmp_path: Path) -> None:
    """Every connection of the data plane is held by a slow call: a further one waits, a Prepare does not."""
    let_go = asyncio.Event()
    running = asyncio.Semaphore(0)

    async def slow(scope: object, receive: object, send: object) -> None:
        running.release()
        await let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"done"})  # type: ignore[operator]

    server = uvicorn.Server(uvicorn.Config(slow, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with Participant(tmp_path) as p, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=3)) as session:

        async def ask() -> str:
            async with session.get(f"http://127.0.0.1:{port}/") as answer:
                return await answer.text()

        held = [asyncio.create_task(ask()) for _ in range(3)]
        for _ in held:
            await running.acquire()
        further = asyncio.create_task(ask())
        request = pb.PrepareRequest(context=context(), ready_within=wire.duration(1.0))
        async with asyncio.timeout(1):
            reply = await p.stub.Prepare(request, timeout=5)
        assert reply.phase == pb.PHASE_PREPARED
        assert not further.done()
        assert running.locked()  # the further call has not reached the server
        let_go.set()
        assert await asyncio.gather(*held, further) == ["done"] * 4
    server.should_exit = True
    await serving
