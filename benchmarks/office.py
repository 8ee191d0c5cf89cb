"""A resources server's sessions, as its author would write the hooks, and the load of requests on it.

No HTTP: the gate that the middleware asks is asked directly, so that a request is held while admission is closed and
counted while it runs, exactly as behind a web framework.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from benchmarks.loads import episode_of
from benchmarks.sessions import changed
from gym_ckpt_grpc.participants import (
    GateRequest,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    RestoredState,
)

LOOK_INTERVAL = 0.005
"""Seconds between two requests that only read: they show what a client sees of a pause."""


class Office:
    """Sessions by id, and the three hooks. A state is never changed in place."""

    def __init__(self, sessions: Mapping[str, Any]) -> None:
        self.sessions = dict(sessions)
        self.owner = ResourcesOwner(self, ResourcesSettings(mode=ResourcesMode.EXPORTED))
        for key in self.sessions:
            self.owner.session_started(key, episode_of(key))

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        """The states as they stand: nothing changes them later."""
        return {key: self.sessions[key] for key in session_ids if key in self.sessions}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        """Install what was exported."""
        self.sessions.update({each.session_id: each.state for each in sessions})

    async def retire_session(self, session_id: str) -> None:
        """Free a session."""
        self.sessions.pop(session_id, None)

    def change(self, key: str, rng: random.Random) -> None:
        """One tool call."""
        self.sessions[key] = changed(self.sessions[key], rng)


class RevisedOffice(Office):
    """The same with the optional hook that tells what changed."""

    def __init__(self, sessions: Mapping[str, Any]) -> None:
        self._numbers = count(1)
        self._revisions = dict.fromkeys(sessions, 0)
        super().__init__(sessions)

    def session_revisions(self) -> Mapping[str, int]:
        """A number per session, another one after each change."""
        return self._revisions

    def change(self, key: str, rng: random.Random) -> None:
        super().change(key, rng)
        self._revisions[key] = next(self._numbers)

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        await super().restore_sessions(sessions)
        for each in sessions:
            self._revisions[each.session_id] = next(self._numbers)


class Traffic:
    """Requests on an office: so many sessions change per second, evenly; and one that only reads, again and again.

    changes: done so far. longest: seconds of the slowest request since `take_longest`, of any kind.
    """

    def __init__(self, office: Office, share: float, rng: random.Random) -> None:
        self.changes = 0
        self._office = office
        self._rate = share * len(office.sessions)
        self._rng = rng
        self._keys = list(office.sessions)
        self._longest = 0.0
        self._running: asyncio.Task[None] | None = None

    def take_longest(self) -> float:
        """The slowest request since the last call of this; a request that is still held counts at its end."""
        longest, self._longest = self._longest, 0.0
        return longest

    def start(self) -> None:
        """Begin."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End, once what was asked is answered."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
            self._running = None

    async def _run(self) -> None:
        begun, asked = time.monotonic(), 0
        calls: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(LOOK_INTERVAL)
                due = int((time.monotonic() - begun) * self._rate) - asked
                asked += due
                for change in [False] + [True] * due:
                    call = asyncio.get_running_loop().create_task(self._call(self._rng.choice(self._keys), change))
                    calls.add(call)
                    call.add_done_callback(calls.discard)
        finally:
            if calls:
                await asyncio.wait(calls)

    async def _call(self, key: str, change: bool) -> None:
        begun = time.monotonic()
        path = "/send_email" if change else "/search_emails"
        visit = await self._office.owner.enter(GateRequest("POST", path, headers={"cookie": f"session={key}"}))
        try:
            if change:
                self._office.change(key, self._rng)
                self.changes += 1
        finally:
            visit.leave()
            self._longest = max(self._longest, time.monotonic() - begun)
