"""The checkpointed state of a policy model server: rows of its ledger, cuts, and restored targets nobody called yet.

Source: participants sections 7.2, 8.4 and 8.5.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import Continuation, GenerationBackends, Ledger, Row, StagedRows
from gym_ckpt_grpc.control.ports import CommitExtra, InvalidState, RecordBatch
from gym_ckpt_grpc.participants.admission import Admission
from gym_ckpt_grpc.participants.backend_looks import BackendLooks
from gym_ckpt_grpc.participants.blocking import Clock
from gym_ckpt_grpc.participants.cut_release import MadeCuts, Releaser
from gym_ckpt_grpc.participants.hooks import within
from gym_ckpt_grpc.participants.ledger_thread import LedgerThread
from gym_ckpt_grpc.participants.overlap import check_overlap, targets_of
from gym_ckpt_grpc.participants.policy_records import CutRecord, PolicyModelRecord, staging_index
from gym_ckpt_grpc.participants.reports import batches, covers
from gym_ckpt_grpc.participants.restored_cuts import RestoredCut, RestoredCuts
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.participants.work_counts import WorkCounts
from gym_ckpt_grpc.protocol.errors import InvalidPhase
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.storage import Record

log = logging.getLogger("gym_ckpt_grpc.participants")

EXPORT_BATCH = 256
"""Attempts whose ledgers are read and frozen at a time."""


@dataclass(slots=True)
class StagedPolicy:
    """What a Restore has built aside. tokens: of a target's rows. activating: whether any of it may be live."""

    targets: tuple[EpisodeId, ...]
    cuts: Mapping[EpisodeId, Sequence[RestoredCut]] = field(default_factory=dict)
    rows: StagedRows | None = None
    tokens: Mapping[EpisodeId, int] = field(default_factory=dict)
    activating: bool = False


class PolicyState:
    """Exports, installs and frees the state behind a gate. Implements CallHooks: what calls do to it.

    calls_of: the calls under way of a rollout, in the order they were admitted. Without a ledger there are no
    records, so nothing is cut and backends are not asked.
    """

    def __init__(
        self,
        admission: Admission,
        ledger: Ledger | None,
        backends: GenerationBackends,
        *,
        calls_of: Callable[[str], Sequence[Ticket]],
        release_retry_for: float,
        clock: Clock,
    ) -> None:
        self._admission = admission
        self._ledger = ledger
        self._thread = LedgerThread(ledger) if ledger is not None else None
        self._calls_of = calls_of
        self._targets: dict[str, EpisodeId] = {}  # by rollout: the overlap rule allows one of each
        self._deleting: set[EpisodeId] = set()
        self._earlier: dict[int, set[str]] = {}  # by ticket: call ids under which it was begun before
        self._restored = RestoredCuts()
        self._looks = BackendLooks(backends, self._restored, clock=clock, lost=self._redone)
        self._releaser = Releaser(backends, release_retry_for, clock=clock)
        self.made = MadeCuts(self._releaser.release)
        self._work = WorkCounts(admission, "tokens")
        self._regenerating: dict[int, RestoredCut] = {}  # by ticket: the cut that it could not go on from

    # ---- CallHooks

    def admitted(self, episode: EpisodeId) -> None:
        """Its first admitted call starts a restored target; started, it is never deleted."""
        self._remove_target(episode)

    def held_back(self, episode: EpisodeId) -> bool:
        return episode in self._deleting

    def lease(self, ticket: Ticket) -> Continuation | None:
        cut = self._restored.find(ticket)
        if cut is None:
            return None
        backend = self._looks.known(ticket.backend)
        leased = backend and self._restored.lease(ticket, self._admission.port.identity.service, backend)
        if not leased:
            self._regenerating[ticket.number] = cut
            self._looks.look()  # it may have newer weights by now, or not have answered yet
        return leased or None

    def left(self, ticket: Ticket, delivered: bool) -> None:
        used = self._restored.settle(ticket.call_id, delivered)
        if used is not None:
            self._work.add("continued", used.record.prefix_tokens)
        elif self._regenerating and (cut := self._regenerating.pop(ticket.number, None)) and delivered:
            self._redone(ticket.episode, cut)
        if ticket in self._calls_of(ticket.episode.rollout_id):  # it begins again, under another call id
            self._earlier.setdefault(ticket.number, set()).add(ticket.call_id)
        else:
            self._earlier.pop(ticket.number, None)

    def cut_made(self, backend: str, cut_id: str, call_id: str) -> bool:
        if not self._releaser.keep(backend, cut_id):
            return False
        self.made.made((backend, cut_id))
        return True

    def release(self, backend: str, cut_ids: Sequence[str]) -> None:
        self.made.replaced(backend, cut_ids)

    def _redone(self, episode: EpisodeId, cut: RestoredCut) -> None:
        """The tokens of a cut are generated again: they count once."""
        if not cut.redone:
            cut.redone = True
            self._work.redone(episode, cut.record.prefix_tokens)

    # ---- checkpoints

    def closed(self, checkpoint_id: str) -> None:
        """Admission has closed."""
        self.made.begin(checkpoint_id)
        self._work.closed(checkpoint_id)

    def opened(self) -> None:
        """Admission is open."""
        self.made.opened()
        self._work.opened()

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        """The fate of a checkpoint's records is known."""
        self.made.ended(checkpoint_id, durable)
        self._work.write_ended(checkpoint_id, durable)

    # ---- export

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        """A record for each attempt of a list scope that has rows or cuts; retired ones are left out.

        Raises StaleAttempt for one that is fenced without a mark: of its rows nothing is known, least that there are
        none.
        """
        if self._thread is None:
            return
        self.made.begin_export()
        self._work.begin_export()
        for listed in batches(scope, EXPORT_BATCH):
            episodes = [episode for episode in listed if not self._admission.refuses(episode)]
            left_out = self._undelivered_ids(episodes)
            rows = await self._thread.run(self._thread.ledger.export, episodes)
            # Looked at again: a call that began while the ledger was read may have a row in it.
            left_out |= self._undelivered_ids(episodes)
            cuts = {episode: self._cuts_of(episode) for episode in episodes}
            records, tokens = await self._thread.run(self._freeze, rows, cuts, left_out)
            for episode, amount in tokens.items():
                self._work.take(episode, amount)
            yield RecordBatch(records)

    def _undelivered_ids(self, episodes: Iterable[EpisodeId]) -> set[str]:
        undelivered = [ticket for episode in episodes for ticket in self._undelivered(episode)]
        earlier = [self._earlier.get(ticket.number, set()) for ticket in undelivered]
        return {ticket.call_id for ticket in undelivered}.union(*earlier) - {""}

    def _undelivered(self, episode: EpisodeId) -> list[Ticket]:
        calls = self._calls_of(episode.rollout_id)
        return [ticket for ticket in calls if ticket.episode == episode and ticket.undelivered]

    def _cuts_of(self, episode: EpisodeId) -> list[CutRecord]:
        """For each request the cut of its latest call that has one, else a restored cut that nobody has used."""
        found = {ticket.request_digest: ticket for ticket in self._undelivered(episode) if ticket.cut is not None}
        cuts = [self._cut_record(ticket) for ticket in found.values()]
        return cuts + [cut for cut in self._restored.unused(episode) if cut.request_digest not in found]

    def _cut_record(self, ticket: Ticket) -> CutRecord:
        cut = ticket.cut
        assert cut is not None
        self.made.name((cut.backend, cut.evidence.cut_id))
        evidence = cut.evidence
        return CutRecord(
            request_digest=ticket.request_digest,
            service=self._admission.port.identity.service,
            model=ticket.model,
            backend=cut.backend,
            incarnation_id=cut.incarnation_id,
            snapshot_id=cut.snapshot_id,
            source_capture_key=ticket.episode.capture_key,
            source_call_id=ticket.call_id,
            cut_id=evidence.cut_id,
            staging_keys=tuple(evidence.staging_keys),
            prefix_tokens=evidence.prefix_tokens,
            prefix_digest=evidence.prefix_digest,
            output_limit=evidence.output_limit,
            weight_version=evidence.weight_version,
            finish_reason=evidence.finish_reason,
            stop_reason=evidence.stop_reason,
        )

    def _freeze(
        self,
        rows: Mapping[EpisodeId, Sequence[Row]],
        cuts: Mapping[EpisodeId, Sequence[CutRecord]],
        left_out: set[str],
    ) -> tuple[list[Record], dict[EpisodeId, int]]:
        """Records, and the tokens in each. On the ledger's thread."""
        assert self._ledger is not None
        records = []
        tokens = {}
        for episode, own_cuts in cuts.items():
            kept = [row for row in rows.get(episode, ()) if self._ledger.call_id(row) not in left_out]
            if kept or own_cuts:
                records.append(PolicyModelRecord(episode, kept, own_cuts).to_record())
                tokens[episode] = self._tokens_of(kept) + sum(cut.prefix_tokens for cut in own_cuts)
        return records, tokens

    def _tokens_of(self, rows: Iterable[Row]) -> int:
        """0 where the ledger cannot tell: what is only counted fails no checkpoint and no restore."""
        assert self._ledger is not None
        try:
            return sum(map(self._ledger.tokens, rows))
        except Exception:
            log.debug("the tokens of captured calls are not counted: the ledger cannot tell", exc_info=True)
            return 0

    def commit_extra(self, records: Sequence[Record]) -> CommitExtra:
        """The index of the staging keys that records name. Called in a thread."""
        return staging_index(records, self._ledger.staging_keys) if self._ledger is not None else CommitExtra()

    # ---- install

    async def stage(self, records: Sequence[Record], scope: RestoreScope, budget: Budget) -> StagedPolicy:
        """Check all and build it aside. Raises InvalidPhase, StaleAttempt, InvalidState."""
        check_overlap(scope, self._admission, self._here)
        pairs = targets_of(records, scope)
        staged = StagedPolicy(tuple(scope.targets.values()))
        if self._thread is None:
            if records:
                episodes = [each.episode for each in records]
                raise InvalidPhase("this server has no capture ledger to put rows into", episodes=episodes)
            return staged
        rows, cuts, staged.tokens = await self._thread.run(self._read, pairs)
        staged.cuts = cuts
        if wanted := [cut for of_target in cuts.values() for cut in of_target]:
            await self._looks.ask_all(wanted, budget)
        staged.rows = await self._thread.stage({target: rows.get(target, []) for target in staged.targets})
        return staged

    def _read(
        self, pairs: Sequence[tuple[Record, EpisodeId]]
    ) -> tuple[dict[EpisodeId, list[Row]], dict[EpisodeId, list[RestoredCut]], dict[EpisodeId, int]]:
        """Rows, stamped with who staged them, cuts, and tokens of the rows, by target. On the ledger's thread."""
        assert self._ledger is not None
        rows: dict[EpisodeId, list[Row]] = {}
        cuts: dict[EpisodeId, list[RestoredCut]] = {}
        for record, target in pairs:
            found = PolicyModelRecord.from_record(record)
            if target in rows:
                raise InvalidState(f"{record.episode} has two records", record.episode)
            try:
                self._ledger.check_rows(found.rows)
            except ValueError as error:
                raise InvalidState(f"the record of {record.episode} has wrong rows: {error}", record.episode) from error
            rows[target] = [self._ledger.stamped(row, record.episode) for row in found.rows]
            cuts[target] = [RestoredCut(cut) for cut in found.cuts]
        return rows, cuts, {target: self._tokens_of(of_target) for target, of_target in rows.items()}

    async def activate(self, staged: StagedPolicy) -> None:
        """Put rows, cuts and targets in place; the ledger fences the attempts they continue."""
        staged.activating = True
        if self._thread is not None and staged.rows is not None:
            await self._thread.run(self._thread.ledger.activate, staged.rows)
        for target in staged.targets:
            self._targets[target.rollout_id] = target
            cuts = staged.cuts.get(target, ())
            self._restored.install(target, cuts)
            tokens = staged.tokens.get(target, 0)
            self._work.install(target, target, tokens, brought=tokens + sum(cut.record.prefix_tokens for cut in cuts))
        self._looks.drop_lost()

    async def discard(self, staged: StagedPolicy) -> None:
        """Drop what was staged, and what of it was made live already."""
        if self._thread is not None and staged.rows is not None:
            await self._thread.run(self._thread.ledger.drop, staged.rows)
        if staged.activating:
            await self._free(staged.targets)

    async def _free(self, targets: Sequence[EpisodeId]) -> None:
        if self._thread is not None:
            await self._thread.discarding.add(targets)
        for target in targets:
            self._remove_target(target)
            self._restored.drop(target)
            self._work.drop(target)

    def _remove_target(self, episode: EpisodeId) -> None:
        if self._targets.get(episode.rollout_id) == episode:
            del self._targets[episode.rollout_id]

    # ---- opening, retire, delete

    async def before_opening(self) -> None:
        """Learn what may be offered to the calls that come next."""
        await self._looks.look_before_opening()

    def drop_covered(self, retired: EpisodeId) -> None:
        """Forget target and cuts of an attempt and of earlier ones."""
        target = self._targets.get(retired.rollout_id)
        if target is not None and covers(retired, target):
            del self._targets[retired.rollout_id]
        self._work.drop_covered(retired)
        self._restored.drop_covered(retired)

    def forget(self, through: EpisodeId) -> None:
        """The rollout has ended: no call of these attempts will go on from a restored cut."""
        self._restored.drop_covered(through)

    async def fence(self, retired: EpisodeId, budget: Budget) -> None:
        """Fence the ledger, once nothing of the attempt runs: no late row makes it anew. Raises OutOfTime."""
        if self._thread is not None:
            await within(budget, self._thread.retiring.add([retired]), f"fencing the ledger of {retired}")

    def targets(self) -> list[EpisodeId]:
        """Restored attempts that nobody has called yet."""
        return list(self._targets.values())

    async def delete(self, target: EpisodeId) -> None:
        """Free a target if nobody has called it, and leave no fence; its calls are held meanwhile.

        What fails leaves it pending.
        """
        if self._targets.get(target.rollout_id) != target or target in self._deleting:
            return
        self._deleting.add(target)
        try:
            await self._free([target])
        finally:
            self._deleting.discard(target)
            self._admission.wake(target.rollout_id)

    def _here(self, rollout_id: str) -> list[EpisodeId]:
        target = self._targets.get(rollout_id)
        calls = [ticket.episode for ticket in self._calls_of(rollout_id)]
        return [*calls, target] if target is not None else calls

    def counts(self) -> dict[str, int]:
        """restored_cuts: not used up. cuts_missing: gone when restored. cuts_unreleased: not known to be gone."""
        return {
            "restored_cuts": len(self._restored),
            "cuts_missing": self._looks.missing,
            "cuts_unreleased": self._releaser.unreleased,
        }

    async def close(self) -> None:
        """End what runs. Only at the end of the process."""
        await self._looks.close()
        await self._releaser.close()
        if self._thread is not None:
            self._thread.close()
