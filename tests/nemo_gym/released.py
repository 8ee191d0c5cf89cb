"""Released resources servers, in this process: built without the framework's launcher, spoken to by its own routes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from gym_ckpt_grpc.integrations.nemo_gym.hooks import hooks_for
from gym_ckpt_grpc.participants import RestoredState
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import decode, encode

NEXT = EpisodeId("task-1", 1)
"""The attempt that tests restore as."""


class Deployed:
    """One server object, its hooks and its application, spoken to in process."""

    def __init__(self, directory: str, class_name: str, *, prepare: Any = None) -> None:
        module = importlib.import_module(f"resources_servers.{directory}.app")
        cls = getattr(module, class_name)
        config = cls.model_fields["config"].annotation(host="127.0.0.1", port=1, name=directory, entrypoint="app.py")
        client = ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=2), global_config_dict=OmegaConf.create({})
        )
        self.again = lambda: Deployed(directory, class_name, prepare=prepare)
        self.server = cls(config=config, server_client=client)
        self.hooks: Any = (prepare or hooks_for)(self.server)
        self.app = self.server.setup_webserver()

    def client(self, like: TestClient | None = None) -> Client:
        """A client with a session of its own, or with the cookies of another: the session goes on."""
        return Client(self.app, like)

    async def state_of(self, session_id: str) -> Any:
        """A session's state, as it comes back from storage."""
        states = await self.hooks.export_sessions([session_id])
        return decode(encode(states[session_id]))

    async def restore(self, session_id: str, state: Any, episode: EpisodeId = NEXT) -> None:
        """Install a session's state as the next attempt."""
        await self.hooks.restore_sessions([RestoredState(session_id, episode, state)])


class Client(TestClient):
    """Posts JSON and gives JSON."""

    def __init__(self, app: Any, like: TestClient | None = None) -> None:
        cookies = dict(like.cookies) if like is not None else None
        super().__init__(app, cookies=cookies, raise_server_exceptions=False)

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The status and the JSON of the reply."""
        reply = self.post(path, json=body)
        return reply.status_code, reply.json() if reply.headers["content-type"] == "application/json" else reply.text


def rows(directory: str) -> list[dict[str, Any]]:
    """The example rows that the wheel has for a server."""
    [place] = importlib.import_module(f"resources_servers.{directory}").__path__
    return [json.loads(line) for line in (Path(place) / "data" / "example.jsonl").read_text().splitlines()]


def response(output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a model said, as servers are told."""
    return {
        "id": "r",
        "created_at": 1.0,
        "model": "m",
        "object": "response",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def said(text: str) -> dict[str, Any]:
    """A message of the model."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}


def called(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    """A tool call of the model."""
    return {
        "type": "function_call",
        "name": name,
        "arguments": arguments,
        "call_id": call_id,
        "id": f"f-{call_id}",
        "status": "completed",
    }
