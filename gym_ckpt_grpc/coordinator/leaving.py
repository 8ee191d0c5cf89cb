"""Leaving a checkpoint's block: whatever happened, the fleet is open again. Source: coordination section 5."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import RetireFailed, describe
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.outcomes import failures
from gym_ckpt_grpc.coordinator.released import drop_kept, newest
from gym_ckpt_grpc.coordinator.reopening import Reopening
from gym_ckpt_grpc.coordinator.result import CheckpointResult, CheckpointState
from gym_ckpt_grpc.coordinator.retiring import retire_everywhere
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.coordinator.session_state import Step
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.storage import RetentionOutcome

if TYPE_CHECKING:
    from gym_ckpt_grpc.coordinator.transaction import Checkpoint

RESTARTS = 3
"""How often an exit is begun: a closing event loop cancels every task, that of the exit too."""


async def leave_shielded(
    run: Callable[[Deadline], Coroutine[Any, Any, None]], limit: float, error: BaseException | None
) -> None:
    """Run an exit as its own task, at most `limit` seconds; a cancellation of the caller does not shorten it.

    error: what the body raised, which is to leave unchanged. A cancellation that came during the exit is raised
    after it, or, where the body raised something else, delivered at the caller's next await.
    """
    deadline, interrupted = Deadline(limit), False
    for again in itertools.count(1):
        task = asyncio.get_running_loop().create_task(run(deadline), name="leave a checkpoint")
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                interrupted = True
        if not task.cancelled() or again == RESTARTS:
            _tell(task, error)
            break
    if not interrupted or isinstance(error, asyncio.CancelledError):
        return
    if error is None:
        raise asyncio.CancelledError
    if current := asyncio.current_task():
        current.uncancel()
        current.cancel()


def _tell(task: asyncio.Task[None], error: BaseException | None) -> None:
    failure = asyncio.CancelledError() if task.cancelled() else task.exception()
    if failure is None:
        return
    if error is None:
        raise failure
    error.add_note(f"leaving failed: {failure!r}")


class Leaving:
    """The exit of one checkpoint. notes: its failures, for people."""

    def __init__(self, session: Session, checkpoint: Checkpoint) -> None:
        self._session = session
        self._checkpoint = checkpoint
        self._reopening: Reopening | None = None
        self._state = CheckpointState.ABORTED
        self._retention: asyncio.Task[RetentionOutcome] | None = None
        self.notes: list[str] = []

    async def run(self, deadline: Deadline) -> None:
        """Do what the state at the exit asks for. Never raises for a participant that does not answer."""
        checkpoint, session = self._checkpoint, self._session
        begun = time.monotonic()
        await self._find_out(deadline)
        published = checkpoint.publication.number is not None
        self._state = CheckpointState.PUBLISHED if published else CheckpointState.ABORTED
        if published and checkpoint.stop:
            self._state = CheckpointState.STOPPED
        stays_closed = published and checkpoint.stop and checkpoint.on_stop == "close"
        if session.replaced or stays_closed or not checkpoint.members:
            self.let_go()
        elif published and self._is_released():
            self._reopening = checkpoint.reopening
            session.own(drop_kept(session, checkpoint.id, checkpoint.members), f"drop what {checkpoint.id} kept")
        else:
            await self._reopen(deadline)
        self._count_release()
        if published and checkpoint.stop and checkpoint.on_stop == "retire" and not session.replaced:
            await self._retire(deadline)
        checkpoint.timing.resume += time.monotonic() - begun
        if published and not checkpoint.stop:
            # A trainer that stops has no time to spare: the next run removes what is old.
            self._retention = self._retention or session.retaining.start(checkpoint.id)
        if not published:
            await self._tell_aborted()
            if not checkpoint.publication.unknown:
                session.retaining.aborted.add(checkpoint.id)

    def _is_released(self) -> bool:
        """Whether every member was opened before this exit."""
        released = self._checkpoint.reopening
        return released is not None and not released.pending

    def _count_release(self) -> None:
        """What was opened before is not opened again by the Resume of an exit, which only drops what was kept."""
        checkpoint = self._checkpoint
        opened = checkpoint.reopening if self._is_released() else self._reopening
        if opened is not None:
            checkpoint.timing.released_at = opened.last_open or checkpoint.timing.released_at

    async def _tell_aborted(self) -> None:
        """Say that nothing is published, as far as is known; of a released one, what stands instead."""
        checkpoint, text = self._checkpoint, "ended without being published"
        if checkpoint.publication.unknown:
            text = "ended, and whether it is published is not known"
        if checkpoint.released and not checkpoint.failure:
            checkpoint.failure = f"released, and {text}; {await newest(self._session)}"
        text = f"{text}: {checkpoint.failure}" if checkpoint.failure else text
        self._session.events.add(
            EventKind.PUBLICATION, text, checkpoint_id=checkpoint.id, state=CheckpointState.ABORTED
        )

    async def _find_out(self, deadline: Deadline) -> None:
        if not self._checkpoint.publication.unknown:
            return
        try:
            await self._checkpoint.publication.find_out(deadline)
        except ControlError as error:
            self.notes.append(f"whether {self._checkpoint.id} is published could not be read: {error}")
            return
        # What this process tried and did not hear of; what another one tried, that one has counted.
        tried = self._checkpoint.step is not Step.PUBLISHED and self._checkpoint.timing.publish > 0
        if tried and self._checkpoint.publication.number is not None:
            self._session.count_rollouts("protected", len(self._checkpoint.continued))

    def let_go(self) -> None:
        """Renew no lease of it any more."""
        for member in self._checkpoint.members:
            self._session.renewal.release(member, self._checkpoint.id)

    async def _reopen(self, deadline: Deadline) -> None:
        checkpoint = self._checkpoint
        if self._reopening is None:
            self._reopening = Reopening(self._session, checkpoint.id, checkpoint.members)
        outcomes = await self._reopening.run(deadline)
        checkpoint.hear(outcomes)
        if failed := failures(outcomes):
            self.notes.append(f"resume is pending: {describe(failed)}")

    async def _retire(self, deadline: Deadline) -> None:
        checkpoint = self._checkpoint
        try:
            await retire_everywhere(self._session, checkpoint.members, checkpoint.scope, deadline)
        except (RetireFailed, ControlError) as error:
            self.notes.append(f"retiring the scope: {error}")

    def result(self) -> CheckpointResult:
        """What is known now."""
        checkpoint, publication = self._checkpoint, self._checkpoint.publication
        parts = publication.manifest.members if publication.manifest else ()
        return CheckpointResult(
            checkpoint_id=checkpoint.id,
            epoch=self._session.epoch,
            state=self._state,
            sequence_number=publication.number or 0,
            manifest_digest=publication.digest,
            records=sum(part.records for part in parts),
            bytes=sum(part.bytes for part in parts),
            state_bytes=sum(part.state_bytes for part in parts),
            chain=max((part.chain for part in parts), default=0),
            base=checkpoint.base_id,
            continued=len(checkpoint.continued),
            restarts=len(checkpoint.restarts),
            resume_pending=self._reopening.pending if self._reopening else (),
            replaced=tuple(self._reopening.replaced) if self._reopening else (),
            failure=checkpoint.failure,
            notes=tuple(self.notes),
            retention=self._retention,
            timing=checkpoint.timing,
        )
