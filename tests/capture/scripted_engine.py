"""An inference worker whose calls do what a test says, behind a real GenerationService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_ckpt_grpc.auth import TokenSource
from gym_ckpt_grpc.capture import (
    AsyncTokenStore,
    CutOutcome,
    CutReference,
    FileTokenStore,
    GenerationServer,
    GrpcGenerationBackend,
    StagedCall,
    StoredCuts,
)
from gym_ckpt_grpc.control import (
    BackendInfo,
    Budget,
    CallIdentity,
    Capability,
    CutAck,
    CutPresence,
    Sweep,
    SweepHeader,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.capture.staging_rig import begin, generate, root

DIGEST = "ab" * 32
INFO = BackendInfo("inference-0", "life-1", "model", 3, frozenset(Capability) - {Capability.UNSPECIFIED})


def identity(call_id: str, **changes: Any) -> CallIdentity:
    """A call of an inventory; its ticket is named after it."""
    values: dict[str, Any] = {"ticket_id": f"t-{call_id}", "episode": EpisodeId("r1"), "request_digest": DIGEST}
    return CallIdentity(**{**values, "model_call_id": call_id, **changes})


def sweep_of(calls: Sequence[str], number: int = 1) -> Sweep:
    """A sweep over these calls."""
    return Sweep("ck", "policy", closing=1, number=number, calls=[(identity(call), 1.5) for call in calls])


@dataclass
class ScriptedEngine:
    """A `CutEngine`. uncuttable: reasons. raising: errors. hanging: calls whose cuts wait for their event.

    asked: every cut that was asked for. cancelled: those that were given up. released: ids given up.
    """

    tokens: AsyncTokenStore
    calls: dict[str, StagedCall] = field(default_factory=dict)
    uncuttable: dict[str, str] = field(default_factory=dict)
    raising: dict[str, Exception] = field(default_factory=dict)
    hanging: dict[str, asyncio.Event] = field(default_factory=dict)
    asked: list[tuple[CallIdentity, float]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    touched: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds of what was asked, cancelled or released."""
        async with asyncio.timeout(10):
            while not condition():
                self.touched.clear()
                await self.touched.wait()

    def describe(self) -> BackendInfo:
        return INFO

    async def cut(self, call: CallIdentity, age: float) -> CutOutcome:
        self.asked.append((call, age))
        self.touched.set()
        name = call.model_call_id
        if name in self.hanging:
            try:
                await self.hanging[name].wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                self.touched.set()
                raise
        if name in self.raising:
            raise self.raising[name]
        if name in self.uncuttable:
            return CutOutcome.uncuttable(self.uncuttable[name])
        if name not in self.calls:
            return CutOutcome.not_found()
        return CutOutcome.of(await self.calls[name].cut())

    async def check(self, cuts: Sequence[CutReference]) -> list[CutPresence]:
        return await StoredCuts(self.tokens).check(cuts)

    async def release(self, cut_ids: Sequence[str]) -> list[bool]:
        answer = await StoredCuts(self.tokens).release(cut_ids)
        self.released += cut_ids
        self.touched.set()
        return answer

    async def running(self, name: str, count: int = 2) -> StagedCall:
        """Begin a call and give it its first tokens."""
        self.calls[name] = call = await begin(root(name), self.tokens)
        generate(call, count)
        return call

    async def finished(self, name: str, count: int = 2) -> StagedCall:
        """A call that has ended."""
        call = await self.running(name, count)
        await call.complete("stop", "end")
        return call


@dataclass(frozen=True)
class Worker:
    """A scripted engine that is served, and a client of it. directory: of its token store."""

    engine: ScriptedEngine
    server: GenerationServer
    backend: GrpcGenerationBackend
    directory: Path

    async def sweep(self, calls: Sequence[str], *, number: int = 1, seconds: float = 10.0) -> dict[str, CutAck]:
        """The acknowledgement of each call of a sweep; checks that there is one for each and how they come."""
        _, batches = await self.parts(calls, number=number, seconds=seconds)
        acks = [ack for batch in batches for ack in batch]
        assert sorted(ack.call.model_call_id for ack in acks) == sorted(calls)
        return {ack.call.model_call_id: ack for ack in acks}

    async def parts(
        self, calls: Sequence[str], *, number: int = 1, seconds: float = 10.0
    ) -> tuple[SweepHeader, list[Sequence[CutAck]]]:
        """The parts of a sweep's answer."""
        parts = [part async for part in self.backend.cut(sweep_of(calls, number), Budget(seconds))]
        header, batches = parts[0], parts[1:]
        assert isinstance(header, SweepHeader)
        return header, [batch for batch in batches if not isinstance(batch, SweepHeader)]


@asynccontextmanager
async def worker(
    directory: Path, *, address: str = "127.0.0.1:0", token: TokenSource | None = None, **serving: Any
) -> AsyncIterator[Worker]:
    """Serve a scripted engine over a token store on disk. token: of the client. `serving` goes to the server."""
    store = FileTokenStore(directory)
    tokens = AsyncTokenStore(store)
    engine = ScriptedEngine(tokens)
    async with GenerationServer(engine, address, **serving) as server:
        backend = GrpcGenerationBackend("inference-0", server.address, token=token)
        yield Worker(engine, server, backend, directory)
        await backend.close()
    await tokens.close()
    store.close()
