"""`EnvironmentOwner`: the episodes of an environment server. Source: participants section 6.

A `/run` handler calls `owner.run(episode, task, protocol)`; `protocol(ctx)` walks the episode's steps, records
boundaries, and continues at `ctx.restored`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import (
    Closing,
    EpisodeListKind,
    InvalidState,
    Opening,
    OwnerDefaults,
    OwnerPort,
    RecordBatch,
)
from gym_ckpt_grpc.participants.admission import HELD, MAX_WAITING, Admission, Held
from gym_ckpt_grpc.participants.blocking import Blocking, Clock
from gym_ckpt_grpc.participants.episode_context import CLEANUP_LIMIT, EpisodeContext
from gym_ckpt_grpc.participants.episode_runs import EpisodeLimits, run_episode
from gym_ckpt_grpc.participants.gates import RouteGate
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.overlap import check_overlap, targets_of
from gym_ckpt_grpc.participants.records import EnvironmentRecord
from gym_ckpt_grpc.participants.reports import batches, covers, make_report, run_side_by_side
from gym_ckpt_grpc.participants.slices import in_slices
from gym_ckpt_grpc.participants.steps import Live, StepTracker, value_of
from gym_ckpt_grpc.participants.task_identity import IdentityOf, TaskDigests
from gym_ckpt_grpc.participants.work_counts import WorkCounts
from gym_ckpt_grpc.protocol.errors import RetireIncomplete
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import PrepareReport
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.telemetry.catalogue import HELD_RESPONSES, Instrument

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """How an environment runs its episodes.

    task_identity: the part of a task that a replacement must share; the whole task by default. boundaries: False
    for protocols that record none, whose episodes are restarts. slots: episodes at a time, or None. episode_limit:
    seconds an episode may take, parked time not counted, or None. cleanup_limit: seconds for all of its cleanup.
    """

    task_identity: IdentityOf = lambda task: task
    boundaries: bool = True
    slots: int | None = None
    episode_limit: float | None = None
    cleanup_limit: float = CLEANUP_LIMIT
    max_waiting: int = MAX_WAITING


class EnvironmentOwner(OwnerDefaults):
    """Owns the step and latest boundary of each live episode, and restored boundaries that wait for their `/run`."""

    kind = ParticipantKind.ENVIRONMENT

    def __init__(
        self,
        settings: EnvironmentSettings | None = None,
        *,
        names: DataPlaneNames | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.settings = settings or EnvironmentSettings()
        self.names = names or DataPlaneNames()
        self.admission = Admission(max_waiting=self.settings.max_waiting, clock=clock)
        self._blocking = Blocking(clock)
        self._steps = StepTracker(self.admission, self._blocking)
        self._work = WorkCounts(self.admission, "turns")
        self._digests: dict[Live, TaskDigests] = {}
        self._restored: dict[str, EnvironmentRecord] = {}  # by rollout: the overlap rule allows one of each
        slots = self.settings.slots
        self._slots = asyncio.Semaphore(slots) if slots is not None else None

    # ---- the data plane

    async def run(
        self, episode: EpisodeId, task: Mapping[str, Any], protocol: Callable[[EpisodeContext], Awaitable[T]]
    ) -> T:
        """Run an episode to its end and give what `protocol` returns.

        Held while a checkpoint is open; continues at the restored boundary if there is one. Raises StaleAttempt
        for a retired attempt, InvalidArgument for another task than the checkpointed one (one violation per field)
        or an episode that runs already, TimeoutError past `episode_limit`.
        """
        digests = TaskDigests.of(self.settings.task_identity(task))
        async with AsyncExitStack() as stack:
            if self._slots is not None:
                await stack.enter_async_context(self._slots)
            live, restored = await self.admission.admit(lambda: self._begin(episode, digests), episode)
            context = EpisodeContext(episode, task, restored, live, self._steps, self.names)
            limits = EpisodeLimits(self.settings.episode_limit, self.settings.cleanup_limit)
            try:
                return await run_episode(self._steps, live, context, protocol, limits)
            finally:
                self._digests.pop(live, None)

    def _begin(self, episode: EpisodeId, digests: TaskDigests) -> tuple[Live, Any] | Literal[Held.HELD]:
        """The order matters: a refused begin must own nothing, and never end the live episode of its key."""
        self.admission.check_mark(episode)
        record = self._restored_of(episode)
        if self.admission.closed:
            return HELD
        if record is not None:
            digests.check(episode, TaskDigests(record.task_digest, record.task_field_digests))
        boundary = record.boundary if record else None
        live = self._steps.begin(episode, episode, boundary=boundary, restart=not self.settings.boundaries)
        self._digests[live] = digests
        if record is not None:
            del self._restored[episode.rollout_id]
        return live, boundary

    def _restored_of(self, episode: EpisodeId) -> EnvironmentRecord | None:
        record = self._restored.get(episode.rollout_id)
        return record if record is not None and record.episode == episode else None

    def gate(self) -> RouteGate:
        """The gate of an environment server's middleware: every route that is not declared a bypass is held."""
        return RouteGate(self.admission, self.names)

    # ---- StateOwner

    def attach(self, port: OwnerPort) -> None:
        self.admission.attach(port)

    async def close_admission(self, closing: Closing) -> None:
        self.admission.close()
        self._steps.close()
        self._work.closed(closing.checkpoint_id)

    async def open_admission(self, opening: Opening) -> None:
        self.admission.open()
        self._steps.open()

    def is_ready(self) -> bool:
        return not self._blocking

    def report(self, limit: int) -> PrepareReport:
        counts = {"episodes": len(self._steps.live), **self.admission.counts()}
        return make_report(limit, self._blocking, self._steps.restarts(), counts)

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        found = {
            EpisodeListKind.BLOCKING: self._blocking.episodes,
            EpisodeListKind.RESTART: self._steps.restarts,
            EpisodeListKind.RESTORED_PENDING: self.restored_pending,
        }[which]()
        for batch in batches(list(found)):
            yield batch

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        self._work.begin_export()
        taken = [self._record_of(live, boundary) for live, boundary in self._steps.exported() if live.episode in scope]
        taken += [record for record in self._restored.values() if record.episode in scope]
        async for records in in_slices(record.to_record() for record in taken):
            yield RecordBatch(records)

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        self._work.write_ended(checkpoint_id, durable)

    def _record_of(self, live: Live, boundary: Any) -> EnvironmentRecord:
        digests = self._digests[live]
        if boundary is not None:
            self._work.take(live.episode, live.turns)
        return EnvironmentRecord(live.episode, digests.whole, digests.fields, value_of(boundary, live.episode))

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> dict[EpisodeId, EnvironmentRecord]:
        check_overlap(scope, self.admission, self._here)
        staged: dict[EpisodeId, EnvironmentRecord] = {}
        for record, target in targets_of(records, scope):
            if target in staged:
                raise InvalidState(f"{record.episode} has two records", record.episode)
            source = EnvironmentRecord.from_record(record)
            staged[target] = EnvironmentRecord(target, source.task_digest, source.task_field_digests, source.boundary)
        return staged

    async def activate(self, staged: dict[EpisodeId, EnvironmentRecord]) -> None:
        self._restored.update((episode.rollout_id, record) for episode, record in staged.items())

    async def discard(self, staged: dict[EpisodeId, EnvironmentRecord]) -> None:
        return None

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        self.admission.wake(episode.rollout_id)
        restored = self._restored.get(episode.rollout_id)
        if restored is not None and covers(episode, restored.episode):
            del self._restored[episode.rollout_id]
        covered = [live for live in self._steps.of_rollout(episode.rollout_id) if covers(episode, live.episode)]
        await run_side_by_side(self._steps.retire(live, budget) for live in covered)

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        live = self._steps.of_rollout(rollout_id)
        left = [each.episode for each in live if each.retired and each.episode.attempt <= through_attempt]
        if left:
            raise RetireIncomplete(f"{left[0]} has not ended yet", episodes=left)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset(record.episode for record in self._restored.values())

    async def delete_restored(self, episode: EpisodeId) -> None:
        if self._restored_of(episode) is not None:
            del self._restored[episode.rollout_id]

    def gauges(self) -> Mapping[Instrument, float]:
        return {**self.admission.gauges(), HELD_RESPONSES: self._steps.held_ends}

    def _here(self, rollout_id: str) -> list[EpisodeId]:
        live = [each.episode for each in self._steps.of_rollout(rollout_id)]
        restored = self._restored.get(rollout_id)
        return [*live, restored.episode] if restored is not None else live
