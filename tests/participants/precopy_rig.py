"""A resources server with revisions, and a pace that a test holds in its hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from gym_ckpt_grpc.participants import (
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    RestoredState,
    SessionRevisions,
)
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Payload, Record
from tests.participants.fakes import FakePort, close, exported, reopen


class HandPace:
    """A pace without time. at: awaited at each place where a pass can be interrupted, with the name of the place.

    left: batches until the pass is over, or None.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self.spent = 0.0
        self.left: int | None = None
        self.digested: list[Payload] = []
        self.at: Callable[[str], Awaitable[None]] = self._nothing

    async def _nothing(self, place: str) -> None:
        return None

    @property
    def over(self) -> bool:
        return self.left is not None and self.left <= 0

    @contextmanager
    def working(self) -> Iterator[None]:
        yield

    async def digest(self, payloads: Sequence[Payload]) -> None:
        await self.at("digest")
        for payload in payloads:
            payload.digest()
        self.digested += payloads

    async def rest(self) -> None:
        if self.left is not None:
            self.left -= 1
        await self.at("rest")


class RevisedServer:
    """Sessions that are changed in place. asked: ids of each call of the export hook. at: awaited inside of it."""

    def __init__(self) -> None:
        self.sessions: dict[str, Any] = {}
        self.numbers = SessionRevisions()
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        self.at: Callable[[str], Awaitable[None]] | None = None

    def change(self, key: str, /, **what: Any) -> None:
        self.sessions.setdefault(key, {}).update(what)
        self.numbers.changed(key)

    def session_revisions(self) -> Mapping[str, int]:
        return self.numbers.current()

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        self.asked.append(list(session_ids))
        if self.at is not None:
            await self.at("hook")
        if self.error is not None:
            raise self.error
        return {key: deepcopy(self.sessions[key]) for key in session_ids if key in self.sessions}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        for each in sessions:
            self.change(each.session_id, **each.state)

    async def retire_session(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)
        self.numbers.ended(session_id)


class PrecopyRig:
    """An owner in front of a RevisedServer."""

    def __init__(self, server: RevisedServer | None = None) -> None:
        self.server = server or RevisedServer()
        self.owner = ResourcesOwner(self.server, ResourcesSettings(mode=ResourcesMode.EXPORTED))
        self.port = FakePort(ParticipantKind.RESOURCES)
        self.owner.attach(self.port)
        self.pace = HandPace()

    def begin(self, *keys: str, **state: Any) -> None:
        for key in keys:
            self.server.change(key, key=key, **state)
            self.owner.session_started(key, EpisodeId(f"r-{key}"))

    def end(self, key: str) -> None:
        self.owner.session_ended(key)
        self.server.sessions.pop(key, None)
        self.server.numbers.ended(key)

    async def passes(self, count: int = 2) -> list[str]:
        """Passes to their end; two of them encode what stands still. Gives what each found."""
        return [(await self.owner.precopy(self.pace)).value for _ in range(count)]

    def ahead(self) -> int:
        return int(self.owner.status_extra().get("precopied_sessions", 0))

    def held_bytes(self) -> int:
        return int(self.owner.status_extra().get("precopied_bytes", 0))

    async def checkpoint(self) -> list[Record]:
        await close(self.owner)
        records = await exported(self.owner)
        await reopen(self.owner)
        return records

    async def asked_at_the_cut(self) -> list[str]:
        """The sessions that a checkpoint asks the author for."""
        self.server.asked.clear()
        await self.checkpoint()
        return sorted(key for call in self.server.asked for key in call)


def states(records: Sequence[Record]) -> dict[str, Any]:
    return {str(record.fields["session_id"]): record.decode("state") for record in records}


async def settled(task: asyncio.Task[Any]) -> None:
    await asyncio.gather(task, return_exceptions=True)
