"""Servers of the framework, built in this process: bare, or as participants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx  # type: ignore[import-not-found, unused-ignore]  # it comes with the framework
import resources_servers
from fastapi import Request
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt.app import IncrementCounterRequest, StatefulCounterResourcesServer

from gym_ckpt_grpc.integrations.nemo_gym import Options, checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.participant import found
from gym_ckpt_grpc.participants import ResourcesOwner
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from tests.participants.fakes import FakePort, spin

RELEASED = Path(next(iter(resources_servers.__path__)))
"""Where the released resources servers are."""


def options(**given: Any) -> Options:
    """Options of a resources server that is never served beyond this process."""
    defaults = {"instance": "counter", "kind": "resources", "root": "/nowhere", "control": "127.0.0.1:0"}
    return Options(**{**defaults, **given})


def build(cls: type, *, name: str = "counter", config: Mapping[str, Any] | None = None, **values: Any) -> Any:
    """A server object. config: the framework's whole configuration; values: of the server's own block."""
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create(dict(config or {})),
    )
    block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1, "domain": "agent", "name": name, **values}
    settings = cls.model_fields["config"].annotation  # type: ignore[attr-defined]
    return cls(config=settings.model_validate(block), server_client=client)


class Participant:
    """A server as a participant, its application, and its owner on a port of the test."""

    def __init__(self, cls: type, *, mcp: bool = False, given: Options | None = None, **values: Any) -> None:
        given = given or options()
        self.server = build(checkpointed(cls, given), name=given.instance, expose_tools_over_mcp=mcp, **values)
        self.app = self.server.setup_webserver()
        if mcp:
            from nemo_gym.mcp_auto_exposure import maybe_auto_expose

            maybe_auto_expose(self.server, self.app)
        self.port = FakePort(ParticipantKind.RESOURCES)
        self.owner.attach(self.port)

    @property
    def owner(self) -> ResourcesOwner:
        owner: ResourcesOwner = found(self.server).owner
        return owner

    def sessions(self) -> dict[str, str]:
        """Session id -> capture key of its episode."""
        return {each.key: str(each.episode) for each in self.owner._sessions}


@asynccontextmanager
async def client_of(app: Any, cookies: Any = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a cookie jar of its own; the application's lifespan does not run."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", cookies=cookies) as client:
        yield client


def rows(server: str) -> list[dict[str, Any]]:
    """The example rows of a released resources server."""
    text = (RELEASED / server / "data" / "example.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def response(*output: Mapping[str, Any]) -> dict[str, Any]:
    """A model's response with these items, as a verify takes it."""
    return {
        "id": "resp",
        "created_at": 0,
        "model": "m",
        "object": "response",
        "output": list(output),
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }


def text(said: str) -> dict[str, Any]:
    """An item of a response: the model said something."""
    content = [{"type": "output_text", "text": said, "annotations": []}]
    return {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": content}


async def held(participant: Participant, requests: int = 1) -> None:
    """Wait until so many requests are held."""
    async with asyncio.timeout(30):
        while participant.owner.admission.waiting < requests:
            await spin(1)


class Slow(Participant):
    """A session counter whose increments wait for `go`."""

    def __init__(self, **values: Any) -> None:
        self.go, self.begun = asyncio.Event(), asyncio.Event()
        rig = self

        class SlowCounter(StatefulCounterResourcesServer):  # type: ignore[misc]
            def setup_webserver(self) -> Any:
                app = super().setup_webserver()

                endpoint = self.increment_counter
                (route,) = [each for each in app.routes if each.path == "/increment_counter"]
                app.routes.remove(route)

                async def increment_counter(request: Request, body: IncrementCounterRequest) -> Any:
                    rig.begun.set()
                    await rig.go.wait()
                    return await endpoint(request, body)

                app.post("/increment_counter")(increment_counter)
                return app

        super().__init__(SlowCounter, **values)

    async def begin(self, client: Any) -> Any:
        """Start an increment; it has begun when this returns."""
        running = asyncio.ensure_future(client.post("/increment_counter", json={"count": 1}))
        await asyncio.wait_for(self.begun.wait(), 30)
        return running
