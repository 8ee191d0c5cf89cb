"""A resources server of minigym behind its gate, called as an agent and an environment would, without a network."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.minigym.generation import offered_calls
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer, install
from gym_ckpt_grpc.participants import VerifyMode
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.testing import serve
from gym_ckpt_grpc.testing.client import ParticipantClient
from tests.participants.fakes import Answer, Call, FakePort, R, call, close, exported, reopen

Message = dict[str, Any]


class Gated:
    """A server, the owner of its sessions, and the way in. attach: to a fake control plane, for tests without one."""

    def __init__(self, server: ResourcesServer, *, verify: VerifyMode | None = None, attach: bool = True) -> None:
        self.server = server
        self.owner = install(server, verify=verify)
        self.port = FakePort(ParticipantKind.RESOURCES)
        if attach:
            self.owner.attach(self.port)
        self.app = CheckpointMiddleware(server.build_app(), self.owner.gate())

    def call(
        self,
        path: str,
        body: Any = None,
        *,
        session: str = "k",
        episode: EpisodeId | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Call:
        """Start a request; without `headers` it carries the session in its cookie."""
        named = {"cookie": f"session={session}"} if headers is None else headers
        target = f"/rollout/{episode}{path}" if episode is not None else path
        return call(self.app, target, {} if body is None else body, headers=named)

    async def post(self, path: str, body: Any = None, **how: Any) -> Answer:
        return await self.call(path, body, **how).end()

    async def seed(self, setup: Mapping[str, Any], session: str = "k", episode: EpisodeId = R) -> Answer:
        answer = await self.post("/seed_session", setup, session=session, episode=episode)
        assert answer.status == 200, answer.body
        return answer

    @property
    def tracked(self) -> int:
        """Number of sessions that the owner tracks."""
        return self.owner.report(9).counts["sessions"]

    async def checkpoint(self) -> list[Record]:
        await close(self.owner)
        records = await exported(self.owner)
        await reopen(self.owner)
        return records


def plays(tools: Sequence[Any], count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Some of the calls that the tools allow, as a model would choose them; the seed is printed."""
    print(f"seed {seed}")
    offered = offered_calls(tools)
    chosen = random.Random(seed).choices(offered, k=count)
    return [(each.name, dict(each.arguments)) for each in chosen]


async def play(gated: Gated, calls: Sequence[tuple[str, dict[str, Any]]], messages: list[Message]) -> None:
    """Run tool calls into a transcript; stops when a tool says that it is done."""
    for name, arguments in calls:
        if messages and orjson.loads(messages[-1]["content"]).get("done"):
            return
        answer = await gated.post(f"/{name}", arguments)
        assert answer.status == 200, answer.body
        content = orjson.dumps(answer.json(), option=orjson.OPT_SORT_KEYS).decode()
        messages.append({"role": "tool", "content": content})


@asynccontextmanager
async def life(server: ResourcesServer, root: Path) -> AsyncIterator[tuple[Gated, ParticipantClient]]:
    """One life of a server behind its gate and its control plane; what it has not committed dies with it."""
    gated = Gated(server, attach=False)
    async with serve(gated.owner, roots=[root]) as served:
        yield gated, served.client
