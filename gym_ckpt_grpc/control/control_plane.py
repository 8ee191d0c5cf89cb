"""The control plane of one participant: the asynchronous shell around the pure machine.

It asks the machine what is allowed and hands the work to its parts. No lock is held across I/O: every change of
state happens between two awaits. Work that must outlive a call runs in owned tasks; a call waits for them within
its budget. Source: protocol sections 4 to 6, participants section 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

from gym_ckpt_grpc.control.budget import Budget, Clock
from gym_ckpt_grpc.control.committing import Committing
from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.gauges import Gauges
from gym_ckpt_grpc.control.installing import Installing
from gym_ckpt_grpc.control.lease_watch import LeaseWatch
from gym_ckpt_grpc.control.operations import recorded
from gym_ckpt_grpc.control.ports import EpisodeListKind, OpeningCause, StateOwner
from gym_ckpt_grpc.control.precopying import Precopying
from gym_ckpt_grpc.control.preparing import Preparing
from gym_ckpt_grpc.control.reopening import Reopening
from gym_ckpt_grpc.control.settings import ControlSettings
from gym_ckpt_grpc.control.status import Status, build_status
from gym_ckpt_grpc.control.tasks import await_within, set_within, succeeded
from gym_ckpt_grpc.control.work import (
    Captured,
    CommitReply,
    PrepareReply,
    RestoreReply,
    ResumeReply,
    RetireReply,
    Work,
)
from gym_ckpt_grpc.protocol.errors import InvalidPhase, OutOfTime, RetireIncomplete, StaleAttempt, StateNotFound
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.machine import Call, CommitArguments, Decision, LastCheck
from gym_ckpt_grpc.protocol.phases import Operation, Phase, Verdict
from gym_ckpt_grpc.storage import CheckpointLocation, FileLayer, LocalFiles, resolve_checkpoint
from gym_ckpt_grpc.telemetry import Telemetry

BATCH = 1000
"""Episodes per message of ListEpisodes."""


class ControlPlane:
    """Prepare, Capture, Commit, Resume, Restore, Retire, Forget, RenewLease, status and lists of one participant.

    roots: `file://` URIs under which checkpoints may be read and written; none means that Commit and Restore are
    refused. telemetry: the process's own by default. Construct and use it inside the running loop. Every mutating
    method takes the Call that the machine judges and a Budget, raises typed ControlErrors, and gives (reply, replayed).
    """

    def __init__(
        self,
        owner: StateOwner,
        identity: ParticipantIdentity,
        *,
        roots: Sequence[str] = (),
        files: FileLayer | None = None,
        clock: Clock = time.monotonic,
        settings: ControlSettings | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._core = Core(
            owner,
            identity,
            roots=roots,
            files=files or LocalFiles(),
            clock=clock,
            settings=settings or ControlSettings(),
            telemetry=telemetry,
        )
        self._preparing = Preparing(self._core)
        self._committing = Committing(self._core, self._preparing)
        self._installing = Installing(self._core)
        self._reopening = Reopening(self._core)
        self._watch = LeaseWatch(self._core, self._preparing, self._reopening)
        self._precopying = Precopying(self._core)
        self._gauges = Gauges(self._core)  # telemetry holds it weakly
        self._core.recorder.watch(self._gauges)
        owner.attach(self._core)
        self._precopying.start()

    @property
    def identity(self) -> ParticipantIdentity:
        return self._core.identity

    @property
    def telemetry(self) -> Telemetry:
        """Where its spans and metrics go."""
        return self._core.recorder.telemetry

    @property
    def settings(self) -> ControlSettings:
        return self._core.settings

    async def close(self) -> None:
        """End every task. Only at the end of the process: what is open stays as it is."""
        await self._core.close()

    async def resolve(self, uri: str, field: str, *, budget: Budget) -> CheckpointLocation:
        """The checkpoint directory of a storage URI, under the configured roots; InvalidArgument otherwise."""
        core = self._core
        looking = core.in_thread(resolve_checkpoint, uri, core.roots, files=core.files, field=field)
        return await await_within(core.tasks.own(looking, f"resolve {field}"), budget, f"resolving {field}")

    # Mutating operations

    @recorded
    async def prepare(
        self, call: Call, *, ready_within: float, lease_ttl: float, budget: Budget
    ) -> tuple[PrepareReply, bool]:
        decision = await self._decide(call, budget)
        if decision.verdict is Verdict.RUN:
            self._precopying.stop()
            self._watch.begin(self._preparing.begin(call, lease_ttl, ready_within, budget))
        with self._holding():
            if decision.verdict is Verdict.REPLAY:
                return decision.reply, True
            return await self._preparing.wait(self._open_work(), ready_within, budget), False

    @recorded
    async def capture(self, call: Call, scope: EpisodeScope, *, budget: Budget) -> tuple[Captured, bool]:
        decision = await self._decide(call, budget, self._ready_to_capture)
        with self._holding():
            if decision.verdict is Verdict.REPLAY:
                return decision.reply, True
            task = self._committing.begin_capture(self._open_work(), scope)
            return await await_within(task, budget, "capture"), False

    @recorded
    async def commit(
        self,
        call: Call,
        arguments: CommitArguments,
        location: CheckpointLocation,
        *,
        base: CheckpointLocation | None = None,
        budget: Budget,
    ) -> tuple[CommitReply, bool]:
        """base: the checkpoint of `base_checkpoint_uri`, whose unchanged records are named, not written again."""
        decision = await self._decide(call, budget, self._ready_to_capture)
        if decision.verdict is Verdict.KEPT:
            work = self._reopening.ask_kept(call.checkpoint_id, arguments)
            if not (replayed := succeeded(work.commit)):
                self._core.untold.begun(call)
            task = self._committing.begin_commit(work, arguments, location, base)
            return await await_within(task, budget, "commit"), replayed
        with self._holding():
            if decision.verdict is Verdict.REPLAY:
                return decision.reply, True
            task = self._committing.begin_commit(self._open_work(), arguments, location, base)
            return await await_within(task, budget, "commit"), False

    @recorded
    async def resume(self, call: Call, *, keep_write: bool, budget: Budget) -> tuple[ResumeReply, bool]:
        core = self._core
        decision = await self._decide(call, budget)
        if decision.verdict is Verdict.FENCE:
            core.machine.fence(call.checkpoint_id)
        elif decision.verdict is not Verdict.REPLAY:
            work = self._open_work()
            if work.reopening is None:
                self._reopening.begin(work, _cause(core.machine.phase), keep=keep_write)
            assert work.reopening is not None
            work.retry_open.set()
            await await_within(work.reopening, budget, "opening admission")
        if not keep_write and (dropping := self._reopening.drop(call.checkpoint_id)):
            await await_within(dropping, budget, "ending kept records")
        reply = ResumeReply(core.machine.phase, core.machine.active_checkpoint_id, decision.verdict is Verdict.REPLAY)
        return reply, reply.replayed

    @recorded
    async def restore(
        self,
        call: Call,
        scope: RestoreScope,
        location: CheckpointLocation,
        *,
        expected_digest: str,
        lease_ttl: float,
        budget: Budget,
    ) -> tuple[RestoreReply, bool]:
        decision = await self._decide(call, budget, partial(self._not_retired, scope))
        if decision.verdict is Verdict.RUN:
            self._precopying.stop()
            work = self._installing.begin(call, lease_ttl, budget, scope, location, expected_digest)
            self._watch.begin(work)
        with self._holding():
            if decision.verdict is Verdict.REPLAY:
                return decision.reply, True
            work = self._open_work()
            assert work.install is not None
            work.waiters += 1
            try:
                return await await_within(work.install, budget, "install"), False
            finally:
                work.waiters -= 1

    @recorded
    async def retire(self, call: Call, episodes: Sequence[EpisodeId], *, budget: Budget) -> RetireReply:
        core = self._core
        decision = await self._decide(call, budget, self._not_capturing)
        with self._holding():
            install = core.work.install if core.work and decision.verdict is Verdict.WAIT else None
            core.retirement.raise_marks(episodes)
            stops = core.retirement.begin(core.owner, episodes, after=install)
            self._preparing.recheck()
            outcomes = await core.retirement.outcomes(stops, budget)
            self._preparing.recheck()
            core.touch()
            return RetireReply(outcomes, core.machine.phase)

    @recorded
    async def forget(self, call: Call, rollouts: Sequence[tuple[str, int]], *, budget: Budget) -> list[str]:
        """Check every rollout before any is forgotten; gives the sorted rollout ids."""
        core = self._core
        await self._decide(call, budget, partial(self._all_freed, rollouts))
        with self._holding():
            for rollout, through in rollouts:
                core.owner.forget(rollout, through)
                core.retirement.forget(rollout, through)
            core.touch()
            return sorted(rollout for rollout, _ in rollouts)

    async def renew_lease(self, call: Call) -> tuple[float, Phase]:
        """Seconds left after the renewal, and the phase. Waits for nothing."""
        core = self._core
        await self._decide(call, None)
        with self._holding():
            pass
        assert core.machine.open is not None
        return core.machine.open.lease.remaining(core.clock()), core.machine.phase

    # Reading

    def status(self) -> Status:
        """The status of this moment; never waits."""
        return build_status(self._core)

    async def statuses(self) -> AsyncIterator[Status]:
        """The status now and at each change, at most one per `status_interval`; 1 a second while work runs."""
        while True:
            touched = self._core.next_touch()
            status = self.status()
            yield status
            await asyncio.sleep(self.settings.status_interval)
            await set_within(touched, 1.0 if status.running else None)

    async def list_episodes(self, which: EpisodeListKind, checkpoint_id: str) -> AsyncIterator[Sequence[EpisodeId]]:
        """Batches of at most 1,000 episodes of one list."""
        core = self._core
        if which is EpisodeListKind.COMMITTED:
            episodes: Sequence[EpisodeId] = [record.episode for record in self._committed(checkpoint_id).records]
        elif which is EpisodeListKind.WITHOUT_RECORD:
            episodes = self._committed(checkpoint_id).without_record
        elif which is EpisodeListKind.RETIRED:
            episodes = core.retirement.marks
        else:
            async for batch in core.owner.list_episodes(which):
                for start in range(0, len(batch), BATCH):
                    yield batch[start : start + BATCH]
            return
        for start in range(0, len(episodes), BATCH):
            yield episodes[start : start + BATCH]

    def _committed(self, checkpoint_id: str) -> Captured:
        """What the commit of a checkpoint was made from; raises StateNotFound if none is known here."""
        work = self._core.work
        if work is None or work.checkpoint_id != checkpoint_id:
            work = self._core.kept.get(checkpoint_id)
        if work is None or work.captured is None or not succeeded(work.commit):
            raise StateNotFound(f"no commit of {checkpoint_id} is known here")
        return work.captured

    # Inside

    async def _decide(
        self, call: Call, budget: Budget | None, last_check: LastCheck = lambda decision: None
    ) -> Decision:
        """Ask the machine; an accepted higher epoch first ends what an earlier controller left to be written.

        Without a budget nothing is waited for; a Resume goes on when its budget ends.
        """
        decision = self._ask(call, last_check)
        dropping = self._reopening.drop_older(call.epoch)
        if not dropping or budget is None:
            return decision
        with self._holding(call.checkpoint_id):
            _, pending = await asyncio.wait(dropping, timeout=budget.left())
        if pending and call.operation is not Operation.RESUME:
            raise OutOfTime("ending an earlier controller's write had not ended in time; it goes on")
        return self._ask(call, last_check)

    def _ask(self, call: Call, last_check: LastCheck) -> Decision:
        try:
            decision = self._core.machine.decide(call, last_check)
        except InvalidPhase as refusal:
            if self._core.machine.phase is Phase.PREPARING and not refusal.episodes:
                raise self._core.refusal(InvalidPhase, refusal.message) from None  # it names the blockers
            raise
        if decision.verdict not in (Verdict.REPLAY, Verdict.KEPT):
            self._core.untold.begun(call)
        return decision

    def _ready_to_capture(self, decision: Decision) -> None:
        work = self._core.work
        if decision.verdict is Verdict.RUN and work is not None and not work.capturing:
            self._preparing.require_ready()

    def _not_capturing(self, decision: Decision) -> None:
        work = self._core.work
        if work is not None and work.capturing and self._core.machine.phase is Phase.PREPARED:
            raise self._core.refusal(InvalidPhase, "records are being captured")

    def _not_retired(self, scope: RestoreScope, decision: Decision) -> None:
        marks = self._core.retirement
        stale = [target for target in scope.targets.values() if marks.refuses(target)]
        if decision.verdict is Verdict.RUN and stale:
            raise StaleAttempt(
                f"{len(stale)} attempts to be installed were retired", episodes=stale[:BATCH], episode_count=len(stale)
            )

    def _all_freed(self, rollouts: Sequence[tuple[str, int]], decision: Decision) -> None:
        core = self._core
        held = [e for rollout, through in rollouts for e in core.retirement.holders(rollout, through)]
        if held:
            raise RetireIncomplete(
                f"{len(held)} retired episodes still hold something", episodes=held[:BATCH], episode_count=len(held)
            )
        for rollout, through in rollouts:
            core.owner.check_forget(rollout, through)

    def _open_work(self) -> Work:
        work = self._core.work
        assert work is not None, "an open checkpoint has its work"
        return work

    @contextlib.contextmanager
    def _holding(self, checkpoint_id: str | None = None) -> Iterator[None]:
        """Hold the lease while this call runs; it counts from the call's end, or from its broken connection.

        checkpoint_id: whose lease, that of the open checkpoint if None.
        """
        current = self._core.machine.open
        if current is None or checkpoint_id not in (None, current.checkpoint_id):
            yield
            return
        current.lease.hold()
        try:
            yield
        finally:
            current.lease.release(self._core.clock())
            self._core.touch()


def _cause(phase: Phase) -> OpeningCause:
    if phase is Phase.RESTORED:
        return OpeningCause.RESTORED
    return OpeningCause.RESUMED if phase is Phase.COMMITTED else OpeningCause.ABORTED
