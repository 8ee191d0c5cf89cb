"""Servers under test behind one face: begin episodes, move them, end them, and know what each holds.

Every episode counts to `n`; a moving one blocks until its next `step`, which ends at a boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_ckpt_grpc.control import StateOwner
from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.participants import (
    AgentOwner,
    EnvironmentOwner,
    EpisodeContext,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    RestoredSession,
    RestoredState,
    SessionContext,
)
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.testing import FakeOwner
from tests.participants.fakes import App, Call, call

if TYPE_CHECKING:
    from tests.random.world import World

Clock = Callable[[], float]
FINISH, RESTART, STEP = "finish", "restart", "step"


@dataclass
class Outside:
    """What outlives a process of the server: a directory of its own, and what else there is, by name."""

    directory: Path
    kept: dict[str, Any] = field(default_factory=dict)


class Subject:
    """One server. Nothing here waits: what is held is held in a task.

    lists_only: whether it refuses scope `all`. moves: what else can happen to it, by the names of operations.
    """

    owner: StateOwner
    lists_only = False
    moves: Sequence[str] = ()

    def __init__(self, clock: Clock, outside: Outside) -> None:
        raise NotImplementedError

    def is_open(self) -> bool:
        raise NotImplementedError

    def here(self, rollout_id: str) -> list[EpisodeId]:
        """What is alive of a rollout, or restored and not started."""
        raise NotImplementedError

    def floor(self, rollout_id: str) -> int:
        """The first attempt of a rollout that its disk allows."""
        return 0

    def start(self, episode: EpisodeId) -> None:
        raise NotImplementedError

    def arrive(self, episode: EpisodeId, choice: int) -> None:
        """Like `start`, in a way that `choice` decides."""
        self.start(episode)

    def stir(self, choice: int) -> None:
        """Something that `choice` decides happens to what runs, or to what the server needs."""

    def step(self, episode: EpisodeId) -> None:
        raise NotImplementedError

    def finish(self, episode: EpisodeId) -> None:
        raise NotImplementedError

    def restart(self, episode: EpisodeId) -> None:
        """It cannot be captured from here on, where there is such a thing."""

    def value(self, record: Record) -> int:
        """What a record says of its episode; equal after a restore."""
        raise NotImplementedError

    def expected(self, episode: EpisodeId) -> int | None:
        """What a record of it must say, or None if this server cannot tell."""
        return None

    def faults(self) -> set[str]:
        """Faults of its own in force, as `what:mode`."""
        return set()

    def hangs(self) -> bool:
        """Whether something it waits for in a hook hangs."""
        return False

    def calm(self) -> None:
        """Whatever the server needs works again."""

    def check(self, world: World) -> None:
        """What must hold after each operation."""

    def check_export(self, world: World, records: Sequence[Record]) -> None:
        """What must hold of an export that has just ended."""

    def published(self, checkpoint_id: str, records: Sequence[Record]) -> None:
        """A manifest was found on disk."""

    async def check_end(self, world: World) -> None:
        """What must hold once nothing is wrong any more and all time has passed."""

    async def end(self) -> None:
        """The process ends."""


class Scripted(Subject):
    """A FakeOwner, moved by hand."""

    def __init__(self, clock: Clock, outside: Outside) -> None:
        self.fake = FakeOwner()
        self.owner: StateOwner = self.fake
        self._held: list[EpisodeId] = []

    def is_open(self) -> bool:
        return self.fake.open

    def here(self, rollout_id: str) -> list[EpisodeId]:
        return [episode for episode in self.fake.live if episode.rollout_id == rollout_id]

    def start(self, episode: EpisodeId) -> None:
        if not self.fake.open or self.fake.port.marks.refuses(episode):
            return
        if episode in self.fake.live:
            self.fake.start(episode)
        else:
            self.fake.add(episode.capture_key, running=True, state={"n": 0})

    def step(self, episode: EpisodeId) -> None:
        if episode in self.fake.running:
            self.fake.live[episode] = {"n": self.fake.live[episode]["n"] + 1}
            self.fake.park(episode)
        elif self.fake.open and episode in self.fake.live and episode not in self.fake.pending:
            self.fake.running.add(episode)

    def finish(self, episode: EpisodeId) -> None:
        if episode in self.fake.running:
            self.fake.finish(episode)

    def restart(self, episode: EpisodeId) -> None:
        if self.fake.open and episode in self.fake.running:
            self.fake.running.discard(episode)
            self.fake.restarts.add(episode)

    def value(self, record: Record) -> int:
        return int(record.decode("state")["n"])

    def expected(self, episode: EpisodeId) -> int | None:
        return int(self.fake.live[episode]["n"])


class Loops(Subject):
    """Episodes that are coroutines, each moved by the words in its queue. at: the last boundary of each."""

    def __init__(self) -> None:
        self.queues: dict[EpisodeId, asyncio.Queue[str]] = {}
        self.at: dict[EpisodeId, int] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Any) -> None:
        async def quiet() -> None:
            try:
                await work
            except ControlError:
                return

        task = asyncio.ensure_future(quiet())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def say(self, episode: EpisodeId, word: str) -> None:
        if (queue := self.queues.get(episode)) is not None and queue.empty():
            queue.put_nowait(word)

    async def end(self) -> None:
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Environment(Loops):
    """Episodes whose steps are `wait` steps."""

    def __init__(self, clock: Clock, outside: Outside) -> None:
        super().__init__()
        self.real = EnvironmentOwner(clock=clock)
        self.owner: StateOwner = self.real

    def is_open(self) -> bool:
        return not self.real.admission.closed

    def here(self, rollout_id: str) -> list[EpisodeId]:
        return self.real._here(rollout_id)

    def start(self, episode: EpisodeId) -> None:
        self.spawn(self.real.run(episode, {"task": episode.rollout_id}, self._protocol))

    async def _protocol(self, ctx: EpisodeContext) -> None:
        queue = self.queues[ctx.episode] = asyncio.Queue()
        n = ctx.restored["n"] if ctx.restored else 0
        try:
            while True:
                self.at[ctx.episode] = n
                await ctx.boundary({"n": n})
                async with ctx.step("act", "wait"):
                    word = await queue.get()
                    if word == RESTART:
                        await ctx.mark_restart()
                if word == FINISH:
                    return
                n += 1
        finally:
            if self.queues.get(ctx.episode) is queue:
                del self.queues[ctx.episode]

    def step(self, episode: EpisodeId) -> None:
        self.say(episode, STEP)

    def finish(self, episode: EpisodeId) -> None:
        self.say(episode, FINISH)

    def restart(self, episode: EpisodeId) -> None:
        self.say(episode, RESTART)

    def value(self, record: Record) -> int:
        return int(record.decode("boundary")["n"])

    def expected(self, episode: EpisodeId) -> int | None:
        return self.at[episode] if episode in self.queues else None


class Agent(Loops):
    """Native sessions, one per episode, with one activation each."""

    def __init__(self, clock: Clock, outside: Outside) -> None:
        super().__init__()
        self.real = AgentOwner(self, clock=clock)
        self.owner: StateOwner = self.real
        self.states: dict[str, Any] = {}
        self.keys: dict[EpisodeId, str] = {}

    def is_open(self) -> bool:
        return not self.real.admission.closed

    def here(self, rollout_id: str) -> list[EpisodeId]:
        return list(self.real._state._here(rollout_id))

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        return {key: self.states[key] for key in keys if key in self.states}

    async def restore_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        for each in sessions:
            self.states[each.key] = each.state
            self.keys[each.episode] = each.key

    async def retire_session(self, key: str) -> None:
        self.states.pop(key, None)

    def start(self, episode: EpisodeId) -> None:
        self.spawn(self._begin(episode, self.keys.setdefault(episode, episode.capture_key)))

    async def _begin(self, episode: EpisodeId, key: str) -> None:
        async def build() -> Any:
            self.states[key] = {"of": key}
            return "seeded"

        await self.real.seed(episode, key, None, build)
        await self.real.invoke(episode, key, self._loop)

    async def _loop(self, session: SessionContext, state: Any) -> int:
        queue = self.queues[session.episode] = asyncio.Queue()
        n = state["n"] if state else 0
        try:
            while True:
                self.at[session.episode] = n
                await session.boundary({"n": n})
                if await queue.get() == FINISH:
                    break
                n += 1
        finally:
            if self.queues.get(session.episode) is queue:
                del self.queues[session.episode]
        self.spawn(self.real.close_session(session.episode, session.key, lambda: self.retire_session(session.key)))
        return n

    def step(self, episode: EpisodeId) -> None:
        self.say(episode, STEP)

    def finish(self, episode: EpisodeId) -> None:
        self.say(episode, FINISH)

    def value(self, record: Record) -> int:
        boundary = record.decode("boundary") if "boundary" in record.payloads else None
        return int(boundary["n"]) if boundary else 0

    def expected(self, episode: EpisodeId) -> int | None:
        return self.at[episode] if episode in self.queues else None


class Resources(Subject):
    """Sessions of a resources server with a counter each, over its middleware."""

    settings = ResourcesSettings(mode=ResourcesMode.EXPORTED)

    def __init__(self, clock: Clock, outside: Outside) -> None:
        self.real = ResourcesOwner(self, self.settings, clock=clock)
        self.owner: StateOwner = self.real
        self.app = App({"/seed_session": self._seed, "/add": self._add, "/close_session": self._close})
        self.served = CheckpointMiddleware(self.app, self.real.gate())
        self.counters: dict[str, int] = {}
        self.keys: dict[EpisodeId, str] = {}
        self.going: dict[str, asyncio.Event] = {}
        self.calls: list[Call] = []

    def is_open(self) -> bool:
        return not self.real.admission.closed

    def here(self, rollout_id: str) -> list[EpisodeId]:
        return list(self.real._state._here(rollout_id))

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        return {key: {"n": self.counters[key]} for key in session_ids if key in self.counters}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        for each in sessions:
            assert each.episode is not None
            self.counters[each.session_id] = each.state["n"]
            self.keys[each.episode] = each.session_id

    async def retire_session(self, session_id: str) -> None:
        self.counters.pop(session_id, None)

    async def _seed(self, scope: MutableMapping[str, Any], body: bytes) -> Any:
        self.counters.setdefault(_session(scope), 0)
        return 200, {}, None

    async def _add(self, scope: MutableMapping[str, Any], body: bytes) -> Any:
        key = _session(scope)
        going = self.going[key] = asyncio.Event()
        try:
            await going.wait()
            if key in self.counters:
                self.counters[key] += 1
        finally:
            if self.going.get(key) is going:
                del self.going[key]
        return 200, {}, None

    async def _close(self, scope: MutableMapping[str, Any], body: bytes) -> Any:
        self.counters.pop(_session(scope), None)
        return 200, {}, None

    def _call(self, episode: EpisodeId, path: str) -> None:
        key = self.keys.setdefault(episode, f"s.{episode.capture_key}")
        self.calls = [each for each in self.calls if not each.task.done()]
        headers = {"cookie": f"session={key}"}
        self.calls.append(call(self.served, f"/rollout/{episode}{path}", {}, headers=headers))

    def start(self, episode: EpisodeId) -> None:
        self._call(episode, "/seed_session")

    def step(self, episode: EpisodeId) -> None:
        key = self.keys.get(episode, "")
        if key in self.going:
            self.going[key].set()
        elif self.is_open() and key in self.counters:
            self._call(episode, "/add")

    def finish(self, episode: EpisodeId) -> None:
        if self.keys.get(episode) in self.counters:
            self._call(episode, "/close_session")

    def value(self, record: Record) -> int:
        return int(record.decode("state")["n"])

    def expected(self, episode: EpisodeId) -> int | None:
        return self.counters.get(self.keys.get(episode, ""))

    async def end(self) -> None:
        tasks = [each.task for each in self.calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _session(scope: MutableMapping[str, Any]) -> str:
    return str(dict(scope["headers"])[b"cookie"].decode()).removeprefix("session=")
