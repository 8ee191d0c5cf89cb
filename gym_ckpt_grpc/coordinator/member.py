"""One participant as the coordinator holds it: its address, its channel, and the identity that is pinned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.coordinator.encoded import EncodedChannel
from gym_ckpt_grpc.coordinator.fleet import Endpoint, Server
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.telemetry import CallObserver, Telemetry
from gymckpt.v1 import participant_pb2_grpc

if TYPE_CHECKING:
    from gymckpt.v1.participant_pb2_grpc import ParticipantServiceAsyncStub


@dataclass(frozen=True, slots=True)
class Member:
    """A participant that was looked at. identity: pinned; every reply is compared with it."""

    server: Server
    address: str
    identity: ParticipantIdentity
    stub: ParticipantServiceAsyncStub

    @property
    def kind(self) -> ParticipantKind:
        return self.identity.kind

    @property
    def required(self) -> bool:
        return self.server.required

    @property
    def name(self) -> str:
        """`kind/service/instance`."""
        return str(self.identity)

    def pinned_to(self, identity: ParticipantIdentity) -> Member:
        """The same address with another process behind it."""
        return replace(self, identity=identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """How channels are opened. See `open_channel`."""

    token: TokenSource | None = None
    allow_insecure: bool = False
    tls: ClientTls | None = None
    observer: CallObserver | None = None
    telemetry: Telemetry | None = None

    def channel(self, address: str, *, dedicated: bool = False) -> grpc.aio.Channel:
        """A channel of the running loop."""
        return open_channel(
            address,
            token=self.token,
            allow_insecure=self.allow_insecure,
            tls=self.tls,
            dedicated=dedicated,
            observer=self.observer,
            telemetry=self.telemetry,
        )


class Connections:
    """The channels of one event loop, one per address, kept until `close`."""

    def __init__(self, credentials: Credentials, *, dedicated: bool = False) -> None:
        self._credentials = credentials
        self._dedicated = dedicated
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to an address; call it inside the running loop."""
        if address not in self._channels:
            self._channels[address] = self._credentials.channel(address, dedicated=self._dedicated)
        return self._channels[address]

    def stub(self, address: str) -> ParticipantServiceAsyncStub:
        return participant_pb2_grpc.ParticipantServiceStub(EncodedChannel.over(self.channel(address)))

    def member(self, endpoint: Endpoint, identity: ParticipantIdentity) -> Member:
        return Member(endpoint.server, endpoint.address, identity, self.stub(endpoint.address))

    async def close(self) -> None:
        """Close every channel; calls under way end."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()


def by_listing_order(members: Iterable[Member]) -> list[Member]:
    """Members by kind, service and instance."""
    order = list(ParticipantKind)
    return sorted(members, key=lambda m: (order.index(m.kind), m.identity.service, m.identity.instance))
