"""Watching a fleet: every change of every participant, through servers that go away and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import grpc

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.coordinator.fanout import until_done
from gym_ckpt_grpc.coordinator.fleet import Endpoint, Fleet
from gym_ckpt_grpc.coordinator.looking import Finding, Sighting, failed_finding, sighting_of
from gym_ckpt_grpc.coordinator.member import Connections, Credentials
from gymckpt.v1 import participant_pb2

AGAIN = 0.5
"""Seconds before a server that went away, or was never there, is asked again."""


async def watch(
    fleet: Fleet, *, token: TokenSource | None = None, allow_insecure: bool = False, tls: ClientTls | None = None
) -> AsyncGenerator[Sighting, None]:
    """One sighting per participant at once, then one per change, for ever. Claims no epoch and changes nothing.

    A server that goes away gives one sighting that says so, and is asked again until it is back. Close the iterator
    to end it.
    """
    connections = Connections(Credentials(token=token, allow_insecure=allow_insecure, tls=tls))
    seen: asyncio.Queue[Sighting] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_watch_one(endpoint, connections, seen), name=f"watch {endpoint.address}")
        for endpoint in await fleet.resolve()
    ]
    try:
        while True:
            yield await seen.get()
    finally:
        for task in tasks:
            task.cancel()
        await until_done(tasks)
        await connections.close()


async def _watch_one(endpoint: Endpoint, connections: Connections, seen: asyncio.Queue[Sighting]) -> None:
    server, address = endpoint.server, endpoint.address
    told: Finding | None = None
    if endpoint.problem:
        seen.put_nowait(Sighting(server, address, Finding.DOWN, message=endpoint.problem))
        return
    while True:
        begun = time.monotonic()
        try:
            async for reply in connections.stub(address).WatchStatus(participant_pb2.WatchStatusRequest()):
                told = None
                seen.put_nowait(sighting_of(server, address, reply, begun))
            finding, message = Finding.DOWN, "the stream ended"
        except grpc.aio.AioRpcError as failure:
            finding, message = failed_finding(failure, server, address, connections.channel(address))
        if told is not finding:  # its text may differ each time
            told = finding
            seen.put_nowait(Sighting(server, address, finding, None, None, message, time.monotonic() - begun))
        await asyncio.sleep(AGAIN)
