"""What the tests of environment servers share: a server whose protocol is the test's, its network and its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx  # type: ignore[import-not-found, unused-ignore]  # it comes with the framework
import nemo_gym.server_utils
import orjson
import pytest
from aiohttp import web
from nemo_gym.base_environment_server import BaseEnvironmentServer, BaseEnvironmentServerConfig, CleanupContext
from nemo_gym.config_types import AggregateMetrics
from nemo_gym.episode_types import BaseEpisodeRequest, BaseEpisodeResponse

from gym_ckpt_grpc.integrations.nemo_gym import Options, checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.environment import EnvironmentParticipant
from gym_ckpt_grpc.integrations.nemo_gym.participant import found
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from tests.nemo_gym.servers import build, client_of
from tests.participants.fakes import FakePort, close, exported, reopen, spin

R0 = EpisodeId("7-0")
R1 = R0.next()
CONFIG = {
    "tools": {"resources_servers": {"any": {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1}}},
}

Protocol = Callable[["Scripted", CleanupContext], Awaitable[Any]]


class Scripted(BaseEnvironmentServer[Any, Any]):  # type: ignore[misc]
    """An environment whose protocol is the test's."""

    config: BaseEnvironmentServerConfig
    request_model = BaseEpisodeRequest[dict[str, Any]]
    response_model = BaseEpisodeResponse[dict[str, Any]]
    protocol: Any = None

    async def run(self, request: Any, cleanup: CleanupContext) -> Any:
        result = await self.protocol(self, cleanup)
        return {"episode_id": request.episode_id, "task_id": request.task.task_id, "result": result}

    async def call(self, path: str, **body: Any) -> Any:
        """Call another server, as protocols do."""
        response = await self.server_client.post(server_name="tools", url_path=path, json=body)
        response.raise_for_status()
        return orjson.loads(await response.read())

    async def aggregate_metrics(self, body: Any) -> AggregateMetrics:
        return AggregateMetrics()


class Network:
    """The other servers. seen: (path, body) of every call. replies: by the end of the path; else an empty object."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.replies: dict[str, Callable[[Any], Awaitable[tuple[int, Any]]]] = {}

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append((request.path, body))
        for end, reply in self.replies.items():
            if request.path.endswith(end):
                status, content = await reply(body)
                return web.Response(status=status, body=orjson.dumps(content), content_type="application/json")
        return web.json_response({})

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    """Served on loopback, as the instance `tools`; the framework's client is of this test's loop."""
    made = Network()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    CONFIG["tools"]["resources_servers"]["any"]["port"] = runner.addresses[0][1]
    nemo_gym.server_utils._GLOBAL_AIOHTTP_CLIENT = None
    yield made
    client = nemo_gym.server_utils._GLOBAL_AIOHTTP_CLIENT
    nemo_gym.server_utils._GLOBAL_AIOHTTP_CLIENT = None
    if client is not None:
        await client.close()
    await runner.cleanup()


def options_of(mode: str | None = "exported") -> Options:
    return Options(instance="turn", kind="environment", root="/nowhere", control="127.0.0.1:0", mode=mode)


class Environment:
    """A server as a participant, with its owner on a port of the test."""

    def __init__(self, protocol: Protocol, *, mode: str | None = "exported", **limits: Any) -> None:
        limits = {"cleanup_timeout_seconds": 60, **limits}
        self.server = build(checkpointed(Scripted, options_of(mode)), name="turn", config=CONFIG, **limits)
        self.server.protocol = protocol
        self.app = self.server.setup_webserver()
        self.participant: EnvironmentParticipant = found(self.server)
        self.owner = self.participant.owner
        self.port = FakePort(ParticipantKind.ENVIRONMENT)
        self.owner.attach(self.port)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with client_of(self.app) as http:
            yield Client(http)


class Client:
    """Sends typed rows."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    def start(self, episode: EpisodeId, task: Mapping[str, Any] | None = None) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.run(episode, task))

    async def run(self, episode: EpisodeId, task: Mapping[str, Any] | None = None) -> httpx.Response:
        response: httpx.Response = await self.http.post("/run", json=row(episode, task))
        return response


def row(episode: EpisodeId, task: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A typed row."""
    return {
        "episode_id": {"rollout_id": episode.rollout_id, "attempt": episode.attempt},
        "task": {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": dict(task or {"q": 1})},
    }


class Steps:
    """A protocol of three calls, which can be stopped in the second; counts its cleanups."""

    def __init__(self) -> None:
        self.cleaned = 0
        self.inside = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, server: Scripted, cleanup: CleanupContext) -> Any:
        async def clean() -> None:
            await server.call("/close_session")
            self.cleaned += 1

        cleanup.register_cleanup("session", clean)
        await server.call("/seed_session")
        told = await server.call("/tool", n=1)
        last = await server.call("/verify", told=told)
        return {"told": told, "verified": last}

    async def wait(self, body: Any) -> tuple[int, Any]:
        """A reply of the network that waits for the test."""
        self.inside.set()
        await self.go.wait()
        return 200, {"n": body.get("n")}


class Later:
    """The loop's clock, moved by hand on top of its own pace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._offset, real = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self._offset)

    async def pass_by(self, seconds: float) -> None:
        self._offset += seconds
        await spin(20)


@pytest.fixture
async def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    return Later(monkeypatch)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for is in this loop, behind real sockets
            await asyncio.sleep(0)


async def cut_behind_a_tool_call(network: Network) -> list[Record]:
    """The records of an episode that was checkpointed while its tool call was under way, and then went on."""
    protocol = Steps()
    network.replies["/tool"] = protocol.wait
    environment = Environment(protocol)
    async with environment.client() as client:
        running = client.start(R0)
        await protocol.inside.wait()
        await close(environment.owner)
        protocol.go.set()
        await until(environment.owner.is_ready)
        records = await exported(environment.owner)
        await reopen(environment.owner)
        await running
    return records
