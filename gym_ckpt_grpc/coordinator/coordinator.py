"""The coordinator: many participants, one checkpoint at a time. Source: coordination sections 1, 5 and 8."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.coordinator.calls import Retries
from gym_ckpt_grpc.coordinator.deadlines import Deadline, positive_seconds
from gym_ckpt_grpc.coordinator.detaching import go_on, renew
from gym_ckpt_grpc.coordinator.errors import ForgetFailed, describe
from gym_ckpt_grpc.coordinator.events import Event, EventKind, Events
from gym_ckpt_grpc.coordinator.fanout import STAGE_GRACE, until_done
from gym_ckpt_grpc.coordinator.fleet import Fleet
from gym_ckpt_grpc.coordinator.incremental import MAX_CHAIN
from gym_ckpt_grpc.coordinator.looking import Sighting
from gym_ckpt_grpc.coordinator.member import Credentials
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.coordinator.restoration import Restoration
from gym_ckpt_grpc.coordinator.retiring import (
    RetireResult,
    forget_within,
    highest_attempts,
    retire_within,
)
from gym_ckpt_grpc.coordinator.session import Session, Settings
from gym_ckpt_grpc.coordinator.session_state import SessionState
from gym_ckpt_grpc.coordinator.takeover import settle_open
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.coordinator.transaction import Checkpoint
from gym_ckpt_grpc.protocol.errors import ControlError, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId, checkpoint_id_problem
from gym_ckpt_grpc.protocol.lease import DEFAULT_LEASE_TTL, MAX_LEASE_TTL
from gym_ckpt_grpc.storage import LATEST, CheckpointRoot, FileLayer, Retention, delete_checkpoint
from gym_ckpt_grpc.telemetry import ActiveSpan, CallObserver, Telemetry, default_telemetry
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import COORDINATE_ENTERING, COORDINATE_FORGET, COORDINATE_RETIRE

LEAVE_PATIENCE = 5.0
"""Seconds that leaving a coordinator waits for pending Resumes; leases reopen what is left. And for its release."""


def new_checkpoint_id(prefix: str = "ckpt") -> str:
    """An id that no other checkpoint has; it sorts by time for people."""
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


class Coordinator:
    """Checkpoints and restores a fleet, on one root, under an epoch of its own.

        async with Coordinator(fleet, root="file:///ckpt/run-7", controller_id="trainer-0") as coordinator:
            ...

    Entering looks at the fleet, claims an epoch above any that participants report, starts lease renewal, and
    ends what it finds open. Leaving aborts what is still open, waits a little for pending Resumes and appends a
    release.

    root: `file://` URI or absolute path. controller_id, run_id: characters as a checkpoint id; run_id is
    controller_id by default. token: sent with every call. allow_insecure: plain text beyond this host. tls:
    encrypts channels. All times are seconds, finite and positive. lease_ttl: at most 600. discovery_timeout: per
    look. exit_timeout: bound of every exit. stage_grace: head start of a stage of Resume. incremental: refer to the
    newest published checkpoint for records that did not change, unless a `commit` says otherwise; max_chain:
    checkpoints after which the next is written in full again. retention: which published checkpoints to keep; after
    each publication, once the fleet is open, the others are removed, and what crashed runs left. None, the default,
    removes nothing: nobody's checkpoints go unasked. observer: told of every call. telemetry: where spans and
    metrics go; the process's own if None. on_event: told of every event, on the loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        root: str,
        controller_id: str = "trainer",
        run_id: str = "",
        token: TokenSource | None = None,
        allow_insecure: bool = False,
        tls: ClientTls | None = None,
        lease_ttl: float = DEFAULT_LEASE_TTL,
        discovery_timeout: float = 60.0,
        exit_timeout: float = 30.0,
        stage_grace: float = STAGE_GRACE,
        incremental: bool = False,
        max_chain: int = MAX_CHAIN,
        retention: Retention | None = None,
        observer: CallObserver | None = None,
        telemetry: Telemetry | None = None,
        on_event: Callable[[Event], None] | None = None,
        files: FileLayer | None = None,
        retries: Retries | None = None,
    ) -> None:
        for name, value in (("controller_id", controller_id), ("run_id", run_id or controller_id)):
            if problem := checkpoint_id_problem(value):
                raise UsageError(f"{name} {value!r} {problem}")
        if lease_ttl > MAX_LEASE_TTL:
            raise UsageError(f"lease_ttl {lease_ttl} s is above {MAX_LEASE_TTL} s")
        if max_chain < 1:
            raise UsageError(f"max_chain is {max_chain}: a chain has at least its full checkpoint")
        self.fleet = fleet
        self.root = CheckpointRoot(root, files)
        self.controller_id = controller_id
        self.run_id = run_id or controller_id
        self.events = Events(on_event)
        self._settings = Settings(
            lease_ttl=positive_seconds("lease_ttl", lease_ttl),
            discovery_timeout=positive_seconds("discovery_timeout", discovery_timeout),
            exit_timeout=positive_seconds("exit_timeout", exit_timeout),
            stage_grace=positive_seconds("stage_grace", stage_grace),
            incremental=incremental,
            max_chain=max_chain,
            retention=retention,
        )
        self.telemetry = telemetry or default_telemetry()
        self._credentials = Credentials(
            token=token, allow_insecure=allow_insecure, tls=tls, observer=observer, telemetry=self.telemetry
        )
        self._retries = retries
        self._session: Session | None = None
        self._state: SessionState | None = None

    @classmethod
    def attach(
        cls,
        state: SessionState,
        *,
        token: TokenSource | None = None,
        allow_insecure: bool = False,
        tls: ClientTls | None = None,
        discovery_timeout: float = 60.0,
        exit_timeout: float = 30.0,
        telemetry: Telemetry | None = None,
        on_event: Callable[[Event], None] | None = None,
        files: FileLayer | None = None,
        retries: Retries | None = None,
    ) -> Self:
        """The same controller in another process: it goes on with what `detach` left open, under the same epoch.

        Entering it claims nothing and ends nothing; `attached` then gives the checkpoint or restore. Raises
        FleetInvalid, InvalidArgument for a state that is not usable; entering raises StaleController if a newer
        controller has taken over.
        """
        coordinator = cls(
            Fleet.from_mapping(state.fleet, source="the session's fleet"),
            root=state.root,
            controller_id=state.controller_id,
            run_id=state.run_id,
            token=token,
            allow_insecure=allow_insecure,
            tls=tls,
            lease_ttl=state.lease_ttl,
            discovery_timeout=discovery_timeout,
            exit_timeout=exit_timeout,
            telemetry=telemetry,
            on_event=on_event,
            files=files,
            retries=retries,
        )
        coordinator._state = state
        return coordinator

    @property
    def epoch(self) -> int:
        """The epoch claimed; 0 outside the block."""
        return self._session.epoch if self._session else 0

    @property
    def open_id(self) -> str:
        """The checkpoint or restore that is open now, or empty."""
        return self._session.open_id if self._session else ""

    # ---- the block

    async def __aenter__(self) -> Self:
        if self._session:
            raise UsageError("this coordinator is entered already")
        session = self._session = Session(
            self.fleet,
            self.root,
            controller_id=self.controller_id,
            run_id=self.run_id,
            credentials=self._credentials,
            settings=self._settings,
            events=self.events,
            retries=self._retries,
        )
        try:
            if self._state:
                await self._go_on(session, self._state)
            else:
                with session.trace.entering(COORDINATE_ENTERING) as span:
                    await self._enter(session, span)
        except BaseException:
            await self._close(session)
            raise
        return self

    async def _go_on(self, session: Session, state: SessionState) -> None:
        await go_on(session, state, Deadline(self._settings.discovery_timeout))
        await session.renewal.start()

    async def _enter(self, session: Session, span: ActiveSpan) -> None:
        deadline = Deadline(self._settings.discovery_timeout)
        await in_thread(self.root.preflight, "preparing the root", deadline)
        found = await session.members(deadline)
        span.set(at.PARTICIPANTS, len(found.members))

        def claim() -> None:
            session.claim = self.root.sequence.claim(self.controller_id, self.run_id, above=found.highest_epoch)

        await in_thread(claim, "claiming an epoch", deadline)
        self.events.add(EventKind.TAKE_OVER, f"epoch {session.epoch} is claimed by {self.controller_id}")
        await session.renewal.start()
        await settle_open(session, found, Deadline(self._settings.exit_timeout))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (session := self._session) is None:
            return
        try:
            if session.open_block:
                abandoned = UsageError(f"the coordinator was left with {session.open_id} open")
                await session.open_block.__aexit__(UsageError, abandoned, None)
        finally:
            await self._close(session)

    async def _close(self, session: Session) -> None:
        """End tasks, thread and channels; append a release. Runs to its end through cancellations."""
        task = asyncio.get_running_loop().create_task(self._shut(session), name="close the coordinator")
        try:
            await until_done([task])
        finally:
            self._session = None
        task.result()

    async def _shut(self, session: Session) -> None:
        try:
            await session.end_background(LEAVE_PATIENCE)
            await session.retaining.close(LEAVE_PATIENCE)
            await session.event_logs.close()
            await session.renewal.stop()
            await session.connections.close()
        finally:
            claim = session.claim
            if claim is not None and not session.replaced and not session.handed_on:
                try:
                    limit = Deadline(LEAVE_PATIENCE)
                    await in_thread(lambda: self.root.sequence.release(claim), "releasing the epoch", limit)
                except ControlError as error:
                    self.events.add(EventKind.TAKE_OVER, f"the epoch was not released: {error}")

    # ---- operations

    def checkpoint(
        self, *, deadline: float = 120.0, checkpoint_id: str | None = None, lease_ttl: float | None = None
    ) -> Checkpoint:
        """A new checkpoint, to be entered with `async with`. Picks an id and sends nothing.

        deadline: seconds for all its operations together, from the entering of the block. lease_ttl: if it is not to be
        the coordinator's.
        """
        checkpoint = Checkpoint(self._entered(), self.fleet, _new_id(checkpoint_id, "ckpt"), deadline)
        checkpoint.lease_ttl = _lease(lease_ttl)
        return checkpoint

    def restoring(
        self,
        source: str = LATEST,
        *,
        scope: Iterable[EpisodeId] | None = None,
        deadline: float = 120.0,
        restore_id: str | None = None,
        lease_ttl: float | None = None,
    ) -> Restoration:
        """A restore of a published checkpoint, to be entered with `async with`.

        source: its id, or "latest". scope: episodes as they stand in it; None: all that it continues. deadline:
        seconds for verifying and installing. lease_ttl: if it is not to be the coordinator's.
        """
        chosen = None if scope is None else tuple(scope)
        restore = Restoration(self._entered(), self.fleet, source, chosen, _new_id(restore_id, "restore"), deadline)
        restore.lease_ttl = _lease(lease_ttl)
        return restore

    def attached(self, *, deadline: float = 120.0) -> Checkpoint | Restoration:
        """What `attach` goes on with, to be entered with `async with`: a Checkpoint, or an installed Restoration.

        deadline: seconds for all its operations here. Raises UsageError for a coordinator that was not attached.
        """
        session, state = self._entered(), self._state
        if state is None:
            raise UsageError("this coordinator is not attached to anything")
        if state.purpose == "restore":
            return Restoration(session, self.fleet, state.source, None, state.checkpoint_id, deadline, state=state)
        return Checkpoint(session, self.fleet, state.checkpoint_id, deadline, state=state)

    async def status(self, timeout: float | None = None) -> list[Sighting]:
        """What looking at every server finds now, in listing order. Does not fail for one that is down."""
        seconds = positive_seconds("timeout", timeout or self._settings.discovery_timeout)
        return await self._entered().look(seconds)

    async def retire(self, episodes: Iterable[EpisodeId], *, deadline: float = 60.0) -> RetireResult:
        """Refuse these attempts and earlier ones everywhere, and free them; also while a checkpoint is open.

        An empty list makes no call. Raises RetireFailed if any is incomplete, also where a required server is down
        (the others are called all the same): call again.
        """
        chosen = list(episodes)
        if not chosen:
            return RetireResult()
        session, limit = self._entered(), Deadline(positive_seconds("deadline", deadline))
        with session.trace.operation(COORDINATE_RETIRE, "retire", checkpoint_id=session.open_id) as timed:
            members, missing = await session.reachable("Retire", limit)
            return await retire_within(
                timed, session, members, chosen, limit, checkpoint_id=session.open_id, missing=missing
            )

    async def forget(
        self, rollouts: Mapping[str, int] | Iterable[EpisodeId], *, deadline: float = 60.0
    ) -> list[Outcome[Any]]:
        """End the refusal of rollouts, up to an attempt: {rollout_id: highest attempt retired}, or episodes.

        An empty one makes no call. Raises ForgetFailed: call again.
        """
        chosen = highest_attempts(rollouts)
        if not chosen:
            return []
        session, limit = self._entered(), Deadline(positive_seconds("deadline", deadline))
        with session.trace.operation(COORDINATE_FORGET, "forget", checkpoint_id=session.open_id) as timed:
            members, missing = await session.reachable("Forget", limit)
            if missing:
                raise ForgetFailed(f"Forget was not begun: {describe(missing)}", missing)
            return await forget_within(timed, session, members, chosen, limit, checkpoint_id=session.open_id)

    async def renew(self, *, deadline: float = 5.0) -> list[Outcome[Any]]:
        """Extend every participant's lease of what is open now by the same duration: `lease_ttl` from here on.

        Leases are renewed in the background all the same. One outcome per participant that holds one. Raises LeaseLost
        where a required one is gone, StaleController.
        """
        session, limit = self._entered(), Deadline(positive_seconds("deadline", deadline))
        open_id = session.open_id
        members = [hold.member for hold in session.renewal.holds.of(open_id)]
        with session.trace.inside():
            outcomes = await renew(session, open_id, members, limit)
        session.require_leases(open_id)
        return outcomes

    async def delete(self, checkpoint_id: str, *, deadline: float = 60.0) -> None:
        """Delete a checkpoint that nothing holds; one that is deleted already is fine. Waits for a retention under way.

        Raises CheckpointConflict naming the holder (it is the newest, pinned, held, open, unreadable, or another needs
        its files), StateNotFound, StaleController, and StateUnwritable where it was interrupted: again finishes it.
        """
        session, limit = self._entered(), Deadline(positive_seconds("deadline", deadline))
        session.check()
        async with session.retaining.alone(limit):
            open_ids, epoch = session.retaining.open_ids, session.epoch
            await in_thread(
                lambda: delete_checkpoint(self.root, checkpoint_id, epoch=epoch, open_ids=open_ids), "deleting", limit
            )
        self.events.add(EventKind.RETENTION, "deleted", checkpoint_id=checkpoint_id)

    async def hold(self, checkpoint_id: str, name: str, *, deadline: float = 60.0) -> None:
        """Keep a checkpoint until `release`, whatever retention and later runs do: for a save that refers to it.

        name: who holds it; again with the same name is fine. Once this has returned it stays. Raises StateNotFound if
        it is not there, StaleController, StateCorrupt, StateUnwritable, InvalidArgument.
        """
        session, limit = self._entered(), Deadline(positive_seconds("deadline", deadline))
        session.check()
        await in_thread(lambda: self.root.hold(checkpoint_id, name), "holding", limit)
        self.events.add(EventKind.RETENTION, f"held by {name!r}", checkpoint_id=checkpoint_id)

    async def release(self, checkpoint_id: str, name: str, *, deadline: float = 60.0) -> None:
        """End a hold; one that is not there is fine. Raises StaleController, StateUnwritable, InvalidArgument."""
        session, limit = self._entered(), Deadline(positive_seconds("deadline", deadline))
        session.check()
        await in_thread(lambda: self.root.release(checkpoint_id, name), "releasing", limit)
        self.events.add(EventKind.RETENTION, f"released by {name!r}", checkpoint_id=checkpoint_id)

    async def holds(self, *, deadline: float = 60.0) -> list[tuple[str, str]]:
        """Every hold of the root: (checkpoint id, name). Raises StateCorrupt."""
        self._entered()
        limit = Deadline(positive_seconds("deadline", deadline))
        found = await in_thread(self.root.holds, "reading the holds", limit)
        return [(hold.checkpoint_id, hold.name) for hold in found]

    async def reopened(self, timeout: float | None = None) -> bool:
        """Wait for pending Resumes; whether none is left. timeout: seconds, or None for no limit of its own."""
        session = self._entered()
        while session.background:
            done, _ = await asyncio.wait(session.background, timeout=timeout)
            if not done:
                return False
        return True

    def _entered(self) -> Session:
        if self._session is None:
            raise UsageError("use the coordinator inside its `async with` block")
        return self._session


def _lease(seconds: float | None) -> float | None:
    return None if seconds is None else min(positive_seconds("lease_ttl", seconds), MAX_LEASE_TTL)


def _new_id(given: str | None, prefix: str) -> str:
    if given is None:
        return new_checkpoint_id(prefix)
    if problem := checkpoint_id_problem(given):
        raise UsageError(f"checkpoint_id {given!r} {problem}")
    return given
