"""One server process of minigym: `python -m gym_ckpt_grpc.minigym.serve ROLE --plan FILE --life N`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from gym_ckpt_grpc.control import StateOwner
from gym_ckpt_grpc.integrations import CheckpointMiddleware, answer_refusal
from gym_ckpt_grpc.minigym.deployment import ROLES, Deployment, Role
from gym_ckpt_grpc.minigym.embed import embedded
from gym_ckpt_grpc.minigym.peers import PeerFailed, Peers, answer_peer_failure, open_peers
from gym_ckpt_grpc.minigym.ports import LOOPBACK
from gym_ckpt_grpc.participants import (
    PolicyModelOwner,
    ResourcesOwner,
    ResourcesSettings,
    declared_mode,
    declared_verify,
)
from gym_ckpt_grpc.protocol import ControlError

PROBE_PAUSE = 0.2
log = logging.getLogger("gym_ckpt_grpc.minigym")


@asynccontextmanager
async def _application(role: Role, plan: Deployment, life: int) -> AsyncIterator[Any]:
    """What uvicorn serves for a role, with everything that it needs open."""
    if role == "inference":
        from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker, WorkerConfig

        yield InferenceWorker(WorkerConfig(plan.inference_log, life, plan.tick)).app
        return
    async with open_peers() as peers, _participant(role, plan, peers) as (app, owner, gate):
        app.add_exception_handler(ControlError, answer_refusal)
        app.add_exception_handler(PeerFailed, answer_peer_failure)
        async with embedded(owner, plan, plan.server(role)):
            yield CheckpointMiddleware(app, gate)


@asynccontextmanager
async def _participant(role: Role, plan: Deployment, peers: Peers) -> AsyncIterator[tuple[Any, StateOwner, Any]]:
    """(application, owner of its state, gate) of a participant. Imports what its role needs and no more."""
    if role == "environment":
        from gym_ckpt_grpc.minigym.environment_server import EnvironmentServer

        resources = {kind: plan.server(kind).url for kind in ("counter", "blackjack")}
        environment = EnvironmentServer(peers, plan.server("agent").url, resources)
        yield environment.build_app(), environment.owner, environment.owner.gate()
    elif role == "agent":
        from gym_ckpt_grpc.minigym.agent_server import AgentServer

        agent = AgentServer(peers, plan.server("policy_model").url)
        async with _until_gated(agent):
            yield agent.build_app(), agent.owner, agent.owner.gate()
    elif role == "policy_model":
        from gym_ckpt_grpc.minigym.policy_server import PolicyServer

        owner = PolicyModelOwner()
        yield PolicyServer(peers, plan.server("inference").url).build_app(), owner, owner.gate()
    else:
        server = _resources_server(role)
        mode, verify = declared_mode(type(server)), declared_verify(type(server))
        owner_of_sessions = ResourcesOwner(server, ResourcesSettings(mode=mode, verify=verify))
        yield server.build_app(), owner_of_sessions, owner_of_sessions.gate()


def _resources_server(role: Role) -> Any:
    if role == "counter":
        from gym_ckpt_grpc.minigym.counter_server import CounterServer

        return CounterServer()
    from gym_ckpt_grpc.minigym.blackjack_server import BlackjackServer

    return BlackjackServer()


@asynccontextmanager
async def _until_gated(agent: Any) -> AsyncIterator[None]:
    """See the policy server's gate early: before that a waiting call would hold up a checkpoint as RUNNING."""

    async def probe() -> None:
        while True:
            with contextlib.suppress(Exception):  # it may not be up yet
                if await agent.policy.probe():
                    return
            await asyncio.sleep(PROBE_PAUSE)

    probing = asyncio.create_task(probe(), name="probe the policy gate")
    try:
        yield
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)


async def serve(role: Role, plan: Deployment, life: int) -> None:
    """Serve a role until SIGTERM."""
    async with _application(role, plan, life) as app:
        port = plan.server(role).port
        config = uvicorn.Config(
            app,
            host=LOOPBACK,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="auto" if role == "inference" else "off",
            timeout_graceful_shutdown=1,
        )
        await uvicorn.Server(config).serve()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="minigym.serve")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--life", type=int, default=1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(serve(arguments.role, Deployment.load(arguments.plan), arguments.life))


if __name__ == "__main__":
    main()
