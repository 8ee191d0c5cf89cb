"""A released agent in this process, between a scripted model and a world with a counter, all on loopback.

The world and the model outlive an agent that "crashes": another one is built from what was exported, and the world is
set back to what it was at the checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import uvicorn
from nemo_gym import server_utils
from responses_api_agents.simple_agent.app import SimpleAgent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gym_ckpt_grpc.integrations.nemo_gym import NAMES, Options, checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.participant import found
from gym_ckpt_grpc.participants import refusal_reply
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.storage import Record
from tests.nemo_gym.servers import build, response, text
from tests.participants.fakes import FakePort, close, exported, reopen, restore

PROMPT = "Count."
PLAN = ({"n": 1}, {"n": 2}, "3")
WITHIN = 20.0


class Holds:
    """Calls that have to wait, by name and number, from 1. `await holds.at(name, n)`: until that one is there."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._there: dict[tuple[str, int], asyncio.Event] = {}
        self._go: dict[tuple[str, int], asyncio.Event] = {}

    def hold(self, name: str, number: int = 1) -> None:
        self._there[name, number], self._go[name, number] = asyncio.Event(), asyncio.Event()

    async def at(self, name: str, number: int = 1) -> None:
        async with asyncio.timeout(WITHIN):
            await self._there[name, number].wait()

    def release(self) -> None:
        for each in self._go.values():
            each.set()

    async def passed(self, name: str) -> None:
        number = self.counts[name] = self.counts.get(name, 0) + 1
        if (name, number) in self._there:
            self._there[name, number].set()
            await self._go[name, number].wait()


class World(Holds):
    """A resources server by hand: a counter per session, in a cookie. calls: (episode, path, session, body) of each.

    answers: path -> replies to give instead, each once. verify: what its seed reply says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[str, int] = {}
        self.calls: list[tuple[str | None, str, str | None, Any]] = []
        self.answers: dict[str, list[Response]] = {}
        self.verify = "replay"
        self.restart = False
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["POST"])])

    def paths(self, since: int = 0) -> list[str]:
        return [path for _, path, _, _ in self.calls[since:]]

    async def _answer(self, request: Request) -> Response:
        episode, path = NAMES.split(request.url.path)
        body = json.loads(await request.body() or b"null")
        session = request.cookies.get("world")
        await self.passed(path)
        self.calls.append((None if episode is None else episode.capture_key, path, session, body))
        if self.answers.get(path):
            return self.answers[path].pop(0)
        if path == "/seed_session":
            return self._seed()
        if path == "/verify":
            return self._verdict(session, body)
        assert session in self.counters, (path, session)
        assert session is not None
        self.counters[session] += (body or {}).get("n", 0)
        return JSONResponse({"count": self.counters[session]})

    def _seed(self) -> Response:
        session = f"s-{len(self.counters)}"
        self.counters[session] = 0
        headers = {NAMES.restart_header: "1"} if self.restart else {NAMES.verify_header: self.verify}
        answer = JSONResponse({}, headers=headers)
        answer.set_cookie("world", session)
        return answer

    def _verdict(self, session: str | None, body: Any) -> Response:
        return JSONResponse({**body, "reward": float(self.counters.get(session or "", 0))})


class Model(Holds):
    """The policy's model server: one item per turn, by how many results of tools it is told. `turns` has its plan.

    asked: (episode, conversation) of each call.
    """

    def __init__(self, plan: Sequence[Mapping[str, Any] | str]) -> None:
        super().__init__()
        self.plan = list(plan)
        self.asked: list[tuple[str | None, Any]] = []
        self.answers: list[Response] = []
        self.app = Starlette(
            routes=[Route("/health", self._health), Route("/{path:path}", self._answer, methods=["POST"])]
        )

    @property
    def headers(self) -> dict[str, str]:
        return {NAMES.gate_header: "policy_model/one"}

    async def _health(self, request: Request) -> Response:
        return JSONResponse({}, headers=self.headers)

    async def _answer(self, request: Request) -> Response:
        episode, _ = NAMES.split(request.url.path)
        asked = await request.json()
        self.asked.append((None if episode is None else episode.capture_key, asked["input"]))
        await self.passed("model")
        if self.answers:
            return self.answers.pop(0)
        done = sum(each.get("type") == "function_call_output" for each in asked["input"])
        said = response(*self.items(asked["input"], done))
        answer = JSONResponse({**said, "id": f"resp-{done}"}, headers=self.headers)
        answer.set_cookie("model", f"turn-{done}")
        return answer

    def items(self, conversation: Any, done: int) -> list[Mapping[str, Any]]:
        """What it says in a turn. done: results of tools that it was told so far."""
        item = self.plan[min(done, len(self.plan) - 1)]
        return [text(item) if isinstance(item, str) else call_item(done, item)]


class TwoCalls(Model):
    """Calls two tools in its first turn, and says in its second what they told."""

    def __init__(self) -> None:
        super().__init__(())

    def items(self, conversation: Any, done: int) -> list[Mapping[str, Any]]:
        if not done:
            return [call_item(0, {"tool": "first", "n": 1}), call_item(1, {"tool": "second", "n": 2})]
        outputs = [each["output"] for each in conversation if each.get("type") == "function_call_output"]
        return [text(f"I was told {', '.join(outputs)}.")]


def call_item(number: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An item of a response: the model calls a tool, `add` unless the arguments name another."""
    arguments = dict(arguments)
    name = arguments.pop("tool", "add")
    call = {"id": f"fc-{number}", "call_id": f"call-{number}", "name": name, "arguments": json.dumps(arguments)}
    return {"type": "function_call", "status": "completed", **call}


class Port(FakePort):
    """A port on which a test waits for readiness."""

    def __init__(self) -> None:
        super().__init__(ParticipantKind.AGENT)
        self._news = asyncio.Event()

    def changed(self) -> None:
        super().changed()
        self._news.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something that comes with a change of readiness."""
        async with asyncio.timeout(WITHIN):
            while not condition():
                self._news.clear()
                await self._news.wait()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def loopback() -> socket.socket:
    """A listening socket."""
    return socket.create_server(("127.0.0.1", 0))


def port_of(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port


@contextlib.asynccontextmanager
async def served(app: Any, listening: socket.socket) -> AsyncIterator[None]:
    """Serve an application, without its lifespan. Leaving it drops every request."""
    server = _Uvicorn(uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=0))
    serving = asyncio.create_task(server.serve([listening]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listening.close()


class Life:
    """One life of the agent: its server object, its owner, and a client that dispatches rollouts to it."""

    def __init__(
        self, cls: type, config: Mapping[str, Any], mode: str | None, jar: aiohttp.CookieJar, **values: Any
    ) -> None:
        options = Options("agent", "agent", "", "/nowhere", "127.0.0.1:0", mode=mode, policy=("policy_model",))
        named = {
            "resources_server": {"type": "resources_servers", "name": "world"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
        }
        self.server = build(checkpointed(cls, options), name="agent", config=config, **{**named, **values})
        self.app = self.server.setup_webserver()
        self.port = Port()
        self.owner.attach(self.port)
        self.url = f"http://127.0.0.1:{config['agent']['responses_api_agents']['x']['port']}"
        self.http = aiohttp.ClientSession(cookie_jar=jar)

    @property
    def owner(self) -> Any:
        return found(self.server).owner

    def run(self, attempt: int = 0, rollout: str = "r", **more: Any) -> asyncio.Task[Any]:
        """Dispatch a rollout; gives (status, body)."""
        row = {"responses_create_params": {"input": [{"role": "user", "content": PROMPT}]}, **more}
        ids = {"_ng_task_index": 0, "_ng_rollout_index": 0, "_ng_rollout_id": rollout, "_ng_attempt_index": attempt}
        return asyncio.create_task(self.post("/run", {**row, **ids}))

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """One request; gives (status, body)."""
        async with asyncio.timeout(WITHIN), self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def checkpoint(self) -> list[Record]:
        """Close, wait for readiness, and export; admission stays closed."""
        await close(self.owner)
        await self.port.until(self.owner.is_ready)
        return await exported(self.owner)

    async def resume(self) -> None:
        await reopen(self.owner)

    async def restore(self, records: Sequence[Record]) -> None:
        """Install what another life exported, and open."""
        await restore(self.owner, records)
        await reopen(self.owner)


class Rig:
    """The world, the model, and as many lives of the agent as a test wants."""

    def __init__(
        self, cls: type = SimpleAgent, *, plan: Sequence[Any] = ({"n": 1}, {"n": 2}, "3"), **values: Any
    ) -> None:
        self.cls, self.values = cls, values
        self.world: World = self.values.pop("world", None) or World()
        self.model: Model = self.values.pop("model", None) or Model(plan)
        self._stack = contextlib.AsyncExitStack()
        self._ports: dict[str, int] = {}
        self.settings: dict[str, Any] = {}
        """More of the framework's configuration."""

    async def __aenter__(self) -> Rig:
        await self._stack.__aenter__()
        self._stack.push_async_callback(_drop_client)
        self._jar = aiohttp.CookieJar(unsafe=True)  # the client outlives the agents
        for name, app in (("world", self.world.app), ("policy_model", self.model.app)):
            await self.serve(name, app)
        return self

    async def serve(self, name: str, app: Any) -> None:
        """Serve the world or the model, for the lives that come; once more, and it has moved."""
        listening = loopback()
        self._ports[name] = port_of(listening)
        await self._stack.enter_async_context(served(app, listening))

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    async def __aexit__(self, *error: Any) -> None:
        self.world.release()
        self.model.release()
        await self._stack.aclose()

    async def life(self, mode: str | None = None) -> Life:
        """Build and serve an agent."""
        listening = loopback()
        kinds = {"world": "resources_servers", "policy_model": "responses_api_models"}
        ports = {
            "agent": ("responses_api_agents", port_of(listening)),
            **{n: (kinds[n], p) for n, p in self._ports.items()},
        }
        config = {name: {kind: {"x": {"host": "127.0.0.1", "port": p}}} for name, (kind, p) in ports.items()}
        life = Life(self.cls, {**config, **self.settings}, mode, self._jar, **self.values)
        self._stack.push_async_callback(life.http.close)
        await self._stack.enter_async_context(served(life.app, listening))
        return life

    def picture(self) -> Any:
        """The world as of now, to be put back by `set_back`."""
        return copy.deepcopy(self.world.counters)

    def set_back(self, picture: Any) -> None:
        self.world.counters = copy.deepcopy(picture)


async def _drop_client() -> None:
    """The framework has one HTTP session per process, bound to the loop that made it."""
    client, server_utils._GLOBAL_AIOHTTP_CLIENT = server_utils._GLOBAL_AIOHTTP_CLIENT, None
    if client is not None:
        await client.close()


def heard(result: Any) -> list[str]:
    """What the tools answered in a rollout, and what the model said at last."""
    output = result["response"]["output"]
    return [each.get("output") or each["content"][0]["text"] for each in output if each["type"] != "function_call"]


def episodes(calls: Sequence[tuple[str | None, Any]]) -> set[str | None]:
    return {each[0] for each in calls}


def refused(error: ControlError) -> Response:
    """The reply of a gate that refuses."""
    status, headers, body = refusal_reply(error)
    return Response(body, status, headers)
