"""A minigym without processes: environment, agent and resources of one life, wired in memory, and a scripted model.

A crash is a life that is left as it is, while the next one gets what a checkpoint took of it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.integrations import CheckpointMiddleware, answer_refusal
from gym_ckpt_grpc.minigym.agent_server import AgentServer
from gym_ckpt_grpc.minigym.counter_server import CounterServer
from gym_ckpt_grpc.minigym.environment_server import EnvironmentServer, LegacyRelay
from gym_ckpt_grpc.minigym.event_stream import DONE, event
from gym_ckpt_grpc.minigym.legacy_agent import LegacyAgentServer
from gym_ckpt_grpc.minigym.peers import PeerFailed, Peers, Reply, StreamedReply, answer_peer_failure
from gym_ckpt_grpc.minigym.proof_refinement import ProofRefinementServer
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer, answer, install
from gym_ckpt_grpc.participants import DataPlaneNames, VerifyMode
from gym_ckpt_grpc.protocol import ControlError
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import Answer, Call, FakePort, R, call, close, exported, reopen, restore, spin

Protocol = Literal["native", "legacy", "proof"]
GATE = {"x-gymckpt-gate": "policy_model/scripted"}
LIMIT = 10.0
"""Seconds for any one wait."""


@dataclass
class Hold:
    """A call that is held: `reached` says that it is, and it goes on when `go` is set."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        async with asyncio.timeout(LIMIT):
            await self.reached.wait()


class LocalPeers(Peers):
    """Calls between applications. made: those that were sent, as `server/path`, in order.

    lost: names of calls whose reply never arrives.
    """

    def __init__(self, apps: dict[str, Any]) -> None:
        self.apps = apps
        self.made: list[str] = []
        self.lost: set[str] = set()
        self._holds: dict[tuple[str, int, bool], Hold] = {}
        self._begun: Counter[str] = Counter()

    def hold(self, name: str, number: int = 1, *, after: bool = False) -> Hold:
        """Hold the call of this name and number, from 1: before it is sent, or after, with its reply on the way."""
        return self._holds.setdefault((name, number, after), Hold())

    async def request(
        self, method: str, url: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Reply:
        answered = await self._exchange(method, url, body, headers)
        return Reply(answered.status, answered.json() if answered.body else None, answered.headers)

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[StreamedReply]:
        answered = await self._exchange(method, url, body, headers)

        async def chunks() -> AsyncIterator[bytes]:
            for piece in answered.pieces:
                yield piece

        yield StreamedReply(answered.status, answered.headers, chunks())

    async def _exchange(self, method: str, url: str, body: Any, headers: Mapping[str, str] | None) -> Answer:
        server, _, rest = url.removeprefix("http://").partition("/")
        name = server + DataPlaneNames().split(f"/{rest}")[1]
        self._begun[name] += 1
        number = self._begun[name]
        await self._stop(name, number, after=False)
        if method == "POST":
            self.made.append(name)
        asked = Call(self.apps[server], method, f"/{rest}", headers or {}, orjson.dumps(body), 1)
        await asyncio.wait({asked.task})
        asked.task.result()
        await self._stop(name, number, after=True)
        if name in self.lost:
            raise ConnectionError(f"the reply of {name} was lost")
        return asked.answer

    async def _stop(self, name: str, number: int, *, after: bool) -> None:
        hold = self._holds.get((name, number, after))
        if hold is not None:
            hold.reached.set()
            await hold.go.wait()


class Model:
    """A policy server whose reply is a pure function of the request. asked: messages of each call that it answered."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    def build_app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_api_route("/rollout/{key}/v1/chat/completions", self._reply, methods=["POST"])
        app.add_api_route("/health", self._health, methods=["GET"])
        return app

    async def _health(self) -> Any:
        return self._answer({})

    async def _reply(self, request: Request) -> Any:
        body = await request.json()
        self.asked.append(body["messages"])
        noise = hashlib.sha256(orjson.dumps([body["messages"], body["seed"]])).hexdigest()
        message: dict[str, Any] = {"role": "assistant", "content": f"thought {noise[:8]}"}
        if body["tools"]:
            arguments = orjson.dumps({"by": 1 + int(noise, 16) % 5}).decode()
            message["tool_calls"] = [{"id": noise[:8], "function": {"name": "increment", "arguments": arguments}}]
        if body.get("stream"):
            pieces = [{"content": word} for word in message["content"].partition(" ")]
            pieces.append({"tool_calls": [{"index": 0, **each} for each in message.get("tool_calls", [])]})
            events = [event({"choices": [{"delta": each}]}) for each in pieces]
            return Response(b"".join([*events, DONE]), media_type="text/event-stream", headers=GATE)
        return self._answer({"choices": [{"message": message}]})

    @staticmethod
    def _answer(body: Any) -> Any:
        made = answer(body)
        made.headers.update(GATE)
        return made


class Life:
    """The servers of one life. owners: of the participants, by name."""

    def __init__(
        self,
        protocol: Protocol = "native",
        model: Model | None = None,
        *,
        resources: Callable[[], ResourcesServer] = CounterServer,
        verify: VerifyMode | None = None,
    ) -> None:
        self.model = model or Model()
        self.apps: dict[str, Any] = {}
        self.peers = LocalPeers(self.apps)
        self.owners: dict[str, Any] = {}
        self.ports: dict[str, FakePort] = {}
        server = resources()
        self.kind = server.name
        install(server, verify=verify)
        self._gated("resources", server, ParticipantKind.RESOURCES)
        self.agent = self._agent(protocol, {server.name: "http://resources"})
        self._gated("agent", self.agent, ParticipantKind.AGENT)
        self.apps["policy"] = self.model.build_app()
        if protocol == "native":
            environment = EnvironmentServer(self.peers, "http://agent", {server.name: "http://resources"})
            self._gated("environment", environment, ParticipantKind.ENVIRONMENT)
        else:
            self.apps["environment"] = LegacyRelay(self.peers, "http://agent").build_app()

    def _agent(self, protocol: Protocol, resources: Mapping[str, str]) -> Any:
        if protocol == "native":
            return AgentServer(self.peers, "http://policy", resources)
        if protocol == "legacy":
            return LegacyAgentServer(self.peers, "http://policy", "http://agent", resources)
        return ProofRefinementServer(self.peers, "http://policy", resources)

    def _gated(self, name: str, server: Any, kind: ParticipantKind) -> None:
        app = server.build_app()
        app.add_exception_handler(ControlError, answer_refusal)
        app.add_exception_handler(PeerFailed, answer_peer_failure)
        self.apps[name] = CheckpointMiddleware(app, server.owner.gate())
        self.owners[name] = server.owner
        self.ports[name] = FakePort(kind)
        server.owner.attach(self.ports[name])

    def task(self, setup: Mapping[str, int], turns: int) -> dict[str, Any]:
        return {"kind": self.kind, "prompt": "go on", "seed": 7, "turns": turns, "setup": dict(setup)}

    async def run(self, task: Mapping[str, Any], episode: EpisodeId = R) -> Call:
        """Send a `/run`, as a trainer does."""
        if hasattr(self.agent, "policy"):
            assert await self.agent.policy.probe()
        return call(self.apps["environment"], f"/rollout/{episode}/run", task)

    async def close(self) -> None:
        """Close every participant, callers before callees, until the calls under way have come to rest."""
        for name in reversed(self.owners):
            await close(self.owners[name])
            await spin(20)

    async def taken(self) -> dict[str, list[Record]]:
        """The records of every participant, all of which are ready."""
        return {name: await exported(owner) for name, owner in self.owners.items()}

    async def reopen(self) -> None:
        for owner in self.owners.values():
            await reopen(owner)

    async def restore(self, records: Mapping[str, list[Record]]) -> None:
        for name, owner in self.owners.items():
            await restore(owner, records[name])
        await self.reopen()

    async def bury(self, run: Call, *holds: Hold) -> None:
        """Let what this life left under way end, once nothing looks at it any more."""
        for hold in holds:
            hold.go.set()
        await self.reopen()
        await ended(run)

    def idle(self) -> bool:
        """Whether no participant holds anything."""
        live = ("sessions", "episodes", "inflight")
        counts = [owner.report(9).counts for owner in self.owners.values()]
        return not any(each.get(name) for each in counts for name in live)


async def ended(run: Call) -> Answer:
    async with asyncio.timeout(LIMIT):
        return await run.end()
