"""A counter server: sessions named by a cookie, routes that wait when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.participants import ResourcesMode, ResourcesOwner, ResourcesSettings, RestoredState, VerifyMode
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import App, Call, FakeClock, FakePort, R, call, close, exported, reopen

Scope = MutableMapping[str, Any]
Result = tuple[int, Mapping[str, str], Any]


class ResourcesRig:
    """An owner, its author's hooks, and an application behind the middleware."""

    def __init__(
        self,
        mode: ResourcesMode = ResourcesMode.EXPORTED,
        verify: VerifyMode = VerifyMode.WAIT,
        *,
        require_identity: bool = True,
        ends_on_verify: bool = True,
        brought: bool = False,
    ) -> None:
        self.counters: dict[str, int] = {}
        self.hooks: list[tuple[str, list[str]]] = []
        self.gates: dict[str, asyncio.Event] = {}
        """Routes that wait for their event before they answer."""
        self.status: dict[str, int] = {}
        self.ids: list[str] = []
        """Session ids that seeds give out, if they are to replace the client's."""
        self.retire_gate: asyncio.Event | None = None
        self.clock = FakeClock()
        settings = ResourcesSettings(
            mode=mode,
            verify=verify,
            require_identity=require_identity,
            ends_on_verify=ends_on_verify,
            brought=(lambda request: "x-given" not in request.headers) if brought else None,
        )
        hooks = self if mode is ResourcesMode.EXPORTED else None
        self.owner = ResourcesOwner(hooks, settings, clock=self.clock)
        self.port = FakePort(ParticipantKind.RESOURCES)
        self.owner.attach(self.port)
        routes = ("/seed_session", "/add", "/verify", "/close_session")
        self.app = App(dict.fromkeys(routes, self.handle))
        self.served = CheckpointMiddleware(self.app, self.owner.gate())

    # ---- the author's side

    async def handle(self, scope: Scope, body: bytes) -> Result:
        path = scope["path"]
        if gate := self.gates.get(path):
            await gate.wait()
        status = self.status.get(path, 200)
        cookies = dict(pair.split("=") for pair in self._cookie(scope).split("; ") if pair)
        session = cookies.get("session", "")
        headers: dict[str, str] = {}
        if path == "/seed_session" and status == 200:
            if self.ids:
                session = self.ids.pop(0)
                headers["set-cookie"] = f"session={session}; Path=/"
            self.counters.setdefault(session, 0)
        elif path == "/add":
            self.counters[session] = self.counters.get(session, 0) + 1
        elif path == "/close_session" and status == 200:
            self.counters.pop(session, None)
        return status, headers, self.counters.get(session)

    @staticmethod
    def _cookie(scope: Scope) -> str:
        return str(dict(scope["headers"]).get(b"cookie", b"").decode())

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        self.hooks.append(("export", list(session_ids)))
        return {key: {"count": self.counters[key]} for key in session_ids if key in self.counters}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        self.hooks.append(("restore", [each.session_id for each in sessions]))
        if any(each.state["count"] < 0 for each in sessions):
            raise InvalidState("negative")
        self.counters |= {each.session_id: each.state["count"] for each in sessions}

    async def retire_session(self, session_id: str) -> None:
        self.hooks.append(("retire", [session_id]))
        if self.retire_gate is not None:
            await self.retire_gate.wait()
        self.counters.pop(session_id, None)

    # ---- calls

    def call(
        self, path: str, session: str | None = "k", episode: EpisodeId | None = None, *, given: bool = False
    ) -> Call:
        """given: the framework gives the session with this request, to a client that has brought none."""
        headers = {"cookie": f"session={session}"} if session else {}
        if given:
            headers["x-given"] = "1"
        return call(self.served, f"/rollout/{episode}{path}" if episode else path, {}, headers=headers)

    async def seed(self, session: str | None = "k", episode: EpisodeId | None = R) -> None:
        answer = await self.call("/seed_session", session, episode).end()
        assert answer.status == 200, answer.body

    async def add(self, session: str = "k") -> Any:
        return (await self.call("/add", session).end()).json()

    async def checkpoint(self) -> list[Record]:
        await close(self.owner)
        records = await exported(self.owner)
        await reopen(self.owner)
        return records

    def sessions(self) -> int:
        return self.owner.report(9).counts["sessions"]
