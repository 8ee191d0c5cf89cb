"""How agent sessions are exported, restored, retired and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import HookFailed, InvalidState
from gym_ckpt_grpc.participants.activations import ActivationIndex
from gym_ckpt_grpc.participants.admission import Admission
from gym_ckpt_grpc.participants.agent_runs import AgentRuns, next_run, protocol_of
from gym_ckpt_grpc.participants.agent_sessions import RUN_PREFIX, AgentHooks, RestoredSession, Session
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.hooks import within
from gym_ckpt_grpc.participants.overlap import check_overlap, naming_sources, targets_of
from gym_ckpt_grpc.participants.precopy import Cut, Precopy
from gym_ckpt_grpc.participants.records import AgentRecord, content_type, plain
from gym_ckpt_grpc.participants.reports import run_side_by_side
from gym_ckpt_grpc.participants.seeds import Seeds
from gym_ckpt_grpc.participants.session_table import SessionTable, free_each
from gym_ckpt_grpc.participants.slices import in_slices
from gym_ckpt_grpc.participants.steps import StepState, StepTracker, value_of
from gym_ckpt_grpc.participants.work_counts import WorkCounts
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record


@dataclass(frozen=True, slots=True)
class StagedSessions:
    """Sessions that the author's hook has installed and that nothing can reach yet, and runs to be claimed."""

    sessions: Sequence[Session]
    runs: Sequence[AgentRecord]


@dataclass(frozen=True, slots=True)
class AgentState:
    """The checkpointed side of an AgentOwner. work: counts activations that have an index."""

    hooks: AgentHooks
    admission: Admission
    blocking: Blocking
    steps: StepTracker
    sessions: SessionTable[Session]
    seeds: Seeds
    runs: AgentRuns
    precopy: Precopy = field(init=False)
    work: WorkCounts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", WorkCounts(self.admission, "turns"))
        object.__setattr__(self, "precopy", Precopy(self.hooks, self._episode_of, "session"))
        self.sessions.turned = self.precopy.drop

    def _episode_of(self, key: str) -> EpisodeId | None:
        session = self.sessions.get(key)
        if session is None or session.retired or session.closing is not None or session.record is not None:
            return None
        return session.episode

    async def export(self, scope: EpisodeScope) -> AsyncIterator[list[Record]]:
        """Records of the scope's sessions and runs, in slices. Raises HookFailed naming an episode."""
        at_boundary = {live.key: boundary for live, boundary in self.steps.exported()}
        here = [each for each in self.sessions if self._exported(each, scope, at_boundary)]
        unclaimed = [each for each in self.runs.restored.values() if each.episode in scope]
        unclaimed += [each.record for each in here if each.record is not None]
        # As of now: while the author gives the states, an activation may begin, end, or be stopped.
        taken = [_Taken.of(each, at_boundary) for each in here if each.record is None]
        self._count_work(taken, unclaimed)
        asked = [each.key for each in taken if not each.starts_over]
        cut = await self.precopy.cut(asked)
        async for records in in_slices(each.to_record(cut) for each in taken):
            yield records
        async for records in in_slices(each.to_record() for each in unclaimed):
            yield records

    def _count_work(self, taken: Iterable[_Taken], unclaimed: Iterable[AgentRecord]) -> None:
        self.work.begin_export()
        for each in taken:
            if not each.starts_over:
                self.work.take(each.key, each.completed)
        for record in unclaimed:
            self.work.take(record.session_key, record.activations)

    def _exported(self, session: Session, scope: EpisodeScope, at_boundary: Mapping[Any, Any]) -> bool:
        if session.episode not in scope or session.retired or session.closing is not None:
            return False
        if session.legacy and session.record is None and session.run is None:
            return False  # it has ended but for an activation that is being stopped
        return all(each.key in at_boundary for each in session.executions)

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> StagedSessions:
        """Check everything, and let the author's hook install it behind the closed gate."""
        check_overlap(scope, self.admission, self._here)
        sessions: dict[str, tuple[Session, Any]] = {}
        runs: dict[EpisodeId, AgentRecord] = {}
        for record, target in targets_of(records, scope):
            made = AgentRecord.from_record(record)
            if made.session_key.startswith(RUN_PREFIX) or made.protocol_boundary is not None:
                if target in runs:
                    raise InvalidState(f"{record.episode} has two runs", record.episode)
                runs[target] = next_run(made, target)
                continue
            if made.session_key in sessions or self.sessions.get(made.session_key) is not None:
                raise InvalidState(f"session {made.session_key} of {record.episode} exists already", record.episode)
            sessions[made.session_key] = (_session(made, target), made.session)
        if sessions:
            states = [
                RestoredSession(each.key, each.episode, plain(state), content_type=content_type(state))
                for each, state in sessions.values()
            ]
            with naming_sources(scope):
                await self.hooks.restore_sessions(states)
        return StagedSessions([session for session, _ in sessions.values()], list(runs.values()))

    def activate(self, staged: StagedSessions) -> None:
        """From now on sessions can be reached and runs claimed."""
        for session in staged.sessions:
            self.sessions.add(session, pending=True)
            self.work.install(session.episode, session.key, session.index.completed)
        for record in staged.runs:
            self.runs.restored[record.episode.rollout_id] = record
            self.work.install(record.episode, record.session_key, record.activations)

    def _here(self, rollout_id: str) -> list[EpisodeId]:
        seeds = [seed.episode for seed in self.seeds.of_rollout(rollout_id)]
        sessions = [session.episode for session in self.sessions.of_rollout(rollout_id)]
        return [*seeds, *sessions, *self.runs.here(rollout_id)]

    async def discard(self, staged: StagedSessions) -> None:
        """Undo an install by the retire hook; what it cannot free stays tracked as being retired."""
        for session in staged.sessions:
            self.sessions.add(session)
            self.mark_retired(session)
        await free_each(staged.sessions, self.free)

    # ---- retiring and deleting

    def mark_retired(self, session: Session) -> None:
        """From now on it is being retired: it blocks, and is not exported."""
        session.retired = True
        self.blocking.set(session.key, BlockerReason.RETIRING, session.episode)
        self.admission.changed()

    async def retire(self, session: Session, budget: Budget) -> None:
        """Stop a session and free it. Cut short it stays tracked, and the same call again goes on."""
        self.mark_retired(session)
        if session.claiming is not None and not session.claiming.done():
            await within(budget, asyncio.wait({session.claiming}), f"the restore of {session.key}")
        await run_side_by_side(self.steps.retire(live, budget) for live in session.executions)
        self.mark_retired(session)
        if session.closing is not None and not session.closing.done():
            await within(budget, asyncio.wait({session.closing}), f"the close of session {session.key}")
        await within(budget, self.free(session), f"the retire of session {session.key}")

    async def free(self, session: Session) -> None:
        """Free the author's state, and only then track it no more."""
        await self.hooks.retire_session(session.key)
        self.sessions.remove(session)
        self.blocking.clear(session.key)
        self.admission.changed()

    async def delete_restored(self, episode: EpisodeId) -> None:
        """Free restored sessions and runs that nothing has started; requests for them are held meanwhile."""
        self.work.drop(episode)
        self.runs.delete_restored(episode)
        sessions = self.sessions.pending_sessions(episode)
        for session in sessions:
            session.deleting = True
        try:
            for session in sessions:
                await self.free(session)
        finally:
            for session in sessions:
                session.deleting = False
            self.admission.wake(episode.rollout_id)


def at_boundaries(steps: StepTracker) -> dict[str, int]:
    """How many sessions stand at a boundary, and how many of them wait for the policy."""
    states = [(live.state, live.place) for live in steps.live.values()]
    waiting = sum(1 for state, place in states if state is StepState.REPLAY_STEP and place == "policy")
    return {
        "at_boundary": sum(1 for state, _ in states if state is StepState.PARKED) + waiting,
        "waiting_policy": waiting,
    }


@dataclass(frozen=True, slots=True)
class _Taken:
    """A session as an export found it. Boundaries may still be functions: those give the state as of their making."""

    episode: EpisodeId
    key: str
    legacy: bool
    boundary: Any
    protocol_boundary: Any
    seed: Mapping[str, Any]
    completed: int
    reply: Any
    kept: Mapping[str, Any]
    cookie_session_id: str | None

    @classmethod
    def of(cls, session: Session, at_boundary: Mapping[Any, Any]) -> _Taken:
        return cls(
            session.episode,
            session.key,
            session.legacy,
            at_boundary[session.key] if session.live is not None else session.continuation,
            at_boundary[protocol_of(session)] if session.legacy else None,
            session.seed,
            session.index.completed,
            session.index.reply,
            {**session.restored_replies, **session.kept},
            session.cookie_session_id,
        )

    @property
    def starts_over(self) -> bool:
        """Whether it is a run that has no boundary to go on from: then nothing of it is worth keeping."""
        return self.legacy and self.protocol_boundary is None

    def to_record(self, cut: Cut) -> Record:
        """Its record with the author's state. Raises HookFailed if there is none."""
        if self.starts_over:
            return AgentRecord(self.episode, self.key, None, cookie_session_id=self.cookie_session_id).to_record()
        if self.key not in cut:
            raise HookFailed(f"export_sessions gave no state for session {self.key}", self.episode)
        made = AgentRecord(
            self.episode,
            self.key,
            None,
            value_of(self.boundary, self.episode),
            self.seed,
            self.completed,
            self.reply,
            self.kept,
            value_of(self.protocol_boundary, self.episode),
            self.cookie_session_id,
        )
        return made.to_record(cut.take(self.key, self.episode))


def _session(record: AgentRecord, target: EpisodeId) -> Session:
    return Session(
        record.session_key,
        target,
        dict(record.seed),
        record.boundary,
        ActivationIndex(record.activations, record.activation_reply),
        restored_replies=dict(record.kept_replies),
    )
