"""`gym-ckpt serve-coordinator`: a coordinator of a fleet, served for trainers in any language."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gym_ckpt_grpc.auth import Authenticator, ClientTls, ServerTls, TokenSource
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import errors, people, print_json
from gym_ckpt_grpc.coordinator import Coordinator, DiscoveryFailed, Fleet
from gym_ckpt_grpc.coordinator.served import CoordinatorServer
from gym_ckpt_grpc.storage import Retention
from gym_ckpt_grpc.telemetry import exporting

AGAIN = 1.0
"""Seconds between two looks at a fleet that is not complete yet."""


async def serve_coordinator(
    fleet: Fleet,
    root: str,
    address: str,
    *,
    token: TokenSource | None,
    authenticator: Authenticator | None,
    client_tls: ClientTls | None,
    server_tls: ServerTls | None,
    audit_log: Path | None,
    controller: str,
    wait: float,
    session_ttl: float,
    incremental: bool,
    max_chain: int,
    retention: Retention | None,
    allow_insecure: bool,
    as_json: bool,
) -> Exit:
    """Serve until interrupted. token, client_tls: what participants are shown; the others are this server's own."""
    coordinator = Coordinator(
        fleet,
        root=root,
        controller_id=controller,
        token=token,
        tls=client_tls,
        allow_insecure=allow_insecure,
        incremental=incremental,
        max_chain=max_chain,
        retention=retention,
    )
    server = CoordinatorServer(
        coordinator,
        address,
        authenticator=authenticator,
        tls=server_tls,
        audit_log=audit_log,
        allow_insecure=allow_insecure,
        session_ttl=session_ttl,
    )
    # Outermost: what it waits for at the end comes after all that the server has to do.
    with exporting("gym-ckpt-coordinator"):
        return await _served(coordinator, server, wait, as_json=as_json)


async def _served(coordinator: Coordinator, server: CoordinatorServer, wait: float, *, as_json: bool) -> Exit:
    async with _entered(coordinator, wait), server:
        if as_json:
            print_json({"address": server.address, "epoch": coordinator.epoch, "root": coordinator.root.uri})
        else:
            people.print(f"CoordinatorService at {server.address}, epoch {coordinator.epoch}; Ctrl-C ends it")
        await asyncio.Event().wait()
    return Exit.OK


@asynccontextmanager
async def _entered(coordinator: Coordinator, wait: float) -> AsyncIterator[None]:
    """Inside the coordinator, once its fleet is complete; raises DiscoveryFailed after `wait` seconds."""
    ends, told = time.monotonic() + wait, ""
    while True:
        try:
            await coordinator.__aenter__()
            break
        except DiscoveryFailed as error:
            if time.monotonic() >= ends:
                raise
            missing = ", ".join(sorted({sighting.server.service for sighting in error.sightings if not sighting.ok}))
            if missing != told:
                told = missing
                errors.print(f"waiting for {missing}", soft_wrap=True)
            await asyncio.sleep(AGAIN)
    try:
        yield
    finally:
        await coordinator.__aexit__(None, None, None)
