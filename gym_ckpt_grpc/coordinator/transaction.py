"""One checkpoint as a block that always reopens the fleet. Source: coordination section 5.

async with coordinator.checkpoint(deadline=120.0) as checkpoint:
    report = await checkpoint.prepare(ready_within=30.0)
    await checkpoint.commit(report.continued(in_flight))
    await checkpoint.publish()
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from gym_ckpt_grpc.coordinator import ledger
from gym_ckpt_grpc.coordinator.committing import Committing, Settled, fates
from gym_ckpt_grpc.coordinator.deadlines import Deadline, positive_seconds
from gym_ckpt_grpc.coordinator.destination import Destination, take_destination
from gym_ckpt_grpc.coordinator.detaching import members_of, renew, state_of, take_up
from gym_ckpt_grpc.coordinator.errors import CaptureFailed, CommitFailed, FleetError, NotPrepared, describe
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fleet import Fleet
from gym_ckpt_grpc.coordinator.hearing import Hearing
from gym_ckpt_grpc.coordinator.leaving import Leaving, leave_shielded
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome, failures
from gym_ckpt_grpc.coordinator.preparing import Preparing
from gym_ckpt_grpc.coordinator.publication import Publication
from gym_ckpt_grpc.coordinator.released import release_limit, require_kept, write_failed
from gym_ckpt_grpc.coordinator.reopening import Reopening
from gym_ckpt_grpc.coordinator.report import FleetReport
from gym_ckpt_grpc.coordinator.result import CheckpointResult, CheckpointState
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.coordinator.session_state import DraftState, SessionState, Step, episodes, keys
from gym_ckpt_grpc.coordinator.takeover import settle_open
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.coordinator.timing import Timing
from gym_ckpt_grpc.coordinator.tracing import ABORTED, DETACHED, PUBLISHED, Stages
from gym_ckpt_grpc.protocol.errors import GymCkptError, StaleController, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import AggregateManifest, Payload
from gym_ckpt_grpc.telemetry import Timed, catalogue
from gym_ckpt_grpc.telemetry import attributes as at

T = TypeVar("T")
OnStop = Literal["close", "retire"]


class Checkpoint:
    """One checkpoint of a fleet. Made by `Coordinator.checkpoint`; sends nothing before `prepare`.

    report: what Prepare learned. outcomes: per operation, one outcome per participant called, the last one heard.
    continued, restarts: what became of the scope. failure: why its write failed after the release, or empty. result:
    set when the block has ended. All hold what is known, also after a failure.
    """

    def __init__(
        self, session: Session, fleet: Fleet, checkpoint_id: str, deadline: float, *, state: SessionState | None = None
    ) -> None:
        self.id = checkpoint_id
        self.report = FleetReport(ready=False)
        self.continued: tuple[EpisodeId, ...] = ()
        self.restarts: dict[EpisodeId, str] = {}
        self.result: CheckpointResult | None = None
        self.timing = Timing()
        self.lease_ttl: float | None = None
        self.stop = False
        self.on_stop: OnStop = "close"
        self.reopening: Reopening | None = None
        self.released = False
        self.failure = ""
        self.base_uri: str | None = None
        """`base_checkpoint_uri` of its Commits, empty for none; None while it is not chosen."""
        self.publication = Publication(session.root, checkpoint_id, session.epoch)
        self.step = Step.NEW
        self.members: list[Member] = []
        self._session = session
        self._fleet = fleet
        self._state = state
        self._detached = False
        self._seconds = positive_seconds("deadline", deadline)
        self._deadline = Deadline(self._seconds)
        self._heard = Hearing()
        self._scope: tuple[EpisodeId, ...] = ()
        self._destination: Destination | None = None
        self._draft: ledger.Draft | None = None
        self._columns: Committing | None = None
        self._commit_sent = False
        self._incremental = False

    @property
    def outcomes(self) -> Mapping[str, list[Outcome[Any]]]:
        """Operation -> outcomes in listing order, such as `outcomes["Commit"]`."""
        return self._heard.outcomes

    @property
    def manifest(self) -> AggregateManifest | None:
        """The aggregate manifest, once it is written."""
        return self.publication.manifest

    @property
    def scope(self) -> tuple[EpisodeId, ...]:
        """The scope given to `capture` or `commit`."""
        return self._scope

    @property
    def base_id(self) -> str:
        """The checkpoint that it was told to refer to; empty for none, or while that is not chosen."""
        return (self.base_uri or "").rpartition("/")[2]

    def hear(self, outcomes: Iterable[Outcome[Any]]) -> None:
        """Keep outcomes that were heard outside an operation."""
        for outcome in outcomes:
            self._heard.hear(outcome)

    def allow(self, seconds: float) -> None:
        """Give the operations from now on so many seconds, whatever was left."""
        self._deadline = Deadline(positive_seconds("deadline", seconds))

    # ---- the block

    async def __aenter__(self) -> Self:
        if self.step is not Step.NEW:
            raise UsageError(f"checkpoint {self.id} was entered before")
        session, trace = self._session, self._state.traceparent if self._state else ""
        session.enter(self.id, self, catalogue.COORDINATE_CHECKPOINT, lease_ttl=self.lease_ttl, traceparent=trace)
        self._deadline = Deadline(self._seconds)
        if self._state:
            try:
                with session.trace.inside():
                    await self._attach(self._state)
            except BaseException as error:
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving = Leaving(self._session, self)
        if self._detached and error is None:
            leaving.let_go()
            self._session.handed_on = True
            self._end(DETACHED, published=self.step is Step.PUBLISHED)
            return
        try:
            with self._session.trace.inside():
                await leave_shielded(leaving.run, self._session.settings.exit_timeout, error)
        finally:
            self.result = leaving.result()
            published = self.result.sequence_number > 0
            self._end(PUBLISHED if published else ABORTED, error, published=published)
            if error is not None:
                for note in leaving.notes:
                    error.add_note(note)

    def _end(self, result: str, error: BaseException | None = None, *, published: bool) -> None:
        self.step = Step.ENDED
        self._session.left(result, error)
        if published:
            self._session.event_logs.keep(self._heard.event_log(self.id, self.timing))

    # ---- operations

    async def prepare(self, *, ready_within: float = 30.0) -> FleetReport:
        """Close the fleet at a safe cut, stage by stage. May be called again after NotPrepared.

        The root is checked before anything is closed. ready_within: seconds, divided over the stages. Raises
        NotPrepared (with the report), PrepareFailed, DiscoveryFailed, LeaseLost, StaleController, StateUnwritable.
        """
        self._require("prepare", Step.NEW, Step.PREPARING)
        positive_seconds("ready_within", ready_within)
        with self._timed("prepare", catalogue.COORDINATE_PREPARE) as timed, self._session.trace.stages(timed) as stages:
            return await self._guarded(self._prepare(ready_within, timed, stages))

    async def capture(self, scope: Iterable[EpisodeId]) -> None:
        """Freeze the records of the scope in memory. Optional: `commit` captures if nobody did.

        Raises CaptureFailed, LeaseLost, StaleController; UsageError for a rollout that stands twice.
        """
        self._require("capture", Step.PREPARED)
        self._take_scope(scope)
        await self._captured()

    async def reopen(self) -> list[Outcome[Any]]:
        """Release the fleet while records wait to be written: Resume(keep_write). After `capture` only.

        The Commit must be sent within `lease_ttl` of it. What arrives from here on is of the live run, not of the
        checkpoint. A participant that has not answered within a third of `lease_ttl` is tried on in the background.
        """
        self._require("reopen", Step.CAPTURED, Step.RELEASED)
        self._session.check()
        if self.step is Step.CAPTURED:
            if self.reopening is None:
                self.reopening = Reopening(self._session, self.id, self.members, keep_write=True)
            self.released = True
            self.hear(await self.reopening.run(self._deadline.within(release_limit(self._session))))
            self.timing.released_at = self.reopening.last_open
            self.step = Step.RELEASED
        return self.outcomes.get("Resume", [])

    async def commit(
        self,
        scope: Iterable[EpisodeId],
        *,
        trainer: Payload | None = None,
        stop: bool = False,
        on_stop: OnStop = "close",
        reopen_when_captured: bool = False,
        incremental: bool | None = None,
        policy_versions: Mapping[str, str] | None = None,
    ) -> None:
        """Write the scope everywhere; every record is durable afterwards. May be called again after CommitFailed.

        trainer: state of the trainer's own, kept in the manifest. stop: the trainer ends after this checkpoint;
        on_stop: whether the fleet then stays closed, or is reopened and the scope retired. reopen_when_captured: open
        the fleet before anything is written; if the write then fails, the newest published checkpoint stands.
        incremental: do not write again what the newest published checkpoint has; as the coordinator's, if None.
        Raises CaptureFailed, CommitFailed, LeaseLost, StaleController; UsageError for another scope than the captured
        one, and for a `stop` that is to be reopened.
        """
        self._require("commit", Step.PREPARED, Step.CAPTURED, Step.RELEASED)
        scope = tuple(scope)
        if on_stop not in ("close", "retire"):
            raise UsageError(f"on_stop is {on_stop!r}; valid: 'close', 'retire'")
        if stop and (reopen_when_captured or self.released):
            raise UsageError("stop keeps the fleet closed until it is published: it cannot be reopened before")
        self._take_scope(scope)
        self.stop, self.on_stop = stop, on_stop
        self._incremental = self._session.settings.incremental if incremental is None else incremental
        if self.step is Step.PREPARED or (self.step is Step.CAPTURED and not self._heard.has("Capture")):
            # Captured by another process: the replies are asked for again, and replayed.
            await self._captured(again=self.step is Step.CAPTURED)
        if reopen_when_captured:
            await self.reopen()
        settled = await self._written()
        self._draft = ledger.Draft(
            checkpoint_id=self.id,
            run_id=self._session.run_id,
            controller_id=self._session.controller_id,
            epoch=self._session.epoch,
            parts=settled.parts,
            continued=self.continued,
            restarts=self.restarts,
            excluded=self.report.excluded,
            trainer=trainer,
            source_checkpoint=self._session.source_checkpoint,
            policy_versions=policy_versions or {},
        )
        self.step = Step.COMMITTED

    async def publish(self) -> int:
        """Write the aggregate manifest and the sequence entry; returns its number. Again: the same number.

        Raises PublishFailed (nothing is published), PublishUnknown (the same call again decides),
        StaleController.
        """
        self._require("publish", Step.COMMITTED, Step.PUBLISHED)
        self._session.check()
        assert self._draft is not None
        with self._timed("publish", catalogue.COORDINATE_PUBLISH) as timed:
            if again := self.step is Step.PUBLISHED:
                timed.replayed()
            try:
                trace = self._session.trace.traceparent
                number = await self.publication.run(self._draft, self._deadline, traceparent=trace)
            except StaleController as error:
                self._session.note(error)
                raise
        if not again:
            self._session.count_rollouts("protected", len(self.continued))
        self.step = Step.PUBLISHED
        self.timing.published_at = self.timing.published_at or time.monotonic()
        text = f"published as number {number}"
        await self._session.unpin()
        if self.publication.latest_error:
            text += f"; LATEST was not moved: {self.publication.latest_error}"
        self._tell(EventKind.PUBLICATION, text, CheckpointState.PUBLISHED)
        return number

    # ---- from one process to the next

    def state(self) -> SessionState:
        """What another process of this controller needs to go on from here, or to end it, as of now."""
        return state_of(
            self._session,
            self._fleet,
            "checkpoint",
            self.id,
            step=self.step,
            members=self.members,
            scope=keys(self._scope),
            restarts=keys(self.report.restarts),
            excluded=dict(self.report.excluded),
            set_aside={episode.capture_key: reason for episode, reason in self.report.set_aside.items()},
            stop=self.stop,
            on_stop=self.on_stop,
            base=self.base_uri,
            draft=DraftState.of(self._draft) if self._draft else None,
            sequence_number=self.publication.number or 0,
            traceparent=self._session.trace.traceparent,
            began=self._heard.began,
            heard=self._heard.steps,
            moments=self._heard.moments(self.timing),
        )

    async def detach(self) -> SessionState:
        """Leave the checkpoint open: the block then ends without a Resume, and the epoch is not released.

        Another process goes on with the state returned (`Coordinator.attach`), within `lease_ttl`, which is renewed
        here; after that the participants open by themselves. After the release no lease is left to be renewed: the
        other process has to send its Commit within `lease_ttl` of the one that failed here. If the block ends by an
        exception all the same, it reopens the fleet as ever. Raises LeaseLost where the checkpoint needs a lease that
        is gone, StaleController.
        """
        closed = (Step.PREPARING, Step.PREPARED, Step.CAPTURED)
        self._require("detach", *closed, Step.RELEASED, Step.COMMITTED, Step.PUBLISHED)
        with self._session.trace.inside():
            limit = self._deadline.within(self._session.settings.exit_timeout)
            await renew(self._session, self.id, self.members, limit)
        if self.step in closed:
            self._session.require_leases(self.id)
        self._detached = True
        return self.state()

    async def _attach(self, state: SessionState) -> None:
        """Be where the other process was. A lease that is gone shows at the next operation that needs it."""
        session = self._session
        if state.step is Step.NEW:
            self.step = Step.ABANDONED
            self.members, _ = await session.reachable("Resume", self._deadline)
            return
        self.members = members_of(session, state)
        self._scope = episodes(state.scope)
        self.report = FleetReport(
            ready=state.step is not Step.PREPARING,
            restarts=episodes(state.restarts),
            excluded=state.excluded,
            set_aside={EpisodeId.from_capture_key(key): reason for key, reason in state.set_aside.items()},
        )
        self.stop, self.on_stop, self.step = state.stop, state.on_stop, state.step
        self.base_uri, self.released = state.base, state.step is Step.RELEASED
        if state.draft:
            self._draft = state.draft.draft(
                self.id, run_id=session.run_id, controller_id=session.controller_id, epoch=session.epoch
            )
            self.continued, self.restarts = self._draft.continued, dict(self._draft.restarts)
            # The other process may have published and ended before it could say so: the exit reads the root.
            self.publication.number = state.sequence_number or None
            self.publication.unknown = not state.sequence_number
        self._heard.go_on(state.began, state.heard, state.moments)
        await take_up(session, state, self.members, self._deadline)

    # ---- inside

    async def _prepare(self, ready_within: float, timed: Timed, stages: Stages) -> FleetReport:
        session = self._session
        if self.step is Step.NEW:
            check = partial(ledger.preflight, session.root, incremental=session.settings.incremental)
            await in_thread(check, "checking the root", self._deadline)
            found = await session.members(self._deadline)
            if found.open_checkpoints():
                await settle_open(session, found, self._deadline)
            self.members = list(found.members)
            self.report = FleetReport(ready=False, excluded=found.excluded)
            self.timing.first_closed = time.monotonic()
            self._heard.begin()
            self.step = Step.PREPARING
        preparing = Preparing(session, self.id, self._heard.hear)
        excluded = self.report.excluded
        taking_part = [member for member in self.members if member.name not in excluded]
        timed.set(at.PARTICIPANTS, len(taking_part))
        try:
            self.report = await preparing.run(taking_part, ready_within, self._deadline, self.report, stages)
        except NotPrepared as error:
            self.report = error.report
            raise
        self.step, self.timing.prepared_at = Step.PREPARED, time.monotonic()
        text = f"prepared: every participant is at its cut after {self.timing.prepared_after or 0.0:.3f} s"
        self._tell(EventKind.STAGE, text, CheckpointState.PREPARED)
        return self.report

    async def _captured(self, *, again: bool = False) -> None:
        with self._timed("capture", catalogue.COORDINATE_CAPTURE) as timed:
            if again:
                timed.replayed()
            await self._guarded(self._capture())

    async def _capture(self) -> None:
        members = self._taking_part()
        captures = await self._committing().capture(members, self._deadline)
        self._exclude(members, captures, CaptureFailed, "Capture")
        self.step = Step.CAPTURED

    async def _written(self) -> Settled:
        """Commit; a failure after the release says what stands instead."""
        try:
            with self._timed("commit", catalogue.COORDINATE_COMMIT):
                settled = await self._guarded(self._commit())
        except GymCkptError as error:
            if self.step is not Step.RELEASED:
                raise
            failure, self.failure = await write_failed(self._session, self.id, error)
            if failure is error:
                raise
            raise failure from error
        self.failure = ""
        return settled

    async def _commit(self) -> Settled:
        session, committing, members = self._session, self._committing(), self._taking_part()
        destination = await self._place(members)
        if not self.released:
            session.require_leases(self.id)
        elif self.reopening and not self._commit_sent:
            require_kept(session, self.reopening)
        self._commit_sent = True
        commits = await committing.commit(members, destination, self._deadline, stop=self.stop)
        self._exclude(members, commits, CommitFailed, "Commit")
        self.timing.durable_at = time.monotonic()
        members = self._taking_part()
        lists = await committing.lists(members, self._deadline)
        self._exclude(members, lists, CommitFailed, "ListEpisodes")
        left = self._taking_part()
        captures, commits, lists = (self._heard.of(each, left) for each in ("Capture", "Commit", "ListEpisodes"))
        lost = session.replacements.judge(self._scope, {o.name: frozenset(o.answer) for o in lists})
        settled = committing.settle(captures, commits, lists)
        self.continued, self.restarts = fates(settled, lost, self.report)
        text = f"durable: {len(self.continued)} continue, {len(self.restarts)} restart"
        self._tell(EventKind.COMMIT, text, CheckpointState.COMMITTED)
        return settled

    async def _place(self, members: list[Member]) -> Destination:
        if self._destination is None:
            base = self.base_uri if self._incremental or self.base_uri else ""
            self._destination = await take_destination(
                self._session, self.id, members, self._scope, self._deadline, base_uri=base
            )
            self.base_uri = self._destination.base_uri
        return self._destination

    def _committing(self) -> Committing:
        """One for Capture and Commit: the columns of a long scope are made once."""
        if self._columns is None:
            self._columns = Committing(self._session, self.id, self._scope, self._heard.hear)
        return self._columns

    def _taking_part(self) -> list[Member]:
        return [member for member in self.members if member.name not in self.report.excluded]

    def _exclude(
        self, members: list[Member], outcomes: list[Outcome[Any]], kind: type[FleetError], operation: str
    ) -> None:
        """Leave out optional members that failed; raise for required ones, with all outcomes."""
        failed = failures(outcomes)
        optional = {member.name for member in members if not member.required}
        if any(outcome.name not in optional for outcome in failed):
            raise kind(f"{operation} failed: {describe(failed)}", outcomes)
        if failed:
            reasons = {outcome.name: f"{operation} failed: {outcome.error}" for outcome in failed}
            self.report = self.report.without(reasons)
            for name, reason in reasons.items():
                self._session.events.add(
                    EventKind.FINDING, f"excluded: {reason}", checkpoint_id=self.id, participant=name
                )

    def _take_scope(self, scope: Iterable[EpisodeId]) -> None:
        episodes = tuple(scope)
        if len({episode.rollout_id for episode in episodes}) != len(episodes):
            raise UsageError("the scope names a rollout twice")
        if self.step in (Step.CAPTURED, Step.RELEASED) and set(episodes) != set(self._scope):
            raise UsageError("the scope is another one than was captured")
        if self.step is Step.PREPARED:
            self._scope, self._columns = episodes, None

    def _tell(self, kind: EventKind, text: str, state: CheckpointState = CheckpointState.UNSPECIFIED) -> None:
        self._session.events.add(kind, text, checkpoint_id=self.id, state=state)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._session.guarded(self.id, work)

    @contextmanager
    def _timed(self, operation: str, span: catalogue.SpanType) -> Iterator[Timed]:
        begun, count = time.monotonic(), len(self._taking_part())
        try:
            with self._session.trace.operation(span, operation, checkpoint_id=self.id, participants=count) as timed:
                yield timed
        finally:
            before = getattr(self.timing, operation)
            setattr(self.timing, operation, before + time.monotonic() - begun)

    def _require(self, operation: str, *steps: Step) -> None:
        if self.step not in steps:
            raise UsageError(f"{operation} is not possible now: checkpoint {self.id} is {self.step.value}")
        if self._session.open_id != self.id:
            raise UsageError(f"{operation} outside the block of checkpoint {self.id}")
