"""`RestartOnlyOwner`: an agent whose state nobody can capture. Its episodes start over after a crash.

It needs nothing of the agent but the gate in front of its application, whoever builds that. Source: participants
section 9.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal

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
from gym_ckpt_grpc.participants.admission import HELD, MAX_WAITING, Admission, GateRequest, Held, Reply, Visit
from gym_ckpt_grpc.participants.blocking import Blocking, Clock
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.overlap import check_overlap
from gym_ckpt_grpc.participants.reports import batches, covers, make_report, run_side_by_side
from gym_ckpt_grpc.participants.steps import Live, StepTracker
from gym_ckpt_grpc.protocol.errors import ControlError, RetireIncomplete, RolloutIdRequired
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import PrepareReport
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.telemetry.catalogue import Instrument

SEED_PATH = "/seed_session"
WORK_PATHS = ("/run", "/v1/responses")
"""Ends of the paths whose requests are an episode's work."""
_PASS = Visit()


class RestartOnlyOwner(OwnerDefaults):
    """Owns no state: it tracks the requests of each episode, reports their episodes as restarts, and retires them.

    It is the gate of its server's middleware as well. It never closes: only seeds wait, so that the set of restarts
    stands still while a checkpoint is open. seed_paths: ends of the paths that seed a session.
    """

    kind = ParticipantKind.AGENT

    def __init__(
        self,
        *,
        names: DataPlaneNames | None = None,
        seed_paths: Sequence[str] = (SEED_PATH,),
        max_waiting: int = MAX_WAITING,
        clock: Clock = time.monotonic,
    ) -> None:
        self._names = names or DataPlaneNames()
        self._seed_paths = tuple(seed_paths)
        self.admission = Admission(max_waiting=max_waiting, clock=clock)
        self._blocking = Blocking(clock)
        self._steps = StepTracker(self.admission, self._blocking)
        self._numbers = count(1)
        self._begun_while_closed: set[Live] = set()

    # ---- the gate

    @property
    def names(self) -> DataPlaneNames:
        return self._names

    def gate(self) -> RestartOnlyOwner:
        """The gate of the server's middleware: this owner itself."""
        return self

    async def enter(self, request: GateRequest) -> Visit:
        """Track work, hold seeds while closed, pass the rest. Raises RolloutIdRequired, StaleAttempt."""
        if not request.path.endswith((*self._seed_paths, *WORK_PATHS)):
            return _PASS
        if request.episode is None:
            raise RolloutIdRequired(f"{request.path} names no rollout")
        episode = request.episode
        return await self.admission.admit(lambda: self._attempt(request, episode), episode)

    def reply_headers(self) -> Mapping[str, str]:
        return {}

    def refused(self, error: ControlError) -> None:
        self.admission.refused(error)

    def _attempt(self, request: GateRequest, episode: EpisodeId) -> Visit | Literal[Held.HELD]:
        self.admission.check_mark(episode)
        seed = request.path.endswith(self._seed_paths)
        if seed and self.admission.closed:
            return HELD
        live = self._steps.begin((request.path, next(self._numbers)), episode, restart=True)
        if self.admission.closed:
            self._begun_while_closed.add(live)
        return _Tracked(self, live, seed=seed)

    def ended(self, live: Live) -> None:
        """A tracked request has ended."""
        self._begun_while_closed.discard(live)
        self._steps.end(live)

    # ---- StateOwner

    def attach(self, port: OwnerPort) -> None:
        self.admission.attach(port)

    async def close_admission(self, closing: Closing) -> None:
        self.admission.close()
        self._begun_while_closed.clear()

    async def open_admission(self, opening: Opening) -> None:
        self._begun_while_closed.clear()
        self.admission.open()

    def is_ready(self) -> bool:
        return not self._blocking

    def report(self, limit: int) -> PrepareReport:
        counts = {"requests": len(self._steps.live), **self.admission.counts()}
        return make_report(limit, self._blocking, self._restarts(), counts)

    def _restarts(self) -> list[EpisodeId]:
        """Episodes with work that was under way at the close: a scope sent already may name what began later."""
        return list(dict.fromkeys(self._listed()))

    def _listed(self) -> Iterator[EpisodeId]:
        for live in self._steps.live.values():
            if not live.retired and live not in self._begun_while_closed:
                yield live.episode

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        found = {EpisodeListKind.BLOCKING: self._blocking.episodes, EpisodeListKind.RESTART: self._restarts}.get(which)
        for batch in batches(found() if found else ()):
            yield batch

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        """Nothing."""
        nothing: tuple[RecordBatch, ...] = ()
        for batch in nothing:
            yield batch

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> None:
        """Refuse any record: this server could do nothing with it."""
        check_overlap(scope, self.admission, self._here)
        for record in records:
            raise InvalidState(f"a restart-only agent has no use for the record of {record.episode}", record.episode)

    def _here(self, rollout_id: str) -> list[EpisodeId]:
        return [live.episode for live in self._steps.of_rollout(rollout_id)]

    async def activate(self, staged: Any) -> None:
        return None

    async def discard(self, staged: Any) -> None:
        return None

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        self.admission.wake(episode.rollout_id)
        covered = [live for live in self._steps.of_rollout(episode.rollout_id) if covers(episode, live.episode)]
        await run_side_by_side(self._steps.retire(live, budget) for live in covered)

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        live = self._steps.of_rollout(rollout_id)
        left = [each.episode for each in live if each.retired and each.episode.attempt <= through_attempt]
        if left:
            raise RetireIncomplete(f"a request of {left[0]} has not ended yet", episodes=left)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset()

    async def delete_restored(self, episode: EpisodeId) -> None:
        return None

    def status_extra(self) -> Mapping[str, str]:
        return {"mode": "restart_only"}

    def gauges(self) -> Mapping[Instrument, float]:
        return self.admission.gauges()


class _Tracked(Visit):
    """One request of an episode, from admission to its end."""

    __slots__ = ("_live", "_owner", "_seed")

    def __init__(self, owner: RestartOnlyOwner, live: Live, *, seed: bool) -> None:
        self._owner = owner
        self._live = live
        self._seed = seed

    async def starting(self, reply: Reply) -> None:
        if self._seed:
            reply.add[self._owner.names.restart_header] = "1"

    def absorbs(self) -> bool:
        return self._live.runs.absorb()

    def leave(self) -> None:
        self._owner.ended(self._live)
