"""What the tests of this room share: a port, a clock, short ways through the hooks, and an ASGI client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import Closing, Opening, OpeningCause
from gym_ckpt_grpc.protocol.fences import Marks
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.telemetry import Recorder, Telemetry

R = EpisodeId("r")
R1 = EpisodeId("r", 1)
R2 = EpisodeId("r", 2)
S = EpisodeId("s")


class FakeMarks(Marks):
    """Marks as the control plane keeps them."""

    def being_retired(self, episode: EpisodeId) -> bool:
        return self.refuses(episode)


@dataclass
class FakePort:
    """The control plane as an owner sees it. changes: calls of `changed`."""

    kind: ParticipantKind = ParticipantKind.ENVIRONMENT
    marks: FakeMarks = field(default_factory=FakeMarks)
    changes: int = 0
    telemetry: Telemetry | None = None

    @property
    def recorder(self) -> Recorder:
        return Recorder.of(self.identity, self.telemetry)

    @property
    def identity(self) -> ParticipantIdentity:
        return ParticipantIdentity(self.kind, "policy", incarnation_id="inc")

    def changed(self) -> None:
        self.changes += 1


@dataclass
class FakeClock:
    """Seconds that move only when told to."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


async def spin(turns: int = 10) -> None:
    """Let everything that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


def budget(seconds: float = 5.0) -> Budget:
    return Budget(seconds)


async def close(owner: Any, number: int = 1) -> None:
    await owner.close_admission(Closing(f"ckpt-{number}", number, budget()))


async def reopen(owner: Any) -> None:
    await owner.open_admission(Opening(OpeningCause.RESUMED))
    await spin()


async def retire(owner: Any, port: FakePort, episode: EpisodeId, seconds: float = 5.0) -> None:
    """As the control plane does: the mark first."""
    port.marks.raise_to(episode)
    await owner.retire(episode, budget(seconds))


async def exported(owner: Any, scope: EpisodeScope | None = None) -> list[Record]:
    """The records of an export; the owner must be ready."""
    assert owner.is_ready(), owner.report(100)
    batches = [batch async for batch in owner.export(EpisodeScope.all() if scope is None else scope)]
    return [record for batch in batches for record in batch.records]


async def listed(owner: Any, which: Any) -> list[EpisodeId]:
    return [episode async for batch in owner.list_episodes(which) for episode in batch]


async def restore(owner: Any, records: Sequence[Record], episodes: Iterable[EpisodeId] | None = None) -> None:
    """Stage and activate, behind a closed gate; admission stays closed."""
    scope = RestoreScope.plan(episodes if episodes is not None else dict.fromkeys(each.episode for each in records))
    await close(owner, 99)
    await owner.activate(await owner.stage(records, scope))


# ---- ASGI --------------------------------------------------------------------------------------------------

Message = MutableMapping[str, Any]


@dataclass
class Answer:
    """One reply as a client sees it. pieces: body parts in the order they arrived."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json()["error"]["code"])


class Call:
    """One HTTP request to an ASGI application, under way. `leave()` is the client going away."""

    def __init__(self, app: Any, method: str, path: str, headers: Mapping[str, str], body: bytes, parts: int) -> None:
        self.answer = Answer()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        size = max(1, -(-len(body) // parts))
        pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        for at, piece in enumerate(pieces):
            self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": at + 1 < len(pieces)})
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(app(scope, self._messages.get, self._send))

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            assert not self.answer.status, "a second reply"
            self.answer.status = message["status"]
            self.answer.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self.answer.pieces.append(message.get("body", b""))

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def end(self) -> Answer:
        await asyncio.wait_for(self.task, 5)
        return self.answer


def call(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    parts: int = 1,
) -> Call:
    """Start a request; `await call(...).end()` gives its answer."""
    return Call(app, method, path, headers or {}, orjson.dumps(body), parts)


Handler = Callable[[MutableMapping[str, Any], bytes], Awaitable[tuple[int, Mapping[str, str], Any]]]


class App:
    """A tiny ASGI application: a handler per path, which gets (scope, body) and gives (status, headers, body).

    A body that is an async generator is streamed. seen: paths of the requests that ran, in order.
    """

    def __init__(self, routes: Mapping[str, Handler]) -> None:
        self.routes = dict(routes)
        self.seen: list[str] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.seen.append(scope["path"])
        status, headers, content = await self.routes[scope["path"]](scope, body)
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        if hasattr(content, "__aiter__"):
            async for piece in content:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": orjson.dumps(content)})
