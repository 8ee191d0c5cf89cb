"""A declared server in this process: built from its own shipped configuration, its judge answered by a stub."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from typing import Any, ClassVar

import orjson
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

httpx: Any = importlib.import_module("httpx")  # comes with the framework, and only there
Answer = tuple[int, bytes, list[str]]
"""Status, body, and digests of what the judge was asked."""
VERDICTS = {
    "aalcr": ("CORRECT", "INCORRECT"),
    "abstention": ("A", "B"),
    "deepsearchqa": (
        '{"Answer Correctness": {"Correctness Details": {"a": true, "b": true, "c": false}, "Excessive Answers": []}}',
        '{"Answer Correctness": {"Correctness Details": {"a": false}, "Excessive Answers": ["z"]}}',
    ),
    "equivalence_llm_judge": ("[[A=B]]", "[[A!=B]]"),
    "frontierscience_judge": ("Judgement: YES", "Judgement: NO"),
    "inverse_if": ('{"result": "PASS", "explanation": "x"}', '{"result": "FAIL", "explanation": "x"}'),
    "omniscience": ("A", "B"),
    "simpleqa": ("A", "B"),
}
"""What a judge that approves says, and one that does not."""


class JudgeReply:
    """As much of an HTTP reply as the framework's readers use."""

    ok = True
    status = 200

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body


class Judge(ServerClient):  # type: ignore[misc]  # the framework has no types here
    """A client whose every call is answered with `text`, and that remembers what it was asked, in order of the text."""

    text: str = ""
    asked: ClassVar[list[str]] = []

    async def post(self, server_name: str, url_path: str, **options: Any) -> JudgeReply:
        given = options["json"]
        given = given.model_dump(mode="json") if hasattr(given, "model_dump") else given
        question = orjson.dumps([server_name, url_path, given], option=orjson.OPT_SORT_KEYS, default=str)
        self.asked.append(hashlib.sha256(question).hexdigest())
        if url_path.endswith("/chat/completions"):
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": self.text}}
            chat = {"id": "c1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}
            return JudgeReply(orjson.dumps(chat))
        said = [{"type": "output_text", "text": self.text, "annotations": []}]
        message = {"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": said}
        reply = {"id": "r1", "created_at": 1.0, "model": "judge", "object": "response", "output": [message]}
        return JudgeReply(orjson.dumps({**reply, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}))


class Served:
    """One server object and its application."""

    def __init__(self, cls: Any, directory: Path, verdict: str) -> None:
        head = BaseServerConfig(host="127.0.0.1", port=2)
        self.judge = Judge(head_server_config=head, global_config_dict=OmegaConf.create({}), text=verdict)
        config = cls.model_fields["config"].annotation.model_validate(config_of(directory))
        self._app = cls(config=config, server_client=self.judge).setup_webserver()

    async def ask(self, body: dict[str, Any], times: int) -> list[Answer]:
        """Seed a session and verify in it so often."""
        answers = []
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            (await client.post("/seed_session", json=body)).raise_for_status()
            for _ in range(times):
                self.judge.asked.clear()
                reply = await client.post("/verify", json=body)
                answers.append((reply.status_code, reply.content, sorted(self.judge.asked)))
        return answers


def class_of(module: str, server: str) -> Any:
    """Import a server as it is started: with its own directory first on sys.path."""
    directory = str(Path(importlib.import_module(module.split(".")[0]).__path__[0]) / module.split(".")[1])
    sys.path.insert(0, directory)
    try:
        return getattr(importlib.import_module(module), server)
    finally:
        sys.path.remove(directory)


def config_of(directory: Path) -> dict[str, Any]:
    """The server's block of its shipped configuration; what that leaves open names the judge."""
    files = sorted((directory / "configs").glob("*.yaml"), key=lambda file: (file.stem != directory.name, file.name))
    for file in files:
        for instance, block in OmegaConf.to_container(OmegaConf.load(file), resolve=False).items():
            servers = block.get("resources_servers") if isinstance(block, dict) else None
            if isinstance(servers, dict) and directory.name in servers:
                plain: dict[str, Any] = _named(servers[directory.name])
                return {**plain, "host": "127.0.0.1", "port": 1, "name": instance}
    raise LookupError(f"no configuration in {directory}")


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_named(one) for one in value]
    return "judge" if isinstance(value, str) and (value == "???" or value.startswith("${")) else value
