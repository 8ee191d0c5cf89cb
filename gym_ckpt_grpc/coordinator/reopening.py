"""Resume everywhere: a head start for each stage, and retries that go on in the background where one does not answer.

Source: coordination sections 3, 4 and 5.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator.calls import identity_problem
from gym_ckpt_grpc.coordinator.codes import outcome_of_all
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import describe
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fanout import RESUME_STAGES, in_stages, with_head_start
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.coordinator.result import CheckpointState
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.protocol.errors import ControlError, InternalError, OutOfTime
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.telemetry.catalogue import COORDINATE_RESUME
from gymckpt.v1 import participant_pb2

PATIENT_TRIES = 4
"""Failed tries after which a Resume counts as pending, and its caller waits for it no longer."""
TRY_LIMIT = 10.0
"""Seconds of one try; the next one joins what still runs."""
KEEPALIVE_GRACE = 15.0
"""Seconds by which a lease may outlive its ttl while a cut connection looks alive (protocol section 4)."""


class Reopening:
    """Resume of one checkpoint at its members. Each call is a task of the session, so it may outlive the caller.

    outcomes: those known so far. begun: monotonic seconds of the first sending, or None. last_open: of the last good
    reply, or None. replaced: members
    whose place another process has; it is open, but nothing of the checkpoint is in it.
    """

    def __init__(self, session: Session, checkpoint_id: str, members: Iterable[Member], *, keep_write: bool = False):
        self._session = session
        self._checkpoint_id = checkpoint_id
        self._members = list(members)
        self._keep_write = keep_write
        self._settled: dict[str, asyncio.Future[None]] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._last_failure: dict[str, ControlError] = {}
        self.outcomes: dict[str, Outcome[Any]] = {}
        self.begun: float | None = None
        self.last_open: float | None = None
        self.replaced: list[ParticipantIdentity] = []

    @property
    def pending(self) -> tuple[ParticipantIdentity, ...]:
        """Members that have not answered yet, or answered with a failure."""
        return tuple(m.identity for m in self._members if m.name not in self.outcomes or self.outcomes[m.name].error)

    async def run(self, deadline: Deadline) -> list[Outcome[Any]]:
        """Resume all; returns when each has answered, is being tried in the background, or the deadline came.

        One outcome per member, in their order. Cancelling it leaves the calls to the session.
        """
        again = self.begun is not None and not self.pending
        self.begun = self.begun or time.monotonic()
        stages = in_stages(self._members, RESUME_STAGES)
        trace, count = self._session.trace, len(self._members)
        with trace.operation(
            COORDINATE_RESUME, "resume", checkpoint_id=self._checkpoint_id, participants=count
        ) as timed:
            if again:
                timed.replayed()
            await with_head_start(stages, self._start, grace=min(self._session.settings.stage_grace, deadline.left()))
            if self._settled:
                await asyncio.wait(self._settled.values(), timeout=deadline.left())
            outcomes = [self._outcome(member) for member in self._members]
            # Whoever has not answered is not known to be open: an error here, whatever its lease will do.
            timed.failed(outcome_of_all(outcomes))
        failed = [outcome for outcome in outcomes if outcome.error]
        kept = "; their records are in memory, nothing is durable yet" if self._keep_write else ""
        text = f"pending: {describe(failed)}" if failed else f"{len(outcomes)} participants are open{kept}"
        released = CheckpointState.RELEASED if kept and not failed else CheckpointState.UNSPECIFIED
        self._session.events.add(EventKind.RESUME, text, checkpoint_id=self._checkpoint_id, state=released)
        return outcomes

    def _start(self, member: Member) -> asyncio.Future[Any]:
        begun = self._calls.get(member.name)
        if begun is not None and not begun.cancelled():
            return self._settled[member.name]  # a run that was cut short began it
        settled = self._settled[member.name] = asyncio.get_running_loop().create_future()
        task = self._session.own(self._resume(member), f"resume {self._checkpoint_id} at {member.name}")
        self._calls[member.name] = task
        task.add_done_callback(lambda task: self._ended(member, task))
        return settled

    def _ended(self, member: Member, task: asyncio.Task[Any]) -> None:
        if self._calls[member.name] is not task:
            return  # begun again since
        if not task.cancelled() and (error := task.exception()):
            failure = InternalError(f"Resume ended unexpectedly: {error!r}", participant=member.name)
            self.outcomes[member.name] = Outcome("Resume", member.identity, None, failure)
        self._settle(member)

    def _settle(self, member: Member) -> None:
        settled = self._settled[member.name]
        if not settled.done():
            settled.set_result(None)

    async def _resume(self, member: Member) -> None:
        session = self._session
        request = participant_pb2.ResumeRequest(
            context=session.context(self._checkpoint_id), keep_write=self._keep_write
        )
        session.renewal.release(member, self._checkpoint_id)
        outcome = await session.ask_one(
            member,
            "Resume",
            lambda member, seconds: request,
            Deadline(session.lease_ttl + KEEPALIVE_GRACE),
            try_limit=TRY_LIMIT,
            on_retry=lambda tries, error: self._on_retry(member, tries, error),
            pin=False,
        )
        self.outcomes[member.name] = outcome
        if outcome.reply is not None:
            self._compare(member, outcome.reply)

    def _compare(self, member: Member, reply: participant_pb2.ResumeResponse) -> None:
        """A new process answers a Resume as gladly as the old one: its identity is compared here."""
        self.last_open = time.monotonic()
        found = wire.identity_from(reply.participant)
        if changed := identity_problem(member.identity, found):
            self.replaced.append(found)
            self._session.events.add(
                EventKind.RESUME, changed.message, checkpoint_id=self._checkpoint_id, participant=member.name
            )

    def _on_retry(self, member: Member, tries: int, error: ControlError) -> None:
        self._last_failure[member.name] = error
        if tries >= PATIENT_TRIES:
            self._settle(member)

    def _outcome(self, member: Member) -> Outcome[Any]:
        if known := self.outcomes.get(member.name):
            return known
        waiting = OutOfTime("Resume has not answered yet; it goes on", participant=member.name)
        error, begun = self._last_failure.get(member.name, waiting), self.begun or time.monotonic()
        return Outcome("Resume", member.identity, None, error, duration=time.monotonic() - begun, begun=begun)
