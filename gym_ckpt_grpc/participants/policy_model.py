"""`PolicyModelOwner`: the policy model server's part in a checkpoint. Source: participants sections 7 and 8.

Without a capture ledger it has no records: what it owns is the gate, and which restored episodes nobody has
called yet.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import GenerationBackends, Ledger
from gym_ckpt_grpc.control.ports import (
    Closing,
    CommitExtra,
    EpisodeListKind,
    Opening,
    OwnerDefaults,
    OwnerPort,
    RecordBatch,
)
from gym_ckpt_grpc.participants.admission import MAX_WAITING, Admission, Visit
from gym_ckpt_grpc.participants.blocking import Blocking, Clock
from gym_ckpt_grpc.participants.cut_sweeps import CutSweeper
from gym_ckpt_grpc.participants.generation_call import GenerationCall
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.policy_gate import PolicyGate
from gym_ckpt_grpc.participants.policy_settings import PolicyModelSettings
from gym_ckpt_grpc.participants.policy_state import PolicyState, StagedPolicy
from gym_ckpt_grpc.participants.reports import batches, make_report
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.protocol.errors import InvalidArgument, RetireIncomplete, Violation
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import PrepareReport
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.telemetry.catalogue import HELD_RESPONSES, Instrument

RESTORE_LIMIT = 60.0
"""Seconds for a `stage` that no close came before, as in a test of an owner alone."""


class PolicyModelOwner(OwnerDefaults):
    """Owns admission of tagged generation calls, undelivered replies, cuts, ledger rows, and restored targets.

    ledger: of this server's calls, or None. backends: the inference workers behind it, by name; none: no cuts.
    max_waiting: requests held at most. clock: seconds of a monotonic clock.
    """

    kind = ParticipantKind.POLICY_MODEL

    def __init__(
        self,
        *,
        ledger: Ledger | None = None,
        backends: GenerationBackends | None = None,
        settings: PolicyModelSettings | None = None,
        names: DataPlaneNames | None = None,
        max_waiting: int = MAX_WAITING,
        clock: Clock = time.monotonic,
    ) -> None:
        self.names = names or DataPlaneNames()
        self.settings = settings or PolicyModelSettings()
        self.admission = Admission(max_waiting=max_waiting, clock=clock)
        self._blocking = Blocking(clock)
        self._budget = Budget(RESTORE_LIMIT, clock)
        asked = dict(backends or {}) if ledger is not None else {}  # without a ledger no record could name a cut
        self._state = PolicyState(
            self.admission,
            ledger,
            asked,
            calls_of=self._calls_of,
            release_retry_for=self.settings.release_retry_for,
            clock=clock,
        )
        self._gate = PolicyGate(
            self.admission,
            self._blocking,
            self.names,
            hooks=self._state,
            backends=asked,
            cut_tries=self.settings.cut_tries,
        )
        self._sweeper = CutSweeper(self._gate.cuts, asked, self.settings, clock=clock, port=self._port)
        self._closed_for = ""

    def gate(self) -> PolicyGate:
        """The gate of the server's middleware."""
        return self._gate

    def begin_generation(self, visit: Visit, body: Mapping[str, Any], *, backend: str, model: str) -> GenerationCall:
        """A handler knows what a call asks for, and of whom; see `PolicyGate.begin_generation`."""
        return self._gate.begin_generation(visit, body, backend=backend, model=model)

    def call_named(self, visit: Visit, call_id: str) -> None:
        """A server that makes its own call ids says which one a call has; see `PolicyGate.call_named`."""
        self._gate.call_named(visit, call_id)

    async def close(self) -> None:
        """End background work. Only at the end of the process."""
        await self._sweeper.close()
        await self._state.close()

    def _calls_of(self, rollout_id: str) -> list[Ticket]:
        return self._gate.of_rollout(rollout_id)

    def _port(self) -> OwnerPort:
        return self.admission.port

    # ---- StateOwner

    def attach(self, port: OwnerPort) -> None:
        self.admission.attach(port)

    async def close_admission(self, closing: Closing) -> None:
        self.admission.close()
        self._budget = closing.budget
        self._closed_for = closing.checkpoint_id
        self._state.closed(closing.checkpoint_id)
        self._sweeper.start(closing)

    async def open_admission(self, opening: Opening) -> None:
        await self._state.before_opening()
        self.admission.open()
        self._sweeper.stop()
        self._gate.open()
        self._closed_for = ""
        self._state.opened()

    def is_ready(self) -> bool:
        return not self._blocking

    def report(self, limit: int) -> PrepareReport:
        counts = {**self._gate.counts(), **self.admission.counts(), **self._state.counts()}
        return make_report(limit, self._blocking, (), counts)

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        found = {
            EpisodeListKind.BLOCKING: self._blocking.episodes,
            EpisodeListKind.RESTORED_PENDING: self._state.targets,
        }.get(which)
        for batch in batches(found() if found else ()):
            yield batch

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        """Rows and cuts of a list scope. Raises InvalidArgument for scope `all`: only the controller knows it."""
        if scope.is_all:
            problem = Violation("scope", "must be a list for a policy model server")
            raise InvalidArgument("a policy model server needs the scope as a list", violations=[problem])
        async for batch in self._state.export(scope):
            yield batch

    def commit_extra(self, records: Sequence[Record]) -> CommitExtra:
        return self._state.commit_extra(records)

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        if durable and checkpoint_id == self._closed_for:
            self._gate.cuts.settled()
        self._state.write_ended(checkpoint_id, durable)

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> StagedPolicy:
        return await self._state.stage(records, scope, self._budget)

    async def activate(self, staged: StagedPolicy) -> None:
        await self._state.activate(staged)

    async def discard(self, staged: StagedPolicy) -> None:
        await self._state.discard(staged)

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        self._state.drop_covered(episode)
        self.admission.wake(episode.rollout_id)
        await self._gate.retire(episode, budget)
        await self._state.fence(episode, budget)

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        calls = self._gate.of_rollout(rollout_id)
        left = [each.episode for each in calls if each.retired and each.episode.attempt <= through_attempt]
        if left:
            raise RetireIncomplete(f"a call of {left[0]} has not ended yet", episodes=left)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        self._state.forget(EpisodeId(rollout_id, through_attempt))

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset(self._state.targets())

    async def delete_restored(self, episode: EpisodeId) -> None:
        await self._state.delete(episode)

    def gauges(self) -> Mapping[Instrument, float]:
        return {**self.admission.gauges(), HELD_RESPONSES: self._gate.held_replies}
