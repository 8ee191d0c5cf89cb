"""`PolicyModelOwner`: the policy model server's part in a checkpoint. Source: participants section 7.

Without a capture ledger it has no records: what it owns is the gate, and which restored episodes nobody has
called yet.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import Closing, EpisodeListKind, Opening, OwnerDefaults, OwnerPort, RecordBatch
from gym_ckpt_grpc.participants.admission import MAX_WAITING, Admission
from gym_ckpt_grpc.participants.blocking import Blocking, Clock
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.overlap import check_overlap
from gym_ckpt_grpc.participants.policy_gate import PolicyGate
from gym_ckpt_grpc.participants.reports import batches, covers, make_report
from gym_ckpt_grpc.protocol.errors import InvalidArgument, InvalidPhase, RetireIncomplete, Violation
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import PrepareReport
from gym_ckpt_grpc.storage import Record


class PolicyModelOwner(OwnerDefaults):
    """Owns admission of tagged generation calls, undelivered replies, and restored targets nobody called yet."""

    kind = ParticipantKind.POLICY_MODEL

    def __init__(
        self, *, names: DataPlaneNames | None = None, max_waiting: int = MAX_WAITING, clock: Clock = time.monotonic
    ) -> None:
        self.names = names or DataPlaneNames()
        self.admission = Admission(max_waiting=max_waiting, clock=clock)
        self._blocking = Blocking(clock)
        self._targets: dict[str, EpisodeId] = {}  # by rollout: the overlap rule allows one of each
        self._gate = PolicyGate(self.admission, self._blocking, self.names, admitted=self._started)

    def gate(self) -> PolicyGate:
        """The gate of the server's middleware."""
        return self._gate

    def _started(self, episode: EpisodeId) -> None:
        if self._targets.get(episode.rollout_id) == episode:
            del self._targets[episode.rollout_id]

    # ---- StateOwner

    def attach(self, port: OwnerPort) -> None:
        self.admission.attach(port)

    async def close_admission(self, closing: Closing) -> None:
        self.admission.close()

    async def open_admission(self, opening: Opening) -> None:
        self.admission.open()
        self._gate.open()

    def is_ready(self) -> bool:
        return not self._blocking

    def report(self, limit: int) -> PrepareReport:
        return make_report(limit, self._blocking, (), {**self._gate.counts(), **self.admission.counts()})

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        found = {
            EpisodeListKind.BLOCKING: self._blocking.episodes,
            EpisodeListKind.RESTORED_PENDING: self._targets.values,
        }.get(which)
        for batch in batches(found() if found else ()):
            yield batch

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        """Nothing, as there is no ledger. Raises InvalidArgument for scope `all`: only the controller knows it."""
        if scope.is_all:
            problem = Violation("scope", "must be a list for a policy model server")
            raise InvalidArgument("a policy model server needs the scope as a list", violations=[problem])
        records: tuple[RecordBatch, ...] = ()
        for batch in records:
            yield batch

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> dict[str, EpisodeId]:
        check_overlap(scope, self.admission, self._here)
        if records:
            raise InvalidPhase(
                "this server has no capture ledger to put rows into", episodes=[each.episode for each in records]
            )
        return {target.rollout_id: target for target in scope.targets.values()}

    async def activate(self, staged: dict[str, EpisodeId]) -> None:
        self._targets.update(staged)

    async def discard(self, staged: Any) -> None:
        return None

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        self.admission.wake(episode.rollout_id)
        target = self._targets.get(episode.rollout_id)
        if target is not None and covers(episode, target):
            del self._targets[episode.rollout_id]
        await self._gate.retire(episode, budget)

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        calls = self._gate.of_rollout(rollout_id)
        left = [each.episode for each in calls if each.retired and each.episode.attempt <= through_attempt]
        if left:
            raise RetireIncomplete(f"a call of {left[0]} has not ended yet", episodes=left)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset(self._targets.values())

    async def delete_restored(self, episode: EpisodeId) -> None:
        self._started(episode)

    def _here(self, rollout_id: str) -> list[EpisodeId]:
        target = self._targets.get(rollout_id)
        calls = [ticket.episode for ticket in self._gate.of_rollout(rollout_id)]
        return [*calls, target] if target is not None else calls
