"""One server process of minigym: `python -m gym_ckpt_grpc.minigym.serve NAME --plan FILE --life N`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from gym_ckpt_grpc.auth import Role as CallerRole
from gym_ckpt_grpc.auth import TokenFile
from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.control import StateOwner
from gym_ckpt_grpc.integrations import CheckpointMiddleware, RolloutPrefix, answer_refusal
from gym_ckpt_grpc.minigym.access import authenticator_of, tls_of
from gym_ckpt_grpc.minigym.deployment import Deployment, ServerPlan
from gym_ckpt_grpc.minigym.embed import embedded, open_backends
from gym_ckpt_grpc.minigym.held_routes import HeldRoutes
from gym_ckpt_grpc.minigym.peers import PeerFailed, Peers, answer_peer_failure, open_peers
from gym_ckpt_grpc.minigym.ports import LOOPBACK
from gym_ckpt_grpc.minigym.resources_server import install
from gym_ckpt_grpc.minigym.topology import Role
from gym_ckpt_grpc.participants import Gate, PolicyModelOwner
from gym_ckpt_grpc.protocol import ControlError
from gym_ckpt_grpc.telemetry import exporting, unwinding_sigterm

PROBE_PAUSE = 0.05
log = logging.getLogger("gym_ckpt_grpc.minigym")


@dataclass(frozen=True, slots=True)
class Serving:
    """What a builder is given: the plan, which of its servers this is, its life from 1, and calls to the others."""

    plan: Deployment
    server: ServerPlan
    life: int
    peers: Peers


class GatedOwner(StateOwner, Protocol):
    """An owner that makes the gate of its server."""

    def gate(self) -> Gate: ...


@dataclass(frozen=True, slots=True)
class Served:
    """What a builder gives: an application and, of a participant, the owner of its state and the gate before it.

    prefixed: calls of a rollout reach it under the rollout prefix, which its routes do not know.
    """

    app: FastAPI
    owner: StateOwner | None = None
    gate: Gate | None = None
    prefixed: bool = True


def _of(app: FastAPI, owner: GatedOwner | None) -> Served:
    """A participant, or with checkpointing off its routes alone."""
    return Served(app, owner, owner.gate() if owner is not None else None)


Builder = Callable[[Serving], AbstractAsyncContextManager[Served]]

# ---- a builder for each role: an async context manager that imports what its role needs, and no more


@asynccontextmanager
async def _environment(serving: Serving) -> AsyncIterator[Served]:
    plan = serving.plan
    if plan.topology.protocol != "native":
        from gym_ckpt_grpc.minigym.environment_server import LegacyRelay

        yield Served(LegacyRelay(serving.peers, plan.server("agent").url).build_app(), prefixed=False)
        return
    from gym_ckpt_grpc.minigym.environment_server import EnvironmentServer

    agent_url, on = plan.server("agent").url, plan.topology.checkpointing
    environment = EnvironmentServer(serving.peers, agent_url, plan.resources(), checkpointing=on)
    yield _of(environment.build_app(), environment.owner if on else None)


@asynccontextmanager
async def _agent(serving: Serving) -> AsyncIterator[Served]:
    plan, peers = serving.plan, serving.peers
    policy_url = plan.server("policy_model").url
    if plan.topology.protocol == "proof":
        from gym_ckpt_grpc.minigym.proof_refinement import ProofRefinementServer

        prover = ProofRefinementServer(peers, policy_url, plan.resources())
        yield _of(prover.build_app(), prover.owner)
        return
    from gym_ckpt_grpc.minigym.agent_server import AgentServer
    from gym_ckpt_grpc.minigym.legacy_agent import LegacyAgentServer

    on = plan.topology.checkpointing
    agent: AgentServer | LegacyAgentServer = AgentServer(peers, policy_url, plan.resources(), checkpointing=on)
    if plan.topology.protocol == "legacy":
        agent = LegacyAgentServer(peers, policy_url, serving.server.url, plan.resources(), checkpointing=on)
    if not on:
        yield Served(agent.build_app())
        return
    await _gate_seen(agent)
    yield _of(agent.build_app(), agent.owner)


@asynccontextmanager
async def _policy_model(serving: Serving) -> AsyncIterator[Served]:
    from gym_ckpt_grpc.minigym.policy_calls import Worker
    from gym_ckpt_grpc.minigym.policy_server import PolicyServer

    plan = serving.plan
    workers = [Worker(worker.name, worker.url) for worker in plan.workers()]
    if not plan.topology.checkpointing:
        yield Served(PolicyServer(serving.peers, workers, owner=None).build_app())
        return
    ledger = CaptureLedger(plan.ledger) if plan.topology.capture else None
    async with open_backends(plan) as backends:
        owner = PolicyModelOwner(ledger=ledger, backends=backends)
        trainer = TokenFile(plan.token_file("controller"))
        policy = PolicyServer(serving.peers, workers, owner=owner, ledger=ledger, ledger_token=trainer)
        try:
            yield _of(policy.build_app(), owner)
        finally:
            await owner.close()


@asynccontextmanager
async def _resources(serving: Serving) -> AsyncIterator[Served]:
    module, _, name = RESOURCES_SERVERS[serving.server.role].partition(":")
    server = getattr(importlib.import_module(f"gym_ckpt_grpc.minigym.{module}"), name)()
    yield _of(server.build_app(), install(server) if serving.plan.topology.checkpointing else None)


@asynccontextmanager
async def _judge(serving: Serving) -> AsyncIterator[Served]:
    from gym_ckpt_grpc.minigym.judge_server import JudgeServer

    yield Served(JudgeServer(serving.peers, serving.plan.server("policy_model").url).build_app())


@asynccontextmanager
async def _weather(serving: Serving) -> AsyncIterator[Served]:
    from gym_ckpt_grpc.minigym.judge_server import HttpJudge
    from gym_ckpt_grpc.minigym.weather_server import WeatherServer

    judged = serving.plan.topology.judge
    server = WeatherServer(HttpJudge(serving.peers, serving.plan.server("judge").url) if judged else None)
    yield _of(server.build_app(), install(server) if serving.plan.topology.checkpointing else None)


@asynccontextmanager
async def _inference(serving: Serving) -> AsyncIterator[Served]:
    from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker, WorkerConfig

    plan, server = serving.plan, serving.server
    capture = plan.topology.capture
    config = WorkerConfig(
        log=plan.inference_log,
        life=serving.life,
        tick=plan.tick,
        name=server.name,
        staged=plan.staged if capture else None,
        control_address=server.control_address if capture else "",
        authenticator=authenticator_of(plan, CallerRole.PEER),
        tls=tls_of(plan, server.name),
        audit_log=plan.audit_log,
        controls=plan.topology.controls,
    )
    yield Served(InferenceWorker(config).app)


RESOURCES_SERVERS: dict[Role, str] = {
    "counter": "counter_server:CounterServer",
    "blackjack": "blackjack_server:BlackjackServer",
    "office": "office_server:OfficeServer",
    "inbox": "inbox_server:InboxServer",
    "tally": "tally_server:TallyServer",
    "proofs": "proof_checker:ProofChecker",
    "frozen_lake": "frozen_lake_server:FrozenLakeServer",
}
"""Role -> module and class of a resources server, made without arguments."""

BUILDERS: dict[Role, Builder] = {
    "environment": _environment,
    "agent": _agent,
    "policy_model": _policy_model,
    "inference": _inference,
    "judge": _judge,
    "weather": _weather,
    **dict.fromkeys(RESOURCES_SERVERS, _resources),
}


@asynccontextmanager
async def _application(serving: Serving) -> AsyncIterator[Any]:
    """What uvicorn serves: the routes; of a participant, its gate in front and its control plane beside them."""
    async with BUILDERS[serving.server.role](serving) as served:
        app = served.app
        app.add_exception_handler(ControlError, answer_refusal)
        app.add_exception_handler(PeerFailed, answer_peer_failure)
        if served.owner is None or served.gate is None:
            yield RolloutPrefix(app) if served.prefixed else app
            return
        async with embedded(served.owner, serving.plan, serving.server):
            if not serving.plan.topology.controls:
                yield CheckpointMiddleware(app, served.gate)
                return
            held = HeldRoutes()
            yield held.outer(CheckpointMiddleware(held.inner(app), served.gate))


async def _gate_seen(agent: Any) -> None:
    """Wait for the policy server's gate: before an agent has seen it, its calls hold up a checkpoint as RUNNING."""
    while True:
        with contextlib.suppress(Exception):  # it may not be up yet
            if await agent.policy.probe():
                return
        await asyncio.sleep(PROBE_PAUSE)


async def serve(name: str, plan: Deployment, life: int) -> None:
    """Serve one server of a plan until SIGTERM."""
    server = plan.server(name)
    async with open_peers() as peers, _application(Serving(plan, server, life, peers)) as app:
        config = uvicorn.Config(
            app,
            host=LOOPBACK,
            port=server.port,
            log_level="warning",
            access_log=False,
            lifespan="off" if server.kind else "auto",
            timeout_graceful_shutdown=1,
        )
        await uvicorn.Server(config).serve()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="minigym.serve")
    parser.add_argument("name")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--life", type=int, default=1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Its state first: the control plane has ended when telemetry is flushed, and the signal ends what is left.
    with unwinding_sigterm(), exporting(arguments.name):
        asyncio.run(serve(arguments.name, Deployment.load(arguments.plan), arguments.life))


if __name__ == "__main__":
    main()
