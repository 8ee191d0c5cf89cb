"""A participant beside a minigym server's data plane: started and stopped with its lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gym_ckpt_grpc.auth import Authenticator, Role, TokenFile
from gym_ckpt_grpc.control import ControlPlane, ParticipantServer, StateOwner
from gym_ckpt_grpc.minigym.deployment import Deployment, ServerPlan
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity


@asynccontextmanager
async def embedded(owner: StateOwner, plan: Deployment, server: ServerPlan) -> AsyncIterator[ParticipantServer]:
    """Serve the owner's control plane on the server's control port for as long as the block lasts."""
    authenticator = Authenticator(
        {
            Role.CONTROLLER: TokenFile(plan.token_file("controller")),
            Role.OBSERVER: TokenFile(plan.token_file("observer")),
        }
    )
    identity = ParticipantIdentity(owner.kind, server.role)
    plane = ControlPlane(owner, identity, roots=[str(plan.root)])
    async with ParticipantServer(plane, server.control_address, authenticator=authenticator) as served:
        yield served
