"""Serving a coordinator, for trainers in any language.

async with Coordinator(fleet, root=root) as coordinator, CoordinatorServer(coordinator, "127.0.0.1:7100"):
    ...
"""

from __future__ import annotations

import os

import grpc

from gym_ckpt_grpc.auth import Authenticator, ServerTls
from gym_ckpt_grpc.control.serving import HostedService, ServiceHost
from gym_ckpt_grpc.coordinator.coordinator import Coordinator
from gym_ckpt_grpc.coordinator.deadlines import positive_seconds
from gym_ckpt_grpc.coordinator.served.servicer import CoordinatorServicer
from gym_ckpt_grpc.coordinator.served.sessions import SESSION_TTL, Sessions
from gym_ckpt_grpc.telemetry import CallObserver
from gymckpt.v1 import coordinator_pb2, coordinator_pb2_grpc

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name


class CoordinatorServer(HostedService):
    """CoordinatorService over an entered coordinator.

    address: `host:port` (port 0 picks one; read `address` after the start) or `unix:path`. authenticator: None lets
    every local caller do everything, and is refused on an address that is not local. allow_insecure: needed for plain
    text beyond this host. tls, audit_log: see ParticipantServer. session_ttl: seconds that a checkpoint stays open
    beyond its client's last call.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        address: str = "127.0.0.1:0",
        *,
        authenticator: Authenticator | None = None,
        allow_insecure: bool = False,
        tls: ServerTls | None = None,
        audit_log: str | os.PathLike[str] | None = None,
        observer: CallObserver | None = None,
        session_ttl: float = SESSION_TTL,
    ) -> None:
        self.coordinator = coordinator
        host = ServiceHost(
            SERVICE,
            address,
            identity=None,
            authenticator=authenticator,
            allow_insecure=allow_insecure,
            tls=tls,
            audit_log=audit_log,
            observer=observer,
            telemetry=coordinator.telemetry,
        )
        super().__init__(host)
        self._sessions = Sessions(coordinator, positive_seconds("session_ttl", session_ttl))

    def _add_servicer(self, server: grpc.aio.Server) -> None:
        servicer = CoordinatorServicer(self.coordinator, self._sessions)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)

    async def stop(self, grace: float = 1.0) -> None:
        """Abort what is open and unpublished, then stop serving: other calls have `grace` seconds."""
        await self._sessions.close()
        await super().stop(grace)
