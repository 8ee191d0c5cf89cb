"""Restoring a published checkpoint, all or nothing. Source: coordination sections 4 and 5.

    async with coordinator.restoring("latest") as restored:
        ...                                    # load the trainer's own state
    # open; send restored.continued first

The aggregate manifest is compared with the files, and its members with the fleet, before anything is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from gym_ckpt_grpc.coordinator import ledger
from gym_ckpt_grpc.coordinator.deadlines import Deadline, positive_seconds
from gym_ckpt_grpc.coordinator.detaching import members_of, renew, state_of, take_up
from gym_ckpt_grpc.coordinator.errors import RestoreFailed, describe
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fleet import Fleet
from gym_ckpt_grpc.coordinator.installing import PENDING, Installing, Plan
from gym_ckpt_grpc.coordinator.leaving import leave_shielded
from gym_ckpt_grpc.coordinator.looking import Membership
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome, failures
from gym_ckpt_grpc.coordinator.reopening import Reopening
from gym_ckpt_grpc.coordinator.retiring import retire_everywhere
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.coordinator.session_state import SessionState, Step, episodes, keys
from gym_ckpt_grpc.coordinator.takeover import settle_open
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.coordinator.tracing import ABORTED, DETACHED, RESTORED
from gym_ckpt_grpc.protocol.errors import GymCkptError, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import AggregateManifest, Payload, Place
from gym_ckpt_grpc.telemetry import Timed
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import COORDINATE_RESTORE, COORDINATE_RESTORING

CLEAN_UP = 30.0
"""Seconds that the clean-up of a failed restore has, if no more is left."""


class Restoration:
    """One restore. Made by `Coordinator.restoring`.

    id: of the restore itself. source: the checkpoint as read. continued: episodes as installed, in the
    checkpoint's order: send exactly these attempts. restarts: the rollouts that start over from their input, as
    they stand in the checkpoint, with the reason. placements: installed episode -> participants that hold its
    state, `kind/service/instance`. outcomes: of the Restore, one per participant; resumed: of the Resume after it.
    """

    def __init__(
        self,
        session: Session,
        fleet: Fleet,
        selector: str,
        scope: Sequence[EpisodeId] | None,
        restore_id: str,
        deadline: float,
        *,
        state: SessionState | None = None,
    ) -> None:
        self.id = restore_id
        self.source: ledger.Source | None = None
        self.continued: tuple[EpisodeId, ...] = ()
        self.restarts: dict[EpisodeId, str] = {}
        self.placements: dict[EpisodeId, tuple[str, ...]] = {}
        self.outcomes: list[Outcome[Any]] = []
        self.resumed: list[Outcome[Any]] = []
        self.lease_ttl: float | None = None
        self._session = session
        self._fleet = fleet
        self._state = state
        self._source_id = state.source if state else ""
        self._detached = False
        self._selector = selector
        self._scope = scope
        self._seconds = positive_seconds("deadline", deadline)
        self._deadline = Deadline(self._seconds)
        self._members: tuple[Member, ...] = ()
        self._plan: Plan | None = None
        self._entered = False
        self._step = Step.NEW
        self._opened = False
        self._restarting: tuple[EpisodeId, ...] = ()

    @property
    def manifest(self) -> AggregateManifest:
        """The aggregate manifest of the source."""
        assert self.source is not None
        return self.source.manifest

    @property
    def source_checkpoint_id(self) -> str:
        return self._source_id

    @property
    def trainer(self) -> Payload | None:
        """The trainer's own state, as given to `commit`."""
        return self.manifest.trainer.payload() if self.manifest.trainer else None

    @property
    def installed(self) -> bool:
        """Whether it is installed everywhere, and its block is open."""
        return self._step is Step.RESTORED and self._session.open_id == self.id

    # ---- the block

    async def __aenter__(self) -> Self:
        session = self._session
        if self._entered:
            raise UsageError(f"restore {self.id} was entered before")
        trace = self._state.traceparent if self._state else ""
        session.enter(self.id, self, COORDINATE_RESTORING, lease_ttl=self.lease_ttl, traceparent=trace)
        self._entered, self._deadline = True, Deadline(self._seconds)
        try:
            with session.trace.inside():
                await (self._attach(self._state) if self._state else self._restore())
        except BaseException as error:
            try:
                await self._clean_up(error)
            finally:
                session.left(ABORTED, error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, result, left_by = self._session, ABORTED, error
        try:
            if error is not None:
                await self._clean_up(error)
                return
            if self._detached:
                for member in self._members:
                    session.renewal.release(member, self.id)
                session.handed_on, result = True, DETACHED
                return
            try:
                with session.trace.inside():
                    await leave_shielded(self._open, session.settings.exit_timeout, None)
            except BaseException as failure:
                left_by = failure
                if not self._opened:
                    await self._clean_up(failure)
                raise
            finally:
                result = RESTORED if self._opened else ABORTED
        finally:
            session.left(result, left_by)

    async def _restore(self) -> None:
        with self._session.trace.operation(COORDINATE_RESTORE, "restore", checkpoint_id=self.id) as timed:
            await self._enter(timed)

    async def _enter(self, timed: Timed) -> None:
        session, deadline = self._session, self._deadline
        self.source = await in_thread(
            lambda: ledger.read_source(session.root, self._selector), "reading the checkpoint", deadline
        )
        self._source_id = self.manifest.checkpoint_id
        session.trace.set(at.SOURCE, self._source_id)
        session.trace.link(self.manifest.traceparent or "")
        found = await session.members(deadline)
        if found.open_checkpoints():
            await settle_open(session, found, deadline)
        chosen, members = self._chosen(), _matched(self.manifest, found)
        await in_thread(self._pin, "pinning the checkpoint", deadline)
        self._members = members
        timed.set(at.PARTICIPANTS, len(members))
        installing = Installing(session, self.source, members, chosen)
        try:
            plan = self._plan = await installing.plan(found, deadline)
            self.outcomes = await session.guarded(self.id, installing.install(self.id, plan, deadline))
            installing.compare(self.outcomes, plan)
            self.placements = await installing.placements(plan, deadline)
        finally:
            self.outcomes = self.outcomes or list(installing.heard.values())
        self._step = Step.RESTORED
        self.continued = tuple(plan.targets.values())
        self.restarts = dict(self.source.lists.restarts)
        self._restarting = tuple(self.restarts)
        text = f"{len(self.continued)} installed from {self.manifest.checkpoint_id}"
        session.events.add(EventKind.RESTORE, text, checkpoint_id=self.id)

    # ---- from one process to the next

    def state(self) -> SessionState:
        """What another process of this controller needs to resume it, or to end it, as of now."""
        return state_of(
            self._session,
            self._fleet,
            "restore",
            self.id,
            step=self._step,
            members=self._members,
            source=self._source_id or self._selector,
            targets=keys(self.continued),
            restarts=keys(self._restarting),
            traceparent=self._session.trace.traceparent,
        )

    async def detach(self) -> SessionState:
        """Leave what is installed closed, for another process to resume; see `Checkpoint.detach`.

        Raises LeaseLost, StaleController.
        """
        session = self._session
        if self._step is not Step.RESTORED or session.open_id != self.id:
            raise UsageError(f"detach is not possible: restore {self.id} is not open")
        with session.trace.inside():
            limit = self._deadline.within(session.settings.exit_timeout)
            await renew(session, self.id, self._members, limit)
        session.require_leases(self.id)
        self._detached = True
        return self.state()

    async def _attach(self, state: SessionState) -> None:
        session = self._session
        self._step = state.step
        if state.step is Step.NEW:
            await self._attach_unfinished()
            return
        self._members = tuple(members_of(session, state))
        self.continued, self._restarting = episodes(state.targets), episodes(state.restarts)
        self._plan = Plan({target: target for target in self.continued})
        await take_up(session, state, self._members, self._deadline)

    async def _attach_unfinished(self) -> None:
        """Its process ended while it installed: what is pending is found anew, to be retired."""
        session, pending = self._session, set[EpisodeId]()
        members, _ = await session.reachable("Resume", self._deadline)
        self._members = tuple(members)
        for member in members:
            listed = await session.list_episodes(member, PENDING, self._deadline)
            pending.update(listed.reply or ())
        self._plan = Plan({episode: episode for episode in pending})

    def _pin(self) -> None:
        self._session.pin = self._session.root.pin(self.manifest.checkpoint_id, epoch=self._session.epoch)

    def _chosen(self) -> tuple[EpisodeId, ...]:
        """The episodes to install. Raises UsageError for one that the checkpoint does not continue."""
        assert self.source is not None
        continued = self.source.lists.continued
        if self._scope is None:
            return continued
        unknown = [str(episode) for episode in set(self._scope) - set(continued)]
        if unknown:
            raise UsageError(f"{self.manifest.checkpoint_id} does not continue {', '.join(sorted(unknown)[:5])}")
        return tuple(episode for episode in continued if episode in set(self._scope))

    # ---- the two ways out

    async def _open(self, deadline: Deadline) -> None:
        """Resume everywhere. Installed state that is not reached by it would be freed by its lease: a failure."""
        session = self._session
        session.require_leases(self.id)
        if self._step is not Step.RESTORED:
            raise RestoreFailed("the process that restored ended before all was installed")
        reopening = Reopening(session, self.id, self._members)
        outcomes = self.resumed = await reopening.run(deadline)
        session.check()
        if failed := failures(outcomes):
            raise RestoreFailed(f"installed, but not open everywhere: {describe(failed)}", outcomes)
        if reopening.replaced:
            names = ", ".join(str(identity) for identity in reopening.replaced)
            raise RestoreFailed(f"replaced between Restore and Resume, its state is gone: {names}", outcomes)
        session.source_checkpoint = self._source_id
        session.replacements.restored()
        self._opened = True
        session.count_rollouts("continued", len(self.continued))
        session.count_rollouts("restarted", len(self._restarting))

    async def _clean_up(self, error: BaseException) -> None:
        """Retire the next attempts everywhere, then Resume everywhere; failures are notes on the error."""
        if not self._members:
            return
        limit = max(self._deadline.left(), CLEAN_UP)
        with self._session.trace.inside():
            await leave_shielded(lambda deadline: self._undo(deadline, error), limit, error)

    async def _undo(self, deadline: Deadline, error: BaseException) -> None:
        session = self._session
        if session.replaced:
            for member in self._members:
                session.renewal.release(member, self.id)
            return
        targets = list(self._plan.targets.values()) if self._plan else []
        try:
            # Half of the time: whatever hangs here, everyone is still reopened.
            half = deadline.within(deadline.left() / 2)
            await retire_everywhere(session, self._members, targets, half, checkpoint_id=self.id)
        except GymCkptError as failure:
            error.add_note(f"clean-up: {failure}")
        if session.replaced:
            return
        outcomes = self.resumed = await Reopening(session, self.id, self._members).run(deadline)
        if failed := failures(outcomes):
            error.add_note(f"clean-up: resume is pending: {describe(failed)}")
        session.events.add(EventKind.RESTORE, f"failed: {error}", checkpoint_id=self.id)


def _matched(manifest: AggregateManifest, found: Membership) -> tuple[Member, ...]:
    """The members that have a part. Raises RestoreFailed naming every participant that only one side has.

    One that the manifest names as excluded is neither missing nor extra, and gets no Restore.
    """
    kept: dict[Place, str] = {member.participant.place: str(member.participant) for member in manifest.members}
    excluded = {"/".join((e.kind, e.service, e.instance)) for e in manifest.excluded}
    present = {member.identity.place: member for member in found.members}
    missing = sorted(name for place, name in kept.items() if place not in present)
    extra = sorted(m.name for place, m in present.items() if place not in kept and m.name not in excluded)
    problems = []
    if missing:
        problems.append(f"in the checkpoint and not in the fleet: {', '.join(missing)}")
    if extra:
        problems.append(f"in the fleet and not in the checkpoint: {', '.join(extra)}")
    if problems:
        raise RestoreFailed(f"checkpoint {manifest.checkpoint_id}: {'; '.join(problems)}")
    return tuple(member for place, member in present.items() if place in kept)
