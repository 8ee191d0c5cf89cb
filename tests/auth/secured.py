"""A served participant with TLS, and clients of it by name of their certificate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gym_ckpt_grpc.auth import Authenticator, ClientTls, NamedRoles, Role, ServerTls, TokenSource
from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.minigym.authority import Authority
from gymckpt.v1 import participant_pb2_grpc
from tests.control.scripted import Participant

ROLES_BY_NAME = {role: [f"URI:spiffe://gym.example/{role}"] for role in Role}
STATUS = "/gymckpt.v1.ParticipantService/GetStatus"


@dataclass(frozen=True)
class Pki:
    """Files of an authority."""

    authority: Authority

    @property
    def ca(self) -> Path:
        return self.authority.file

    def pair(self, name: str) -> tuple[Path, Path]:
        return self.ca.with_name(f"{name}.pem"), self.ca.with_name(f"{name}.key")

    def server(self, *, clients: bool = True) -> ServerTls:
        return ServerTls(*self.pair("server"), client_ca=self.ca if clients else None)

    def client(self, name: str = "", *, ca: Path | None = None, server_name: str = "") -> ClientTls:
        certificate, key = self.pair(name) if name else (None, None)
        return ClientTls(ca or self.ca, certificate=certificate, key=key, server_name=server_name)


def by_certificates(tokens: dict[Role, TokenSource] | None = None, **options: Any) -> Authenticator:
    """Roles of the fixture's certificates, and of tokens."""
    return Authenticator(tokens, certificates=NamedRoles(ROLES_BY_NAME), **options)


class Secured(Participant):
    """A participant behind TLS, whose own stub is the controller's."""

    def __init__(self, root: Path, pki: Pki, *, clients: bool = True, **serving: Any) -> None:
        root.mkdir(exist_ok=True)
        self.tls = serving.pop("tls", None) or pki.server(clients=clients)
        self.pki = pki
        super().__init__(root, tls=self.tls, **serving)

    async def __aenter__(self) -> Secured:
        await self.server.start()
        name = "controller" if self.tls.asks_clients else ""
        address = self.server.address.replace("0.0.0.0", "127.0.0.1")
        self.channel = open_channel(address, token=self.token, tls=self.pki.client(name))
        self.stub: Any = participant_pb2_grpc.ParticipantServiceStub(self.channel)
        return self

    @asynccontextmanager
    async def as_(self, name: str, **options: Any) -> AsyncIterator[Any]:
        """A channel with this certificate."""
        channel = open_channel(self.server.address, tls=self.pki.client(name), dedicated=True, **options)
        async with channel:
            yield channel


async def raw(channel: grpc.aio.Channel, method: str, body: bytes = b"", metadata: Sequence[Any] = ()) -> Any:
    """Call any method with raw bytes; None if it succeeded, else how it failed."""
    multi: Any = channel.unary_stream(method)
    calling = multi(body, metadata=metadata, timeout=10)
    try:
        async for _ in calling:
            return None
    except grpc.aio.AioRpcError as failure:
        return failure
    return None


async def code_of(channel: grpc.aio.Channel, method: str, body: bytes = b"", metadata: Sequence[Any] = ()) -> str:
    failure = await raw(channel, method, body, metadata)
    return "OK" if failure is None else str(failure.code().name)
