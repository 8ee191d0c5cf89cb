"""A policy model server and its inference workers, on real ports in the test's own process.

The owner is driven as a control plane would. A second rig in the same directory is the next life of both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from gym_ckpt_grpc.capture import CaptureLedger, GrpcGenerationBackend
from gym_ckpt_grpc.control import Closing
from gym_ckpt_grpc.integrations import CheckpointMiddleware, answer_refusal
from gym_ckpt_grpc.minigym.event_stream import data_of, split_events
from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker, WorkerConfig
from gym_ckpt_grpc.minigym.peers import PeerFailed, Peers, answer_peer_failure, open_peers
from gym_ckpt_grpc.minigym.policy_calls import PATH, Worker
from gym_ckpt_grpc.minigym.policy_server import PolicyServer
from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.minigym.worker_calls import WorkerCall
from gym_ckpt_grpc.participants import PolicyModelOwner
from gym_ckpt_grpc.protocol import ControlError, EpisodeId
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeScope
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import FakePort, budget, exported, reopen, restore

LIMIT = 20.0
"""Seconds for any one wait."""
WAITING = {"x-gymckpt-waiting": "1"}


@asynccontextmanager
async def served(app: Any, *, lifespan: bool = False) -> AsyncIterator[str]:
    """Serve an ASGI application; the base of its URLs."""
    port = free_ports(1)[0]
    config = uvicorn.Config(
        app,
        host=LOOPBACK,
        port=port,
        log_level="critical",
        lifespan="on" if lifespan else "off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started or serving.done())
    try:
        yield f"http://{LOOPBACK}:{port}"
    finally:
        server.should_exit = True
        await serving


async def until(reached: Callable[[], bool]) -> None:
    """Wait for what only polling can see."""
    async with asyncio.timeout(LIMIT):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass
class PolicyRig:
    """One life of a policy model server and its workers. url: of the server; peers: calls to it."""

    owner: PolicyModelOwner
    port: FakePort
    policy: PolicyServer
    ledger: CaptureLedger | None
    workers: Sequence[InferenceWorker]
    url: str
    peers: Peers
    http: aiohttp.ClientSession

    # ---- what a caller does

    def path(self, episode: EpisodeId | None) -> str:
        prefix = f"/rollout/{episode.capture_key}" if episode else ""
        return f"{self.url}{prefix}{PATH}"

    async def ask(self, episode: EpisodeId | None, **request: Any) -> dict[str, Any]:
        """One whole reply, with its status; of a stream the last chunk, with the joined text."""
        if request.get("stream"):
            return await self._read_stream(episode, request)
        async with self.http.post(self.path(episode), json=request, headers=WAITING) as answer:
            return {"status": answer.status, **await answer.json()}

    async def _read_stream(self, episode: EpisodeId | None, request: dict[str, Any]) -> dict[str, Any]:
        text, last = "", {}
        async with self.http.post(self.path(episode), json=request, headers=WAITING) as answer:
            if answer.content_type != "text/event-stream":
                return {"status": answer.status, **await answer.json()}
            async for each in split_events(answer.content.iter_any()):
                if (data := data_of(each)) is not None:
                    text += data["choices"][0]["delta"].get("content", "")
                    last = data
        return {"status": answer.status, **last, "text": text}

    # ---- what a control plane does

    async def close(self, number: int = 1) -> None:
        """Close admission, and wait until every owed call has its disposition."""
        await self.owner.close_admission(Closing(f"ckpt-{number}", number, budget(LIMIT), ready_within=LIMIT))
        await until(self.owner.is_ready)

    async def export(self, *episodes: EpisodeId) -> list[Record]:
        return await exported(self.owner, EpisodeScope.of(episodes))

    async def open(self) -> None:
        await reopen(self.owner)

    async def restore(self, records: Sequence[Record]) -> None:
        """Install under the next attempts, and open."""
        await restore(self.owner, records)
        await self.open()

    def counts(self, *names: str) -> tuple[int, ...]:
        found = self.owner.report(9).counts
        return tuple(found[name] for name in names)

    # ---- what the workers did

    def calls(self) -> list[WorkerCall]:
        return [call for worker in self.workers for call in worker.calls]

    async def held(self, count: int = 1) -> None:
        """Wait until so many calls stand at a hold."""
        await until(lambda: sum(call.held for call in self.calls()) >= count)


@asynccontextmanager
async def policy_rig(
    directory: Path, *, workers: int = 1, capture: bool = True, impostor: str = ""
) -> AsyncIterator[PolicyRig]:
    """Start everything; one token store and one ledger for all lives in this directory.

    impostor: URL of what answers in place of the workers.
    """
    async with AsyncExitStack() as stack:
        made, addresses, backends = [], [], {}
        for number in range(workers):
            name, control = f"inference-{number}", f"{LOOPBACK}:{free_ports(1)[0]}"
            config = WorkerConfig(
                log=directory / f"{name}.jsonl",
                name=name,
                tick=0.001,  # 0 would spin while calls are held, and starve the thread that makes their cuts durable
                staged=directory / "staged" if capture else None,
                control_address=control if capture else "",
                controls=True,
            )
            worker = InferenceWorker(config)
            url = await stack.enter_async_context(served(worker.app, lifespan=True))
            made.append(worker)
            addresses.append(Worker(name, impostor or url))
            if capture:
                backends[name] = GrpcGenerationBackend(name, control, allow_insecure=True)
                stack.push_async_callback(backends[name].close)
        ledger = CaptureLedger(directory / "ledger") if capture else None
        owner = PolicyModelOwner(ledger=ledger, backends=backends)
        stack.push_async_callback(owner.close)
        port = FakePort(ParticipantKind.POLICY_MODEL)
        owner.attach(port)
        peers = await stack.enter_async_context(open_peers())
        policy = PolicyServer(peers, addresses, owner=owner, ledger=ledger)
        app = policy.build_app()
        app.add_exception_handler(ControlError, answer_refusal)
        app.add_exception_handler(PeerFailed, answer_peer_failure)
        url = await stack.enter_async_context(served(CheckpointMiddleware(app, owner.gate())))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield PolicyRig(owner, port, policy, ledger, made, url, peers, http)
        if owner.admission.closed:
            await reopen(owner)
