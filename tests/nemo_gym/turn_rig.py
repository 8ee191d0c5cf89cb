"""A whole deployment in this process, over real sockets: environment, agent with sessions, resources, policy model.

The upstream of the policy model is scripted: it asks for the weather, and then says what it was told.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nemo_gym.server_utils
import uvicorn
from environment_servers.single_agent_turn.app import SingleAgentTurnEnvironmentServer
from environment_servers.single_agent_turn_legacy.app import SingleAgentTurnLegacyEnvironmentServer
from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_models.openai_model.app import SimpleModelServer

from gym_ckpt_grpc.coordinator import Coordinator, Fleet, Server
from gym_ckpt_grpc.integrations.nemo_gym import Options, checkpointed
from tests.nemo_gym.servers import build, response, text

CLASSES = {
    "weather": ("resources", SimpleWeatherResourcesServer),
    "agent": ("agent", SimpleAgent),
    "model": ("policy_model", SimpleModelServer),
}
ENVIRONMENTS = {"typed": SingleAgentTurnEnvironmentServer, "legacy": SingleAgentTurnLegacyEnvironmentServer}

CALL = {
    "type": "function_call",
    "id": "fc",
    "call_id": "call-1",
    "name": "get_weather",
    "arguments": '{"city": "SF"}',
    "status": "completed",
}


class Upstream:
    """The scripted model. calls: how often it was asked. held: set it to an Event, and second turns wait for that."""

    def __init__(self) -> None:
        self.calls = 0
        self.held: asyncio.Event | None = None
        self.waiting = asyncio.Event()

    async def create_response(self, **body: Any) -> dict[str, Any]:
        self.calls += 1
        told = [item["output"] for item in body["input"] if item.get("type") == "function_call_output"]
        if not told:
            return response(CALL)
        if self.held is not None:
            self.waiting.set()
            await self.held.wait()
        return response(text(f"I was told: {told[0]}"))


class Turns:
    """One life of a deployment. servers: by instance. heard: their requests."""

    def __init__(self, servers: Mapping[str, Any], heard: Mapping[str, Heard], url: str, fleet: Fleet) -> None:
        self.servers = servers
        self.heard = heard
        self._url = url
        self.fleet = fleet

    async def run(self, row: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Send a row to the environment, as the framework's collector does."""
        reply = await nemo_gym.server_utils.get_global_aiohttp_client().request("POST", f"{self._url}/run", json=row)
        return reply.status, await reply.json()

    def coordinator(self, root: Path) -> Coordinator:
        return Coordinator(self.fleet, root=str(root))


def row_of(kind: str, attempt: int = 0) -> dict[str, Any]:
    """The same episode as either kind of row."""
    asked = {"input": [{"role": "user", "content": "what's it like in sf?"}]}
    if kind == "typed":
        return {
            "episode_id": {"rollout_id": "7-0", "attempt": attempt},
            "task": {
                "task_id": {"taskset": "weather", "task_id": "7"},
                "task_input": {"responses_create_params": asked, "task_data": {}},
            },
        }
    row = {
        "responses_create_params": asked,
        "agent_ref": {"name": "agent"},
        "_ng_task_index": 7,
        "_ng_rollout_index": 0,
    }
    return {**row, "_ng_attempt_index": attempt} if attempt else row


@asynccontextmanager
async def living(directory: Path, upstream: Upstream, kind: str = "typed") -> AsyncIterator[Turns]:
    """One life, up to its end, at which what is under way is cut off. kind: of its environment, typed or legacy."""
    (directory / "root").mkdir(exist_ok=True)
    classes = {"env": ("environment", ENVIRONMENTS[kind]), **CLASSES}
    nemo_gym.server_utils._GLOBAL_AIOHTTP_CLIENT = None
    async with AsyncExitStack() as stack:
        sockets = {name: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for name in classes}
        config = _config({name: each.getsockname()[1] for name, each in sockets.items()})
        servers, heard, members = {}, {}, []
        for name, (role, cls) in classes.items():
            control = f"unix:{directory}/{name}"
            options = Options(
                instance=name,
                kind=role,
                root=str(directory / "root"),
                control=control,
                policy=("model",) if role == "agent" else (),
            )
            block = next(iter(next(iter(config[name].values())).values()))
            given = {key: value for key, value in block.items() if key not in ("host", "port", "entrypoint")}
            servers[name] = server = build(checkpointed(cls, options), name=name, config=config, **given)
            if name == "model":
                server._client = upstream
            app = server.setup_webserver()
            heard[name] = Heard(app)
            await stack.enter_async_context(_served(heard[name], sockets[name]))
            members.append(Server(kind=role, service=name, address=control))
        stack.push_async_callback(_close_client)
        fleet = Fleet(members, require_kinds=[])
        yield Turns(servers, heard, f"http://127.0.0.1:{sockets['env'].getsockname()[1]}", fleet)


def _config(ports: Mapping[str, int]) -> dict[str, Any]:
    def named(kind: str, name: str) -> dict[str, str]:
        return {"type": kind, "name": name}

    weather, agent = named("resources_servers", "weather"), named("responses_api_agents", "agent")
    model = {"openai_base_url": "http://127.0.0.1:1/v1", "openai_api_key": "none", "openai_model": "scripted"}
    turn = {
        "resources_server": weather,
        "agent_server": agent,
        "resources_tool_transports": ["direct_http"],
        "cleanup_timeout_seconds": 30,
    }
    loop = {"resources_server": weather, "model_server": named("responses_api_models", "model")}
    blocks: dict[str, tuple[str, dict[str, Any]]] = {
        "env": ("environment_servers", turn),
        "agent": ("responses_api_agents", loop),
        "weather": ("resources_servers", {"domain": "agent"}),
        "model": ("responses_api_models", model),
    }
    return {
        name: {kind: {"any": {"entrypoint": "app.py", "host": "127.0.0.1", "port": ports[name], **block}}}
        for name, (kind, block) in blocks.items()
    }


class Heard:
    """Notes the paths that an application is asked for."""

    def __init__(self, app: Any) -> None:
        self.paths: list[str] = []
        self._app = app
        self._more = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.paths.append(scope["path"])
            self._more.set()
        await self._app(scope, receive, send)

    async def reaches(self, count: int) -> None:
        """Wait for so many requests."""
        while len(self.paths) < count:
            self._more.clear()
            await self._more.wait()


@asynccontextmanager
async def _served(app: Any, on: socket.socket) -> AsyncIterator[None]:
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=0))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server._serve(sockets=[on]))
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no other sign
        await asyncio.sleep(0)
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def _close_client() -> None:
    client, nemo_gym.server_utils._GLOBAL_AIOHTTP_CLIENT = nemo_gym.server_utils._GLOBAL_AIOHTTP_CLIENT, None
    if client is not None:
        await client.close()
