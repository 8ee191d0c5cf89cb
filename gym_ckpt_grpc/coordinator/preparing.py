"""Prepare over the fleet: stage by stage, each within its own part of the time. Source: coordination section 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import NotPrepared, PrepareFailed, describe
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fanout import PREPARE_STAGES, in_stages, stage_part
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome, failures
from gym_ckpt_grpc.coordinator.report import FleetReport
from gym_ckpt_grpc.coordinator.session import Heard, Session
from gym_ckpt_grpc.coordinator.stage_progress import told
from gym_ckpt_grpc.coordinator.tracing import Stages
from gym_ckpt_grpc.protocol.errors import InvalidPhase
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gymckpt.v1 import participant_pb2

CALL_GRACE = 5.0
"""Seconds by which a call's gRPC deadline exceeds its stage's part."""


class Preparing:
    """One Prepare of a fixed membership. excluded: optional members whose call failed, with the reason."""

    def __init__(self, session: Session, checkpoint_id: str, heard: Heard) -> None:
        self._session = session
        self._checkpoint_id = checkpoint_id
        self._heard = heard
        self.excluded: dict[str, str] = {}

    async def run(
        self,
        members: Sequence[Member],
        ready_within: float,
        deadline: Deadline,
        known: FleetReport,
        spans: Stages,
    ) -> FleetReport:
        """Prepare every stage. Raises NotPrepared at the first that is not ready: later ones stay untouched.

        Raises PrepareFailed if a call to a required member failed, once its whole stage has answered.
        """
        stages = in_stages(members, PREPARE_STAGES)
        all_ready = deadline.within(ready_within)
        outcomes: list[Outcome[Any]] = []
        for (kind,) in PREPARE_STAGES:
            stage = stages[0] if stages and stages[0][0].kind is kind else []
            with spans.stage(kind.value, len(stage)):
                if not stage:
                    continue
                part = all_ready.within(stage_part(stages, all_ready.left()))
                stages = stages[1:]
                answers = await self._stage(stage, part, deadline)
                outcomes += answers
                self._exclude_or_raise(stage, answers, outcomes)
                self._tell(stage, answers)
                if waiting := [o for o in answers if o.ok and wire.phase_from(o.answer.phase) is not Phase.PREPARED]:
                    report = await self._report(members, outcomes, known, deadline, ready=False)
                    names = ", ".join(outcome.name for outcome in waiting)
                    raise NotPrepared(f"not ready in time: {names}: {report.text()}", outcomes, report)
        return await self._report(members, outcomes, known, deadline, ready=True)

    async def _stage(self, stage: list[Member], part: Deadline, deadline: Deadline) -> list[Outcome[Any]]:
        session, checkpoint_id = self._session, self._checkpoint_id
        for member in stage:
            session.renewal.begin(member, checkpoint_id, session.lease_ttl)
        async with told(session, stage, checkpoint_id):
            outcomes = await session.ask(
                stage,
                "Prepare",
                prepare_request(session, checkpoint_id, part),
                deadline.within(part.left() + CALL_GRACE),
                heard=self._heard,
                lease_of=checkpoint_id,
            )
        return [_resumed_meanwhile(outcome) for outcome in outcomes]

    def _exclude_or_raise(self, stage: list[Member], answers: list[Outcome[Any]], outcomes: list[Outcome[Any]]) -> None:
        optional = {member.name for member in stage if not member.required}
        failed = failures(answers)
        if any(outcome.name not in optional for outcome in failed):
            raise PrepareFailed(f"Prepare failed: {describe(failed)}", outcomes)
        for outcome in failed:
            self.excluded[outcome.name] = f"Prepare failed: {outcome.error}"

    def _tell(self, stage: list[Member], answers: list[Outcome[Any]]) -> None:
        ready = sum(1 for o in answers if o.ok and wire.phase_from(o.answer.phase) is Phase.PREPARED)
        kinds = "/".join(dict.fromkeys(member.kind.value for member in stage))
        text = f"{kinds}: {ready} of {len(stage)} prepared"
        self._session.events.add(EventKind.STAGE, text, checkpoint_id=self._checkpoint_id)

    async def _report(
        self,
        members: Sequence[Member],
        outcomes: list[Outcome[Any]],
        known: FleetReport,
        deadline: Deadline,
        *,
        ready: bool,
    ) -> FleetReport:
        reports = {o.name: wire.report_from(o.answer.report) for o in outcomes if o.ok}
        restarts = set(known.restarts)
        for member in members:
            report = reports.get(member.name)
            if report and report.restart_count > len(report.restarts):
                restarts.update(await self._all_restarts(member, deadline))
            elif report:
                restarts.update(report.restarts)
        return FleetReport(
            ready=ready,
            participants={**known.participants, **reports},
            restarts=tuple(sorted(restarts)),
            excluded={**known.excluded, **self.excluded},
        )

    async def _all_restarts(self, member: Member, deadline: Deadline) -> tuple[EpisodeId, ...]:
        which = EpisodeListKind.RESTART
        listed = await self._session.list_episodes(member, which, deadline)
        if listed.error:
            raise PrepareFailed(f"the restarts could not be listed: {describe([listed])}", [listed])
        return listed.answer


def prepare_request(session: Session, checkpoint_id: str, part: Deadline) -> Any:
    """Each try waits for what is left of the part, and stays below its own deadline."""

    def build(member: Member, seconds: float) -> participant_pb2.PrepareRequest:
        return participant_pb2.PrepareRequest(
            context=session.context(checkpoint_id),
            ready_within=wire.duration(min(part.left(), seconds * 0.9)),
            lease_ttl=wire.duration(session.lease_ttl),
        )

    return build


def _resumed_meanwhile(outcome: Outcome[Any]) -> Outcome[Any]:
    """A Prepare that ended IDLE was resumed while it waited: no success."""
    if outcome.reply is None or wire.phase_from(outcome.reply.phase) is not Phase.IDLE:
        return outcome
    error = InvalidPhase("was resumed while it prepared", participant=outcome.name, phase=Phase.IDLE.name)
    return replace(outcome, reply=None, error=error)
