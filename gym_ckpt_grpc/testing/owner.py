"""A state owner that does what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.control import (
    Budget,
    Closing,
    EpisodeListKind,
    Opening,
    OwnerDefaults,
    OwnerPort,
    RecordBatch,
)
from gym_ckpt_grpc.protocol.errors import InvalidPhase, StaleAttempt
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import MAX_LISTED, Blocker, BlockerReason, PrepareReport
from gym_ckpt_grpc.storage import Record, encode
from gym_ckpt_grpc.telemetry.catalogue import Instrument
from gym_ckpt_grpc.testing.gates import Gate

SCHEMA = "fake"
PAYLOAD = "state"
BATCH = 1000


class FakeOwner(OwnerDefaults):
    """A complete StateOwner without a data plane.

    Episodes are `live` (state by episode), of which `running` block and `restarts` cannot be captured. `pending`
    are those that a restore installed and nothing has started. `left_out` turn out to be gone at the export. Each
    hook passes its gate, which a test can hold or fail. `open` is its admission. `shown` are its gauges.
    """

    def __init__(self, kind: ParticipantKind = ParticipantKind.RESOURCES) -> None:
        self.kind = kind
        self.live: dict[EpisodeId, Any] = {}
        self.running: set[EpisodeId] = set()
        self.restarts: set[EpisodeId] = set()
        self.pending: set[EpisodeId] = set()
        self.left_out: list[EpisodeId] = []
        self.open = True
        self.openings: list[Opening] = []
        self.retired: list[EpisodeId] = []
        self.released: list[EpisodeId] = []
        self.extra: dict[str, str] = {}
        self.shown: dict[Instrument, float] = {}
        self.reports = 0
        self.closes, self.opens, self.exports, self.stages = Gate(), Gate(), Gate(), Gate()
        self.activates, self.retires, self.deletes, self.releases = Gate(), Gate(), Gate(), Gate()
        self._port: OwnerPort | None = None

    # ---- what a test says

    @property
    def port(self) -> OwnerPort:
        """What the control plane gave at `attach`."""
        assert self._port is not None, "this owner is not served yet"
        return self._port

    def add(self, *names: str, running: bool = False, restart: bool = False, state: Any = None) -> list[EpisodeId]:
        """Live episodes under these capture keys: at a boundary, or `running`, or one that restarts."""
        episodes = [EpisodeId.from_capture_key(name) for name in names]
        for episode in episodes:
            self.live[episode] = {"name": episode.rollout_id} if state is None else state
            if running:
                self.running.add(episode)
            if restart:
                self.restarts.add(episode)
        self.changed()
        return episodes

    def park(self, episode: EpisodeId) -> None:
        """An execution reaches its boundary."""
        self.running.discard(episode)
        self.changed()

    def start(self, episode: EpisodeId) -> Any:
        """The first call of a restored episode: it is pending no more. Gives its state; KeyError if it has none."""
        if self.port.marks.refuses(episode):
            raise StaleAttempt(f"attempt {episode} was retired", episodes=[episode])
        self.pending.discard(episode)
        return self.live[episode]

    def finish(self, episode: EpisodeId) -> None:
        """An episode ends by itself."""
        self._drop(episode)
        self.changed()

    def changed(self) -> None:
        """Tell the control plane that readiness may have changed; harmless while open or not served."""
        if self._port is not None and not self.open:
            self._port.changed()

    def release_all(self) -> None:
        """No gate holds or fails any more."""
        for gate in vars(self).values():
            if isinstance(gate, Gate):
                gate.fail(None)
                gate.release()

    def _drop(self, episode: EpisodeId) -> None:
        self.live.pop(episode, None)
        for known in (self.running, self.restarts, self.pending):
            known.discard(episode)

    # ---- StateOwner

    def attach(self, port: OwnerPort) -> None:
        self._port = port

    async def close_admission(self, closing: Closing) -> None:
        self.open = False
        await self.closes.step()

    async def open_admission(self, opening: Opening) -> None:
        await self.opens.step()
        self.openings.append(opening)
        self.open = True

    def is_ready(self) -> bool:
        return not self.running

    def report(self, limit: int) -> PrepareReport:
        self.reports += 1
        blockers = [Blocker(BlockerReason.RUNNING, 1.0, episode=e, place="step") for e in sorted(self.running)]
        restarts = sorted(self.restarts)
        return PrepareReport(
            tuple(blockers[:limit]),
            len(blockers),
            tuple(restarts[:MAX_LISTED]),
            len(restarts),
            {"episodes": len(self.live)},
        )

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        found = {
            EpisodeListKind.RESTART: self.restarts,
            EpisodeListKind.BLOCKING: self.running,
            EpisodeListKind.RESTORED_PENDING: self.pending,
        }[which]
        ordered = sorted(found)
        for begin in range(0, len(ordered), BATCH):
            yield ordered[begin : begin + BATCH]

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        await self.exports.step()
        records = [
            Record(episode, SCHEMA, payloads={PAYLOAD: encode(state)})
            for episode, state in sorted(self.live.items())
            if episode in scope and episode not in self.restarts and episode not in self.left_out
        ]
        yield RecordBatch(records, [episode for episode in self.left_out if episode in scope])

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> dict[EpisodeId, Any]:
        rollouts = {source.rollout_id for source in scope.targets}
        alive = [episode for episode in sorted(self.live) if episode.rollout_id in rollouts]
        if alive:
            raise InvalidPhase(f"{len(alive)} episodes of the scope are alive here", episodes=alive)
        await self.stages.step()
        return {scope.targets[record.episode]: record.decode(PAYLOAD) for record in records}

    async def activate(self, staged: dict[EpisodeId, Any]) -> None:
        await self.activates.step()
        self.live.update(staged)
        self.pending.update(staged)

    async def discard(self, staged: dict[EpisodeId, Any]) -> None:
        for episode in staged:
            self._drop(episode)

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        await self.retires.step()
        covered = [e for e in self.live if e.rollout_id == episode.rollout_id and e.attempt <= episode.attempt]
        for attempt in covered:
            self._drop(attempt)
        self.retired.append(episode)
        self.changed()

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset(self.pending)

    async def delete_restored(self, episode: EpisodeId) -> None:
        await self.deletes.step()
        if episode in self.pending:
            self._drop(episode)

    async def release_exported(self, episodes: Sequence[EpisodeId]) -> None:
        await self.releases.step()
        self.released += episodes

    def status_extra(self) -> Mapping[str, str]:
        return dict(self.extra)

    def gauges(self) -> Mapping[Instrument, float]:
        return self.shown
