"""What stands beside a minigym server's data plane: its participant, and the way to its inference workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from gym_ckpt_grpc.auth import Role
from gym_ckpt_grpc.capture import GrpcGenerationBackend
from gym_ckpt_grpc.control import ControlPlane, ParticipantServer, StateOwner
from gym_ckpt_grpc.minigym.access import access_as, authenticator_of, tls_of
from gym_ckpt_grpc.minigym.deployment import Deployment, ServerPlan
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity


@asynccontextmanager
async def embedded(owner: StateOwner, plan: Deployment, server: ServerPlan) -> AsyncIterator[ParticipantServer]:
    """Serve the owner's control plane on the server's control port for as long as the block lasts."""
    identity = ParticipantIdentity(owner.kind, server.name)
    plane = ControlPlane(owner, identity, roots=[str(plan.root)])
    async with ParticipantServer(
        plane,
        server.control_address,
        authenticator=authenticator_of(plan, Role.CONTROLLER, Role.OBSERVER),
        tls=tls_of(plan, server.name),
        audit_log=plan.audit_log,
    ) as served:
        yield served


@asynccontextmanager
async def open_backends(plan: Deployment) -> AsyncIterator[Mapping[str, GrpcGenerationBackend]]:
    """The inference workers as a checkpoint asks them, by name; none if generations are not to be cut."""
    async with AsyncExitStack() as stack:
        backends = {}
        for worker in plan.workers() if plan.topology.cuts else ():
            access = access_as("peer", plan)
            backends[worker.name] = GrpcGenerationBackend(worker.name, worker.control_address, **access)
            stack.push_async_callback(backends[worker.name].close)
        yield backends
