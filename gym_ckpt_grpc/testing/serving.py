"""Serving any state owner for the length of a test."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gym_ckpt_grpc.auth import Authenticator, Role, TokenSource, TokenValue
from gym_ckpt_grpc.control import (
    Clock,
    ControlPlane,
    ControlSettings,
    ParticipantServer,
    StateOwner,
    open_channel,
)
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.storage import FileLayer, path_to_uri
from gym_ckpt_grpc.telemetry import Telemetry
from gym_ckpt_grpc.testing.client import ParticipantClient

QUICK = ControlSettings(watch_interval=0.02, status_interval=0.02)
"""Settings that let a test notice things early."""


@dataclass(frozen=True, slots=True)
class Served:
    """A participant being served. client: calls it with the controller's token, at epoch 1."""

    owner: StateOwner
    plane: ControlPlane
    server: ParticipantServer
    channel: grpc.aio.Channel
    client: ParticipantClient

    @property
    def address(self) -> str:
        """Where it is served: `host:port` or `unix:path`."""
        return self.server.address

    @property
    def identity(self) -> ParticipantIdentity:
        """Who it is; its incarnation is new for each `serve`."""
        return self.plane.identity


def _source(token: str | TokenSource | None) -> TokenSource | None:
    return TokenValue(token) if isinstance(token, str) else token


def _authenticator(controller: TokenSource | None, observer: TokenSource | None) -> Authenticator | None:
    tokens = {Role.CONTROLLER: controller, Role.OBSERVER: observer}
    given = {role: source for role, source in tokens.items() if source is not None}
    if observer is not None and controller is None:
        raise UsageError("an observer's token without a controller's would let nobody change anything")
    return Authenticator(given) if given else None


@asynccontextmanager
async def serve(
    owner: StateOwner,
    *,
    service: str = "test",
    instance: str = "0",
    roots: Sequence[str | Path] = (),
    token: str | TokenSource | None = None,
    observer_token: str | TokenSource | None = None,
    address: str = "127.0.0.1:0",
    settings: ControlSettings = QUICK,
    clock: Clock = time.monotonic,
    files: FileLayer | None = None,
    telemetry: Telemetry | None = None,
    **serving: Any,
) -> AsyncIterator[Served]:
    """Serve an owner on loopback, or on `unix:path`, with a client connected to it.

    roots: directories or `file://` URIs that Commit and Restore may use; the client's storage URIs lie under the
    first one. token, observer_token: asked for if given. telemetry: the participant's. `serving` goes to
    ParticipantServer. Every step that an owner holds up must be let go before the block ends.
    """
    uris = [path_to_uri(str(root)) if isinstance(root, Path) else root for root in roots]
    identity = ParticipantIdentity(owner.kind, service, instance)
    plane = ControlPlane(owner, identity, roots=uris, settings=settings, clock=clock, files=files, telemetry=telemetry)
    controller = _source(token)
    authenticator = _authenticator(controller, _source(observer_token))
    server = ParticipantServer(plane, address, authenticator=authenticator, **serving)
    await server.start()
    try:
        channel = open_channel(server.address, token=controller)
        async with channel:
            yield Served(owner, plane, server, channel, ParticipantClient(channel, root=uris[0] if uris else ""))
    finally:
        await server.stop(0)
