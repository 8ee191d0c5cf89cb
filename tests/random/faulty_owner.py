"""Any state owner with hooks that fail, hang, or hang and do not hear a cancel, when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.control import (
    Budget,
    Closing,
    CommitExtra,
    EpisodeListKind,
    Opening,
    OwnerPort,
    Pace,
    Precopied,
    RecordBatch,
    StateOwner,
)
from gym_ckpt_grpc.control.ports import HookFailed
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import PrepareReport
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.telemetry.catalogue import Instrument

OK, FAIL, HANG, STUBBORN = "ok", "fail", "hang", "stubborn"
MODES = (OK, FAIL, HANG, STUBBORN)
HOOKS = ("close", "open", "export", "stage", "activate", "discard", "retire", "delete")


class Step:
    """One hook. inside: how many calls of it are under way. failed: whether the last one that ended did."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mode = OK
        self.inside = 0
        self.failed = False
        self._changed = asyncio.Event()

    def steer(self, mode: str) -> None:
        """Change the mode; what hangs goes on."""
        self.mode = mode
        self._changed.set()
        self._changed = asyncio.Event()

    async def enter(self) -> None:
        self.inside += 1
        try:
            while self.mode in (HANG, STUBBORN):
                await self._pause()
            self.failed = self.mode == FAIL
            if self.failed:
                raise HookFailed(f"the {self.name} hook fails on purpose")
        finally:
            self.inside -= 1

    async def _pause(self) -> None:
        changed = self._changed
        try:
            await changed.wait()
        except asyncio.CancelledError:
            if self.mode != STUBBORN:
                raise
            await changed.wait()


class FaultyOwner:
    """Passes everything on to `inner`, each hook through its Step.

    exported is told (checkpoint id, records, left_out) of each export that came to its end, freed of each retire that
    did. failed_retires: the episodes whose last retire did not.
    """

    def __init__(self, inner: StateOwner) -> None:
        self.inner = inner
        self.steps = {name: Step(name) for name in HOOKS}
        self.exporting: Callable[[], str] = lambda: ""
        self.exported: Callable[[str, Sequence[Record], Sequence[EpisodeId]], None] = lambda *_: None
        self.freed: Callable[[EpisodeId], None] = lambda _: None
        self.failed_retires: set[EpisodeId] = set()

    @property
    def kind(self) -> ParticipantKind:
        return self.inner.kind

    def attach(self, port: OwnerPort) -> None:
        self.inner.attach(port)

    async def close_admission(self, closing: Closing) -> None:
        await self.inner.close_admission(closing)
        await self.steps["close"].enter()

    async def open_admission(self, opening: Opening) -> None:
        await self.steps["open"].enter()
        await self.inner.open_admission(opening)

    def gauges(self) -> Mapping[Instrument, float]:
        return self.inner.gauges()

    def is_ready(self) -> bool:
        return self.inner.is_ready()

    def report(self, limit: int) -> PrepareReport:
        return self.inner.report(limit)

    def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        return self.inner.list_episodes(which)

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        checkpoint_id = self.exporting()
        await self.steps["export"].enter()
        records: list[Record] = []
        left_out: list[EpisodeId] = []
        async for batch in self.inner.export(scope):
            records += batch.records
            left_out += batch.left_out
            yield batch
        self.exported(checkpoint_id, records, left_out)

    async def precopy(self, pace: Pace) -> Precopied:
        return await self.inner.precopy(pace)

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> Any:
        await self.steps["stage"].enter()
        return await self.inner.stage(records, scope)

    async def activate(self, staged: Any) -> None:
        await self.steps["activate"].enter()
        await self.inner.activate(staged)

    async def discard(self, staged: Any) -> None:
        await self.steps["discard"].enter()
        await self.inner.discard(staged)

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        self.failed_retires.discard(episode)
        try:
            await self.steps["retire"].enter()
            await self.inner.retire(episode, budget)
        except Exception:
            self.failed_retires.add(episode)
            raise
        self.freed(episode)

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        self.inner.check_forget(rollout_id, through_attempt)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        self.inner.forget(rollout_id, through_attempt)

    def restored_pending(self) -> frozenset[EpisodeId]:
        return self.inner.restored_pending()

    async def delete_restored(self, episode: EpisodeId) -> None:
        await self.steps["delete"].enter()
        await self.inner.delete_restored(episode)

    async def release_exported(self, episodes: Sequence[EpisodeId]) -> None:
        await self.inner.release_exported(episodes)

    def commit_extra(self, records: Sequence[Record]) -> CommitExtra:
        return self.inner.commit_extra(records)

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        self.inner.write_ended(checkpoint_id, durable)

    def accept_manifest_extra(self, extra: Mapping[str, Any]) -> None:
        self.inner.accept_manifest_extra(extra)

    def status_extra(self) -> Mapping[str, str]:
        return self.inner.status_extra()
