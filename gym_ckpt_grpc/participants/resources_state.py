"""How sessions of a resources server are exported, restored, retired and deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import InvalidState, RecordBatch
from gym_ckpt_grpc.participants.admission import Admission, wait_for
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.hooks import within
from gym_ckpt_grpc.participants.overlap import check_overlap, naming_sources, targets_of
from gym_ckpt_grpc.participants.precopy import Precopy
from gym_ckpt_grpc.participants.records import ResourcesRecord, content_type, plain
from gym_ckpt_grpc.participants.reports import covers
from gym_ckpt_grpc.participants.resource_sessions import RefusedSessions, Requests, ResourceSession
from gym_ckpt_grpc.participants.session_table import SessionTable, free_each
from gym_ckpt_grpc.participants.slices import in_slices
from gym_ckpt_grpc.participants.verify_mode import ResourcesHooks, ResourcesMode, RestoredState
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record


@dataclass(frozen=True, slots=True)
class StagedSessions:
    """Sessions that the author's hook has installed and that nothing can reach yet."""

    sessions: Sequence[ResourceSession]


@dataclass(slots=True)
class ResourcesState:
    """The checkpointed side of a ResourcesOwner. refused: freed sessions of retired attempts, until Forget."""

    mode: ResourcesMode
    hooks: ResourcesHooks | None
    admission: Admission
    blocking: Blocking
    sessions: SessionTable[ResourceSession]
    requests: Requests
    refused: RefusedSessions
    precopy: Precopy = field(init=False)
    _gone: dict[str, ResourceSession] = field(default_factory=dict)

    def __post_init__(self) -> None:
        exporting = self.hooks if self.mode is ResourcesMode.EXPORTED else None
        self.precopy = Precopy(exporting, self._episode_of, "session state")
        self.sessions.turned = self.precopy.drop

    def _episode_of(self, key: str) -> EpisodeId | None:
        session = self.sessions.get(key)
        return session.episode if session is not None and not session.retired else None

    # ---- sessions that the server no longer has

    def look_for_gone(self) -> None:
        """Ask the author, once per close, which tracked sessions the server no longer has: they are restarts."""
        held = getattr(self.hooks, "held_sessions", None)
        if self.mode is ResourcesMode.EXPORTED and callable(held):
            still = held()
            self._gone = {each.key: each for each in self.sessions if each.key not in still}

    def forget_gone(self) -> None:
        self._gone = {}

    def gone(self) -> list[ResourceSession]:
        """Sessions found gone at this close; one that has ended since, by a request under way then, is not one."""
        return [each for each in self._gone.values() if self.sessions.get(each.key) is each]

    # ---- export

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        """Records of the scope's sessions; one that turns out to be gone is left out, untracked and named."""
        if self.mode is ResourcesMode.RESTART_ONLY:
            return
        taken = [each for each in self.sessions if self._exported(each, scope)]
        if not taken:
            return
        if self.mode is ResourcesMode.STATELESS or self.hooks is None:
            async for records in in_slices(_record(each).to_record() for each in taken):
                yield RecordBatch(records)
            return
        cut = await self.precopy.cut([each.key for each in taken])
        left_out = [each for each in taken if each.key not in cut]
        if left_out:
            for session in left_out:
                self.sessions.remove(session)
            yield RecordBatch([], [each.episode for each in left_out if each.episode is not None])
        kept = (each for each in taken if each.key in cut) if left_out else taken
        async for records in in_slices(_record(each).to_record(cut.take(each.key, _whose(each))) for each in kept):
            yield RecordBatch(records)

    def _exported(self, session: ResourceSession, scope: EpisodeScope) -> bool:
        known = session.episode is not None and session.episode in scope
        return known and not session.retired and session.key not in self._gone

    # ---- restore

    async def stage(self, records: Sequence[Record], scope: RestoreScope, unattributed: int) -> StagedSessions:
        """Check everything, and let the author's hook install it behind the closed gate."""
        check_overlap(scope, self.admission, self._here, unattributed)
        made: dict[str, RestoredState] = {}
        for record, target in targets_of(records, scope):
            if self.mode is ResourcesMode.RESTART_ONLY:
                raise InvalidState(
                    f"a restart-only server has no use for the record of {record.episode}", record.episode
                )
            source = ResourcesRecord.from_record(record)
            if source.session_id in made or self.sessions.get(source.session_id) is not None:
                raise InvalidState(f"session {source.session_id} of {record.episode} exists already", record.episode)
            made[source.session_id] = RestoredState(
                source.session_id, target, plain(source.state), content_type(source.state)
            )
        if made and self.mode is ResourcesMode.EXPORTED and self.hooks is not None:
            with naming_sources(scope):
                await self.hooks.restore_sessions(list(made.values()))
        return StagedSessions([ResourceSession(each.session_id, each.episode) for each in made.values()])

    def _here(self, rollout_id: str) -> list[EpisodeId]:
        seeds = [each.asked.episode for each in self.requests.seeds_of(rollout_id)]
        sessions = [each.episode for each in self.sessions.of_rollout(rollout_id)]
        return [episode for episode in [*seeds, *sessions] if episode is not None]

    async def discard(self, staged: StagedSessions) -> None:
        """Undo an install by the retire hook; what it cannot free stays tracked as being retired."""
        for session in staged.sessions:
            self.sessions.add(session)
            self.mark_retired(session)
        await free_each(staged.sessions, self._free)

    # ---- retire, delete

    def mark_retired(self, session: ResourceSession) -> None:
        """From now on it is being retired: its requests are refused, it blocks, and it is not exported."""
        session.retired = True
        self.blocking.set(session.key, BlockerReason.RETIRING, session.episode)
        self.admission.changed()

    async def wait_seeds(self, retired: EpisodeId, budget: Budget) -> None:
        """Wait for the seeds under way that a retire covers; those that wait at the gate are not under way."""
        for seed in self.requests.seeds_of(retired.rollout_id):
            if seed.asked.episode is not None and covers(retired, seed.asked.episode):
                await wait_for(seed.done, budget, f"a seed of {seed.asked.episode}")

    async def retire(self, session: ResourceSession, budget: Budget) -> None:
        """Cancel its requests once, wait until they ended, and free it. Cut short it stays tracked."""
        self.mark_retired(session)
        if session.episode is not None:
            self.refused.add(session.key, session.episode)
        for request in list(session.requests.values()):
            if not request.seed and not request.closes:
                request.runs.cancel()
        for request in list(session.requests.values()):
            await wait_for(request.done, budget, f"{request.asked.path} of session {session.key}")
        if self.sessions.get(session.key) is session:
            await within(budget, self._free(session), f"the retire of session {session.key}")

    async def end_orphans(self, retired: EpisodeId, budget: Budget) -> None:
        """Cancel once, and wait for, requests whose session was closed under them: no session leads to them."""
        requests = self.requests.others_of(retired)
        for request in requests:
            request.runs.cancel()
        for request in requests:
            await wait_for(request.done, budget, f"{request.asked.path} of {request.episode}")

    async def _free(self, session: ResourceSession) -> None:
        """Free the author's state, and only then track it no more."""
        if self.mode is ResourcesMode.EXPORTED and self.hooks is not None:
            await self.hooks.retire_session(session.key)
        self.sessions.remove(session)
        self.blocking.clear(session.key)
        self.admission.changed()

    async def delete_restored(self, episode: EpisodeId) -> None:
        """Free restored sessions that nothing has started; requests for them are held meanwhile."""
        sessions = self.sessions.pending_sessions(episode)
        for session in sessions:
            session.deleting = True
        try:
            for session in sessions:
                await self._free(session)
        finally:
            for session in sessions:
                session.deleting = False
            self.admission.wake(episode.rollout_id)


def _whose(session: ResourceSession) -> EpisodeId:
    assert session.episode is not None, "unattributed sessions are in no scope"
    return session.episode


def _record(session: ResourceSession) -> ResourcesRecord:
    return ResourcesRecord(_whose(session), session.key)
