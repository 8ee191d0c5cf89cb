"""A policy server whose backends do what a script says, in virtual time: nothing here waits for real."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.control import ControlPlane
from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import (
    BackendInfo,
    Capability,
    Continuation,
    CutAck,
    CutDisposition,
    CutEvidence,
    CutPresence,
    Sweep,
    SweepHeader,
)
from gym_ckpt_grpc.control.ports import Closing
from gym_ckpt_grpc.control.work import PrepareReply
from gym_ckpt_grpc.integrations import CheckpointMiddleware, visit_of
from gym_ckpt_grpc.participants import PolicyModelOwner
from gym_ckpt_grpc.participants.admission import Admission
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.cut_sweeps import CutSweeper
from gym_ckpt_grpc.participants.generation_call import GenerationCall
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.policy_gate import PolicyGate
from gym_ckpt_grpc.participants.policy_settings import PolicyModelSettings
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.machine import Call as ControlCall
from gym_ckpt_grpc.protocol.phases import Operation
from gym_ckpt_grpc.telemetry import Telemetry
from tests.participants.fakes import App, Call, FakePort, call
from tests.random.virtual_time import VirtualLoop, run

RESPONSES = "/v1/responses"
STREAM = "/v1/messages"
READY = 8.0
"""Seconds that closes of this rig give for getting ready; sweeps may take half of them."""
WAITING = {"x-gymckpt-waiting": "1"}

Part = SweepHeader | Sequence[CutAck]
Script = Callable[[Sweep, Budget], AsyncIterator[Part]]


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a loop whose time jumps to the next timer."""

    @functools.wraps(test)
    def play(*args: Any, **kwargs: Any) -> None:
        run(lambda: test(*args, **kwargs), virtual=True)

    return play


def loop() -> VirtualLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running


async def settle() -> None:
    """All that can happen without time passing has happened."""
    await loop().settle()


def evidence(cut_id: str, **changes: Any) -> CutEvidence:
    """Complete evidence of a cut after five tokens."""
    return replace(CutEvidence(cut_id, (f"cuts/{cut_id}",), 5, "5a" * 32, 64, 1), **changes)


def finished(cut_id: str) -> CutEvidence:
    return evidence(cut_id, finish_reason="stop")


def ack(sweep: Sweep, at: int = 0, disposition: CutDisposition = CutDisposition.CUT, cut_id: str = "") -> CutAck:
    """An acknowledgement of the call at a place of the inventory, with what belongs to its disposition."""
    named = sweep.calls[at][0]
    cut_id = cut_id or f"{named.model_call_id}-{sweep.closing}.{sweep.number}"
    if disposition is CutDisposition.CUT:
        return CutAck(named, disposition, evidence=evidence(cut_id))
    if disposition is CutDisposition.FINISHED:
        return CutAck(named, disposition, evidence=finished(cut_id))
    return CutAck(named, disposition, reason="the script says so")


def answers(*dispositions: CutDisposition) -> Script:
    """Answer every call of a sweep alike; the n-th sweep with the n-th disposition, later ones with the last."""

    async def script(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        chosen = dispositions[min(sweep.number, len(dispositions)) - 1]
        yield [ack(sweep, at, chosen) for at in range(len(sweep.calls))]

    return script


async def hang(sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
    """Never answer."""
    await asyncio.Event().wait()
    yield ()


class FakeBackend:
    """One inference worker. script: what it sends after the header. sweeps: what it was asked, with the loop's time."""

    def __init__(self, name: str, script: Script | None = None) -> None:
        self.name = name
        self.script = script or answers(CutDisposition.CUT)
        self.capabilities = frozenset({Capability.CUT, Capability.CONTINUE})
        self.incarnation = f"{name}-a"
        self.describes = asyncio.Event()
        """Cleared, it is slow to say who it is."""
        self.describes.set()
        self.described = 0
        self.unreachable: Exception | None = None
        self.sweeps: list[Sweep] = []
        self.times: list[float] = []
        self.released: list[str] = []

    async def describe(self, budget: Budget) -> BackendInfo:
        self.described += 1
        await self.describes.wait()
        if self.unreachable is not None:
            raise self.unreachable
        return BackendInfo(self.name, self.incarnation, "m", 1, self.capabilities)

    async def cut(self, sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        self.sweeps.append(sweep)
        self.times.append(loop().time())
        if self.unreachable is not None:
            raise self.unreachable
        yield SweepHeader(self.name, self.incarnation, f"{self.name}-{sweep.closing}.{sweep.number}")
        async for part in self.script(sweep, budget):
            yield part

    async def check(self, cuts: Sequence[CutEvidence], budget: Budget) -> list[CutPresence]:
        return [CutPresence.PRESENT for _ in cuts]

    async def release(self, cut_ids: Sequence[str], budget: Budget) -> None:
        self.released.extend(cut_ids)

    def asked(self) -> list[list[str]]:
        """The model call ids of each sweep."""
        return [[named.model_call_id for named, _ in sweep.calls] for sweep in self.sweeps]


@dataclass
class Hooks:
    """The owner's side, written down."""

    restored: dict[str, Continuation] = field(default_factory=dict)
    """Continuations by request digest."""
    leased: list[str] = field(default_factory=list)
    ended: list[tuple[str, bool]] = field(default_factory=list)
    made: list[tuple[str, str, str]] = field(default_factory=list)
    released: list[tuple[str, str]] = field(default_factory=list)
    failure: Exception | None = None
    kept_back: set[EpisodeId] = field(default_factory=set)

    def admitted(self, episode: EpisodeId) -> None:
        return None

    def held_back(self, episode: EpisodeId) -> bool:
        return episode in self.kept_back

    def lease(self, ticket: Ticket) -> Continuation | None:
        if self.failure is not None:
            raise self.failure
        self.leased.append(ticket.call_id)
        return self.restored.get(ticket.request_digest)

    def left(self, ticket: Ticket, delivered: bool) -> None:
        self.ended.append((ticket.call_id, delivered))
        if self.failure is not None:
            raise self.failure

    def cut_made(self, backend: str, cut_id: str, call_id: str) -> bool:
        self.made.append((backend, cut_id, call_id))
        return True

    def release(self, backend: str, cut_ids: Sequence[str]) -> None:
        self.released.extend((backend, cut_id) for cut_id in cut_ids)


@dataclass
class TellingPort(FakePort):
    """Sets `told` at each change."""

    told: asyncio.Event = field(default_factory=asyncio.Event)

    def changed(self) -> None:
        super().changed()
        self.told.set()


class Generation:
    """One call as the test sees it: what its handler began, and the events it waits for.

    begin, send and go let the handler begin its generation, send it to the backend, and reply.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.begin, self.send, self.go = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.call: GenerationCall | None = None
        self.own: CutEvidence | None = None
        self.status = 200
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.cleaned = asyncio.Event()
        """Set unless the handler is to be slow in ending when it is cancelled."""
        self.cleaned.set()
        self.client: Call | None = None
        self.ticket: Ticket | None = None

    @property
    def id(self) -> str:
        assert self.call is not None
        return self.call.call_id

    def finish(self, own: CutEvidence | None = None) -> None:
        """The backend replies, with coordinates if given."""
        self.own = own
        self.go.set()

    async def answered(self) -> int:
        assert self.client is not None
        return (await self.client.end()).status


class CallsRig:
    """A policy server behind a gate, whose handlers begin their generations when the test lets them."""

    def __init__(self, gate: PolicyGate) -> None:
        self.gate = gate
        self.app = App({RESPONSES: self.handle, STREAM: self.stream})
        self.served = CheckpointMiddleware(self.app, gate)
        self._coming: dict[str, Generation] = {}

    # ---- the server

    async def _generate(self, scope: MutableMapping[str, Any], body: bytes) -> Generation:
        generation = self._coming[dict(scope["headers"])[b"x-test"].decode()]
        visit = visit_of(scope)
        generation.ticket = visit if isinstance(visit, Ticket) else None
        await generation.begin.wait()
        generation.call = self.gate.begin_generation(visit, orjson.loads(body), backend=generation.backend, model="m")
        await generation.send.wait()
        generation.call.registered()
        return generation

    async def handle(self, scope: MutableMapping[str, Any], body: bytes) -> tuple[int, Mapping[str, str], Any]:
        generation = await self._generate(scope, body)
        try:
            await generation.go.wait()
        finally:
            await generation.cleaned.wait()
        assert generation.call is not None
        if generation.own is not None:
            generation.call.finished(generation.own)
        return generation.status, {"content-length": "4"}, "ok"

    async def stream(self, scope: MutableMapping[str, Any], body: bytes) -> tuple[int, Mapping[str, str], Any]:
        generation = await self._generate(scope, body)

        async def events() -> AsyncIterator[bytes]:
            while (piece := await generation.pieces.get()) is not None:
                yield piece

        return 200, {"content-type": "text/event-stream"}, events()

    # ---- the test's side

    def arrive(
        self,
        episode: EpisodeId | None,
        body: Mapping[str, Any] | None = None,
        *,
        backend: str = "b",
        path: str = RESPONSES,
        headers: Mapping[str, str] | None = None,
    ) -> Generation:
        """A request comes in, and its handler waits to begin. Its messages differ from all others' unless given."""
        generation = Generation(backend)
        name = str(len(self._coming))
        self._coming[name] = generation
        url = f"/rollout/{episode}{path}" if episode else path
        asked = {"messages": [name], **(body or {})}
        generation.client = call(self.served, url, asked, headers={**(headers or {}), "x-test": name})
        return generation

    async def running(self, episode: EpisodeId | None, body: Mapping[str, Any] | None = None, **how: Any) -> Generation:
        """A call that its backend works at."""
        generation = self.arrive(episode, body, **how)
        generation.begin.set()
        generation.send.set()
        await settle()
        return generation

    def counts(self, *names: str) -> tuple[int, ...]:
        counts = self.gate.counts()
        return tuple(counts[name] for name in names)

    def cuts(self) -> tuple[int, ...]:
        """(held, cut, cut_failed, cut_skipped)."""
        return self.counts("held", "cut", "cut_failed", "cut_skipped")

    def cut_ids(self) -> list[str]:
        """Ids of the cuts of undelivered calls, in the order of admission."""
        return [ticket.cut.evidence.cut_id for ticket in self.gate.undelivered() if ticket.cut is not None]

    @staticmethod
    async def ends(generations: Iterable[Generation]) -> list[int]:
        """Let all reply, and give the statuses."""
        listed = list(generations)
        for generation in listed:
            generation.begin.set()
            generation.send.set()
            generation.go.set()
            generation.pieces.put_nowait(None)
        return [await generation.answered() for generation in listed]


class CutsRig(CallsRig):
    """Gate and sweeper, without the owner around them."""

    def __init__(
        self,
        *backends: FakeBackend,
        settings: PolicyModelSettings | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        settings = settings or PolicyModelSettings()
        self.backends = {backend.name: backend for backend in backends}
        self.clock = loop().time
        self.admission = Admission(clock=self.clock)
        self.blocking = Blocking(self.clock)
        self.hooks = Hooks()
        gate = PolicyGate(
            self.admission,
            self.blocking,
            DataPlaneNames(),
            hooks=self.hooks,
            backends=self.backends,
            cut_tries=settings.cut_tries,
        )
        super().__init__(gate)
        self.port = TellingPort(ParticipantKind.POLICY_MODEL, telemetry=telemetry)
        self.sweeper = CutSweeper(gate.cuts, self.backends, settings, clock=self.clock, port=lambda: self.port)
        self.admission.attach(self.port)
        self._closings = 0

    def close(self, ready_within: float | None = READY, deadline: float = 1000.0) -> Closing:
        """As the owner does it. deadline: seconds of the call behind it."""
        self._closings += 1
        closing = Closing(f"ckpt-{self._closings}", self._closings, Budget(deadline, self.clock), ready_within)
        self.admission.close()
        self.sweeper.start(closing)
        return closing

    def open(self) -> None:
        self.admission.open()
        self.sweeper.stop()
        self.gate.open()

    @property
    def ready(self) -> bool:
        return not self.blocking

    async def until_ready(self) -> float:
        """Seconds of virtual time that it took. Fails as a deadlock if readiness changes without being told."""
        began = self.clock()
        while not self.ready:
            self.port.told.clear()
            await self.port.told.wait()
        return self.clock() - began

    async def finish(self, generations: Iterable[Generation]) -> list[int]:
        """Open, let all reply, and give the statuses."""
        self.open()
        return await self.ends(generations)


class PreparedRig(CallsRig):
    """A whole policy model owner with a ledger in a directory, under a control plane."""

    def __init__(self, directory: Path, *backends: FakeBackend, telemetry: Telemetry | None = None) -> None:
        self.owner = PolicyModelOwner(
            ledger=CaptureLedger(directory),
            backends={backend.name: backend for backend in backends},
            clock=loop().time,
        )
        super().__init__(self.owner.gate())
        identity = ParticipantIdentity(ParticipantKind.POLICY_MODEL, "policy")
        self.plane = ControlPlane(self.owner, identity, clock=loop().time, telemetry=telemetry)

    async def prepare(self, ready_within: float = READY, deadline: float = 600.0) -> PrepareReply:
        """deadline: of the call, which may be far away."""
        budget = Budget(deadline, loop().time)
        asked = ControlCall(Operation.PREPARE, "ckpt-1", "controller", 1)
        reply, _ = await self.plane.prepare(asked, ready_within=ready_within, lease_ttl=600.0, budget=budget)
        return reply

    async def resume(self) -> None:
        asked = ControlCall(Operation.RESUME, "ckpt-1", "controller", 1)
        await self.plane.resume(asked, keep_write=False, budget=Budget(60.0, loop().time))

    async def end(self) -> None:
        await self.plane.close()
        await self.owner.close()
