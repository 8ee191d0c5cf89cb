"""Real participants on loopback, whose RPCs a test can hold up, fail, repeat and edit."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gym_ckpt_grpc.auth import Authenticator
from gym_ckpt_grpc.control import (
    Budget,
    Closing,
    ControlPlane,
    EpisodeListKind,
    Opening,
    OwnerDefaults,
    OwnerPort,
    RecordBatch,
)
from gym_ckpt_grpc.control.authenticating import AuthServerInterceptor
from gym_ckpt_grpc.control.interceptors import ErrorsInterceptor
from gym_ckpt_grpc.control.servicer import ParticipantServicer
from gym_ckpt_grpc.coordinator import Coordinator, Fleet, Server
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import Blocker, BlockerReason, PrepareReport
from gym_ckpt_grpc.storage import Record, encode
from gym_ckpt_grpc.telemetry import CallServerInterceptor, MetricsObserver, Telemetry
from gymckpt.v1 import participant_pb2_grpc

ENV, MODEL, AGENT, RES = (
    ParticipantKind.ENVIRONMENT,
    ParticipantKind.POLICY_MODEL,
    ParticipantKind.AGENT,
    ParticipantKind.RESOURCES,
)
KINDS = {"env": ENV, "model": MODEL, "agent": AGENT, "res": RES}

Inner = Callable[[Any, Any], Awaitable[Any]]
Action = Callable[[Inner, Any, Any], Awaitable[Any]]
"""Stands in the place of one RPC: (the real handler, request, context) -> reply."""

UNARY = ("GetStatus", "Prepare", "Capture", "Commit", "Resume", "Restore", "Retire", "Forget", "RenewLease")


class Owner(OwnerDefaults):
    """State of episodes in memory. running: those that block; restarts: those that cannot be captured."""

    def __init__(self, kind: ParticipantKind) -> None:
        self.kind = kind
        self.live: dict[EpisodeId, Any] = {}
        self.running: set[EpisodeId] = set()
        self.restarts: set[EpisodeId] = set()
        self.pending: set[EpisodeId] = set()
        self.left_out: set[EpisodeId] = set()
        self.stuck: set[EpisodeId] = set()
        self.open = True
        self.opened = asyncio.Event()
        """Set by an opening after a closing."""
        self.openings: list[Opening] = []
        self.install_error: Exception | None = None
        self.port: OwnerPort | None = None

    def attach(self, port: OwnerPort) -> None:
        self.port = port

    def park(self, *episodes: EpisodeId) -> None:
        """Executions reach a boundary."""
        self.running.difference_update(episodes)
        assert self.port is not None
        self.port.changed()

    def run(self, episode: EpisodeId) -> None:
        """An execution leaves its boundary: readiness is lost."""
        self.running.add(episode)
        assert self.port is not None
        self.port.changed()

    async def close_admission(self, closing: Closing) -> None:
        self.open = False
        self.opened.clear()

    async def open_admission(self, opening: Opening) -> None:
        self.open = True
        self.opened.set()
        self.openings.append(opening)

    def is_ready(self) -> bool:
        return not self.running

    def report(self, limit: int) -> PrepareReport:
        blockers = [Blocker(BlockerReason.RUNNING, 1.0, episode=e, place="step") for e in sorted(self.running)]
        restarts = sorted(self.restarts)
        counts = {"sessions": len(self.live)}
        return PrepareReport(tuple(blockers[:limit]), len(blockers), tuple(restarts[:1000]), len(restarts), counts)

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        chosen = {
            EpisodeListKind.RESTART: self.restarts,
            EpisodeListKind.BLOCKING: self.running,
            EpisodeListKind.RESTORED_PENDING: self.pending,
        }[which]
        if chosen:
            yield sorted(chosen)

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        chosen = [e for e in sorted(self.live) if e in scope and e not in self.left_out]
        records = [Record(e, "scripted", payloads={"state": encode(self.live[e])}) for e in chosen]
        yield RecordBatch(records, [e for e in scope if e in self.left_out])

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> dict[EpisodeId, Any]:
        if self.install_error:
            raise self.install_error
        return {scope.targets[record.episode]: record.decode("state") for record in records}

    async def activate(self, staged: dict[EpisodeId, Any]) -> None:
        self.live.update(staged)
        self.pending.update(staged)

    async def discard(self, staged: dict[EpisodeId, Any]) -> None:
        for episode in staged:
            self.live.pop(episode, None)

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        if episode in self.stuck:
            raise RetireHookFailed("the hook failed")
        for e in [e for e in self.live if e.rollout_id == episode.rollout_id and e.attempt <= episode.attempt]:
            self.live.pop(e)
            self.pending.discard(e)
        self.park(*[e for e in self.running if e.rollout_id == episode.rollout_id])

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset(self.pending)

    async def delete_restored(self, episode: EpisodeId) -> None:
        self.pending.discard(episode)
        self.live.pop(episode, None)


class RetireHookFailed(Exception):
    """What a broken retire hook raises."""


class Servicer(ParticipantServicer):
    """The real servicer behind the node's script."""

    def __init__(self, plane: ControlPlane, node: Node) -> None:
        super().__init__(plane)
        self._node = node

    async def ListEpisodes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._node.note("ListEpisodes", request)
        replies = [reply async for reply in super().ListEpisodes(request, context)]
        action = self._node.next_action("ListEpisodes")

        async def inner(request: Any, context: Any) -> Any:
            return replies

        for reply in await action(inner, request, context) if action else replies:
            yield reply


def _unary(method: str) -> Any:
    async def handler(self: Servicer, request: Any, context: Any) -> Any:
        inner = getattr(ParticipantServicer, method).__get__(self)
        return await self._node.serve(method, inner, request, context)

    return handler


for _method in UNARY:
    setattr(Servicer, _method, _unary(_method))


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a journal. what: `begin`, `end` or `cancelled`."""

    node: str
    method: str
    what: str
    at: float


class Journal(list[Entry]):
    """What happened at all nodes, in order."""

    def begun(self, method: str) -> list[str]:
        """Names of the nodes that were called, in order."""
        return [entry.node for entry in self if entry.method == method and entry.what == "begin"]

    def under_way(self) -> list[Entry]:
        """Calls that began and have not ended."""
        open_calls: list[Entry] = []
        for entry in self:
            if entry.what == "begin":
                open_calls.append(entry)
            else:
                first = next(e for e in open_calls if (e.node, e.method) == (entry.node, entry.method))
                open_calls.remove(first)
        return open_calls


class Node:
    """One participant process, as far as a test is concerned.

    script: per RPC the actions of its next calls; always: per RPC one for every call. calls: requests per RPC.
    """

    def __init__(self, name: str, kind: ParticipantKind, root: Path, journal: Journal, **options: Any) -> None:
        self.name = name
        self.kind = kind
        self.root = root
        self.journal = journal
        self.script: dict[str, list[Action]] = defaultdict(list)
        self.always: dict[str, Action] = {}
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.service = options.pop("service", name)
        self.instance = options.pop("instance", "0")
        self.declared: dict[str, Any] = options.pop("declared", {})
        self.authenticator: Authenticator | None = options.pop("authenticator", None)
        self.telemetry: Telemetry | None = options.pop("telemetry", None)
        self.identity_options: dict[str, Any] = options
        self.address = ""
        self._server: grpc.aio.Server | None = None

    @property
    def place(self) -> str:
        return f"{self.kind}/{self.service}/{self.instance}"

    @property
    def episodes(self) -> set[EpisodeId]:
        return set(self.owner.live)

    def add(self, *episodes: EpisodeId) -> None:
        for episode in episodes:
            self.owner.live[episode] = {"at": self.name, "turn": episode.attempt}

    async def start(self) -> None:
        """A new process, with a new incarnation and no state, at the same address."""
        self.owner = Owner(self.kind)
        identity = ParticipantIdentity(self.kind, self.service, self.instance, **self.identity_options)
        self.identity = identity
        self.plane = ControlPlane(self.owner, identity, roots=[str(self.root)], telemetry=self.telemetry)
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorsInterceptor(identity, MetricsObserver())]
        if self.authenticator:
            interceptors.append(AuthServerInterceptor(self.authenticator))
        if self.telemetry:
            interceptors.append(CallServerInterceptor(MetricsObserver(self.telemetry), self.telemetry))
        server = grpc.aio.server(interceptors=interceptors, options=(("grpc.so_reuseport", 0),))
        participant_pb2_grpc.add_ParticipantServiceServicer_to_server(Servicer(self.plane, self), server)
        port = server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """The process is gone, all connections with it."""
        if self._server:
            await self._server.stop(0)
            self._server = None
            await self.plane.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def note(self, method: str, request: Any) -> None:
        self.calls[method].append(request)

    def next_action(self, method: str) -> Action | None:
        return self.script[method].pop(0) if self.script[method] else self.always.get(method)

    async def serve(self, method: str, inner: Inner, request: Any, context: Any) -> Any:
        self.note(method, request)
        self._write(method, "begin")
        what = "end"
        try:
            action = self.next_action(method)
            return await (action(inner, request, context) if action else inner(request, context))
        except asyncio.CancelledError:
            what = "cancelled"
            raise
        finally:
            self._write(method, what)

    def _write(self, method: str, what: str) -> None:
        self.journal.append(Entry(self.name, method, what, asyncio.get_running_loop().time()))

    @property
    def server(self) -> Server:
        declared = {"kind": self.kind, "service": self.service, "address": self.address, **self.declared}
        return Server(**declared)

    @property
    def phase(self) -> str:
        return self.plane.status().phase.name


class Gate:
    """A point that a test can wait for and hold up."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    def hold(self) -> Action:
        """Hold one call before its handler runs."""

        async def action(inner: Inner, request: Any, context: Any) -> Any:
            self.entered.set()
            await self.open.wait()
            return await inner(request, context)

        return action


def refuse(error: ControlError) -> Action:
    """Answer with a typed error; the handler does not run."""

    async def action(inner: Inner, request: Any, context: Any) -> Any:
        raise error

    return action


def broken(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, *, after: bool = False) -> Action:
    """Answer with a bare status, as a broken connection does. after: once the handler has run (a lost reply)."""

    async def action(inner: Inner, request: Any, context: Any) -> Any:
        if after:
            await inner(request, context)
        await context.abort(code, "scripted")

    return action


def edit(change: Callable[[Any], None]) -> Action:
    """Change the reply."""

    async def action(inner: Inner, request: Any, context: Any) -> Any:
        reply = await inner(request, context)
        change(reply)
        return reply

    return action


def then(before: Callable[[], Any]) -> Action:
    """Do something, then handle the call."""

    async def action(inner: Inner, request: Any, context: Any) -> Any:
        before()
        return await inner(request, context)

    return action


class Nodes:
    """A fleet: `env`, `model`, `agent`, `res`, each on a server of its own, and coordinators for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.journal = Journal()
        self.all: dict[str, Node] = {}

    async def start(self, *names: str, **options: Any) -> Nodes:
        for name in names or KINDS:
            kind = KINDS[name.partition("-")[0]]
            node = self.all[name] = Node(name, kind, self.root, self.journal, **options)
            await node.start()
        return self

    async def stop(self) -> None:
        for node in self.all.values():
            await node.stop()

    def __getitem__(self, name: str) -> Node:
        return self.all[name]

    def __iter__(self) -> Any:
        return iter(self.all.values())

    def fleet(self, **options: Any) -> Fleet:
        return Fleet([node.server for node in self], **options)

    def coordinator(self, **options: Any) -> Coordinator:
        options = {"root": str(self.root), "controller_id": "trainer", "exit_timeout": 10.0, **options}
        return Coordinator(options.pop("fleet", None) or self.fleet(), **options)

    def phases(self) -> set[str]:
        return {node.phase for node in self}

    def all_open(self) -> bool:
        return self.phases() == {"IDLE"} and all(node.owner.open for node in self)

    def add(self, *episodes: EpisodeId) -> list[EpisodeId]:
        """Episodes that live at every node."""
        for node in self:
            node.add(*episodes)
        return list(episodes)


@contextmanager
def nodes_elsewhere(root: Path) -> Iterator[Nodes]:
    """A fleet whose event loop is not the test's: it lives on when that one is torn down."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    nodes = Nodes(root)
    run(nodes.start())
    try:
        yield nodes
    finally:
        run(nodes.stop())
        run(loop.shutdown_asyncgens())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def episodes(count: int, attempt: int = 0) -> list[EpisodeId]:
    return [EpisodeId(f"r{i}", attempt) for i in range(count)]
