"""Legacy runs: an agent's `/run`, in which the agent owns the protocol as well as the loop.

The protocol is tracked like an environment's; the loop runs in a request that the run sends to its own server, as
an activation of the run's session. A restored run waits as its record until a `/run` claims it, and only then the
author's hook installs its state. Source: participants section 9.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.participants.activations import ActivationIndex
from gym_ckpt_grpc.participants.admission import HELD, Admission, Held
from gym_ckpt_grpc.participants.agent_sessions import AgentHooks, RestoredSession, Session, run_key
from gym_ckpt_grpc.participants.episode_context import EpisodeContext
from gym_ckpt_grpc.participants.episode_runs import EpisodeLimits, run_episode
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.records import AgentRecord, content_type, plain
from gym_ckpt_grpc.participants.reports import covers
from gym_ckpt_grpc.participants.session_table import SessionTable
from gym_ckpt_grpc.participants.steps import Live, StepTracker
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId

T = TypeVar("T")
log = logging.getLogger(__name__)


class RunContext(EpisodeContext):
    """A legacy run as its protocol sees it: an episode, and the session in which its loop runs.

    cookie_session_id: the id that the author's own cookie had in the crashed attempt, else the one given to `run`.
    """

    def __init__(
        self,
        session: Session,
        task: Mapping[str, Any],
        restored: Any,
        live: Live,
        steps: StepTracker,
        names: DataPlaneNames,
        routing_id: str,
    ) -> None:
        super().__init__(session.episode, task, restored, live, steps, names)
        self._session = session
        self._routing_id = routing_id

    @property
    def session_key(self) -> str:
        """The key of its session, by which the author's hooks know it."""
        return self._session.key

    @property
    def cookie_session_id(self) -> str | None:
        return self._session.cookie_session_id

    def self_call_headers(self, index: int = 1) -> dict[str, str]:
        """Headers of the call to the agent's own `/v1/responses`, in which the loop runs.

        index: 1 for the first activation of the run, and so on; after a restore the one that was completed is
        answered from the record. Names the worker that holds the session, if there are several.
        """
        headers = {self._names.activation_header: str(index)}
        if self._routing_id:
            headers[self._names.owner_header] = self._routing_id
        return headers

    async def run_cleanup(self, limit: float) -> None:
        """Stop the loop first: it does not outlive its run, and what it works with is freed by the rest."""
        if self._session.live is not None:
            self.on_cleanup(lambda: _stop_activation(self._session))
        await super().run_cleanup(limit)

    async def mark_restart(self) -> None:
        """Say that this run cannot be captured, an activation of it that is under way included."""
        await super().mark_restart()
        if self._session.live is not None:
            await self._steps.mark_restart(self._session.live)


@dataclass(frozen=True, slots=True)
class AgentRuns:
    """The legacy runs of an AgentOwner. restored: those that no `/run` has claimed, by rollout."""

    hooks: AgentHooks
    admission: Admission
    steps: StepTracker
    sessions: SessionTable[Session]
    names: DataPlaneNames
    limits: EpisodeLimits
    routing_id: str = ""
    restored: dict[str, AgentRecord] = field(default_factory=dict)  # the overlap rule allows one of each rollout

    # ---- the data plane

    async def run(
        self,
        episode: EpisodeId,
        task: Mapping[str, Any],
        protocol: Callable[[RunContext], Awaitable[T]],
        cookie_session_id: str | None,
    ) -> T:
        """See AgentOwner.run."""
        session = await self.admission.admit(lambda: self._claim(episode, cookie_session_id), episode)
        boundary = await self._install(session, session.record) if session.record is not None else None
        live = session.run
        assert live is not None, "begun by the claim, or by the install"
        context = RunContext(session, task, boundary, live, self.steps, self.names, self.routing_id)

        async def whole(context: RunContext) -> T:
            await self.steps.park(live)  # closed upon while it was installed
            return await protocol(context)

        try:
            return await run_episode(self.steps, live, context, whole, self.limits)
        finally:
            session.run = None
            self.let_go(session)

    def _claim(self, episode: EpisodeId, cookie_session_id: str | None) -> Session | Literal[Held.HELD]:
        """Register the run, with the restored one that it continues; from now on that is not pending."""
        self.admission.check_mark(episode)
        if self.admission.closed:
            return HELD
        key = run_key(episode)
        self._check_free(key)
        record = self._restored_of(episode)
        session = Session(key, episode, cookie_session_id=cookie_session_id)
        if record is None:
            session.run = self.steps.begin(_protocol_key(key), episode)
        else:
            session = _claimed_session(session, record)
            del self.restored[episode.rollout_id]
        self.sessions.add(session)
        self.sessions.claim(episode)
        return session

    def _check_free(self, key: str) -> None:
        other = self.sessions.get(key)
        if other is None:
            return
        if other.retired:
            raise StaleAttempt(f"{key} is being retired", episodes=[other.episode])
        raise InvalidArgument(f"{key} is running already", episodes=[other.episode])

    async def _install(self, session: Session, record: AgentRecord) -> Any:
        """Let the author's hook install a claimed run, and begin it at its boundary, which is the answer.

        Until then it counts as its record: a close meanwhile exports that. If the hook fails, the claim is returned.
        """
        claiming = session.claiming = asyncio.get_running_loop().create_future()
        try:
            if record.protocol_boundary is not None:  # else it starts over from its input
                state = RestoredSession(
                    session.key,
                    session.episode,
                    plain(record.session),
                    session.cookie_session_id,
                    content_type(record.session),
                )
                await self.hooks.restore_sessions([state])
            self._check_retired(session)
            boundary = record.protocol_boundary
            session.run = self.steps.begin(_protocol_key(session.key), session.episode, boundary=boundary)
            session.record = None
            return boundary
        except BaseException:
            await self._return_claim(session, record)
            raise
        finally:
            claiming.set_result(None)

    async def _return_claim(self, session: Session, record: AgentRecord) -> None:
        try:
            if not session.retired:
                await self.hooks.retire_session(session.key)
        except Exception:
            log.warning("what the failed restore of %s left could not be freed", session.key, exc_info=True)
        finally:
            if not session.retired:  # else the retire frees it
                self.sessions.remove(session)
                self.restored[record.episode.rollout_id] = record

    def _check_retired(self, session: Session) -> None:
        if session.retired:
            raise StaleAttempt(f"attempt {session.episode} was retired", episodes=[session.episode])

    def let_go(self, session: Session) -> None:
        """Track a run no more once neither its protocol nor an activation runs; one being retired stays."""
        if session.legacy and not session.executions and session.record is None and not session.retired:
            self.sessions.remove(session)

    # ---- checkpoints

    def here(self, rollout_id: str) -> list[EpisodeId]:
        """The unclaimed run of a rollout, if there is one."""
        record = self.restored.get(rollout_id)
        return [record.episode] if record is not None else []

    def pending(self) -> Iterable[EpisodeId]:
        """Episodes whose restored run nothing has claimed."""
        return [record.episode for record in self.restored.values()]

    def forget_restored(self, retired: EpisodeId) -> None:
        """Drop the unclaimed run that a retire covers."""
        record = self.restored.get(retired.rollout_id)
        if record is not None and covers(retired, record.episode):
            del self.restored[retired.rollout_id]

    def delete_restored(self, episode: EpisodeId) -> None:
        """Drop the unclaimed run of exactly this attempt: nothing of it is installed yet."""
        if self._restored_of(episode) is not None:
            del self.restored[episode.rollout_id]

    def _restored_of(self, episode: EpisodeId) -> AgentRecord | None:
        record = self.restored.get(episode.rollout_id)
        return record if record is not None and record.episode == episode else None


def next_run(record: AgentRecord, target: EpisodeId) -> AgentRecord:
    """A run's record as the attempt that continues it. Raises InvalidState for one that is no run of its episode."""
    if record.session_key != run_key(record.episode):
        raise InvalidState(f"{record.session_key} is no run of {record.episode}", record.episode)
    return replace(record, episode=target, session_key=run_key(target))


def _claimed_session(session: Session, record: AgentRecord) -> Session:
    """The session of a claimed run: what its record says."""
    return Session(
        session.key,
        session.episode,
        continuation=record.boundary,
        index=ActivationIndex(record.activations, record.activation_reply),
        restored_replies=dict(record.kept_replies),
        record=record,
        cookie_session_id=record.cookie_session_id or session.cookie_session_id,
    )


def protocol_of(session: Session) -> str:
    """The key under which the steps of a run are tracked, beside those of its activations."""
    return _protocol_key(session.key)


def _protocol_key(key: str) -> str:
    return f"{key} (protocol)"


async def _stop_activation(session: Session) -> None:
    """Cancel an activation, once, and wait until it has ended."""
    live = session.live
    if live is not None:
        live.runs.cancel()
        await asyncio.wait({live.ended})
