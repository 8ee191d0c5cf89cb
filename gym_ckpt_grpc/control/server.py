"""Serving a participant beside a data plane, in the same process and event loop."""

from __future__ import annotations

import os

import grpc

from gym_ckpt_grpc.auth import Authenticator, ServerTls
from gym_ckpt_grpc.control.control_plane import ControlPlane
from gym_ckpt_grpc.control.servicer import ParticipantServicer
from gym_ckpt_grpc.control.serving import HostedService, ServiceHost
from gym_ckpt_grpc.telemetry import CallObserver
from gymckpt.v1 import participant_pb2, participant_pb2_grpc

SERVICE = participant_pb2.DESCRIPTOR.services_by_name["ParticipantService"].full_name


class ParticipantServer(HostedService):
    """The control server of one participant.

    address: `host:port` (port 0 picks one; read `address` after the start) or `unix:path`. authenticator: None
    lets every local caller do everything, and is refused on an address that is not local. allow_insecure: needed
    for plain text beyond this host. tls: encrypt, and with a client_ca know clients by their certificates. audit_log:
    file that gets a line for each mutating call; what cannot be opened is a UsageError at the start.
    """

    def __init__(
        self,
        plane: ControlPlane,
        address: str = "127.0.0.1:0",
        *,
        authenticator: Authenticator | None = None,
        allow_insecure: bool = False,
        tls: ServerTls | None = None,
        audit_log: str | os.PathLike[str] | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        self.plane = plane
        host = ServiceHost(
            SERVICE,
            address,
            identity=plane.identity,
            authenticator=authenticator,
            allow_insecure=allow_insecure,
            tls=tls,
            audit_log=audit_log,
            observer=observer,
            telemetry=plane.telemetry,
        )
        super().__init__(host)
        self.max_calls = plane.settings.max_concurrent_calls or None

    def _add_servicer(self, server: grpc.aio.Server) -> None:
        participant_pb2_grpc.add_ParticipantServiceServicer_to_server(ParticipantServicer(self.plane), server)

    async def stop(self, grace: float = 1.0) -> None:
        """Stop serving: calls under way have `grace` seconds. Admission stays as it is."""
        await super().stop(grace)
        await self.plane.close()
