"""`AgentOwner`: the native sessions and legacy runs of an agent server. Source: participants section 9.

Route handlers call `seed`, `invoke` and `close_session`; or `run`, and `invoke` for the call that the run sends to
its own server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import (
    Closing,
    EpisodeListKind,
    Opening,
    OwnerDefaults,
    OwnerPort,
    Pace,
    Precopied,
    RecordBatch,
)
from gym_ckpt_grpc.participants.activations import Invocation
from gym_ckpt_grpc.participants.admission import HELD, MAX_WAITING, Admission, Held
from gym_ckpt_grpc.participants.agent_runs import AgentRuns, RunContext
from gym_ckpt_grpc.participants.agent_sessions import (
    RUN_PREFIX,
    AgentHooks,
    CloseReceipts,
    Session,
    SessionContext,
)
from gym_ckpt_grpc.participants.agent_state import AgentState, StagedSessions, at_boundaries
from gym_ckpt_grpc.participants.blocking import Blocking, Clock
from gym_ckpt_grpc.participants.episode_context import CLEANUP_LIMIT
from gym_ckpt_grpc.participants.episode_runs import EpisodeLimits
from gym_ckpt_grpc.participants.gates import RouteGate
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.participants.records import plain
from gym_ckpt_grpc.participants.reports import batches, make_report, run_side_by_side
from gym_ckpt_grpc.participants.seeds import Seed, Seeds
from gym_ckpt_grpc.participants.session_table import SessionTable
from gym_ckpt_grpc.participants.steps import StepTracker
from gym_ckpt_grpc.participants.task_identity import digest_of
from gym_ckpt_grpc.protocol.errors import InvalidArgument, RetireIncomplete, StaleAttempt, StateNotFound
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason, PrepareReport
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.telemetry.catalogue import HELD_RESPONSES, Instrument

T = TypeVar("T")
Loop = Callable[[SessionContext, Any], Awaitable[Any]]
"""An agent's loop: (session, loop state to continue at or None) -> JSON-able reply."""

SETTLE_TURNS = 4
"""Turns of the loop after a close, so that replies already on the wire are read and kept before the cut."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How an agent server keeps its sessions and runs.

    close_receipts_for: seconds that a late seed of a closed session is refused, 0 and up. run_limit: seconds a
    legacy run may take, parked time not counted, or None. cleanup_limit: seconds for all of its cleanup.
    routing_id: of this worker, for the calls that its runs send to themselves; empty if there is only one.
    """

    close_receipts_for: float = 300.0
    run_limit: float | None = None
    cleanup_limit: float = CLEANUP_LIMIT
    routing_id: str = ""
    max_waiting: int = MAX_WAITING


class AgentOwner(OwnerDefaults):
    """Owns sessions and runs: their author's state, boundaries, and activation index."""

    kind = ParticipantKind.AGENT

    def __init__(
        self,
        hooks: AgentHooks,
        settings: AgentSettings | None = None,
        *,
        names: DataPlaneNames | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.settings = settings or AgentSettings()
        self.names = names or DataPlaneNames()
        self.admission = Admission(max_waiting=self.settings.max_waiting, clock=clock)
        self._blocking = Blocking(clock)
        self._steps = StepTracker(self.admission, self._blocking)
        self._sessions: SessionTable[Session] = SessionTable()
        self._seeds = Seeds(self.admission, self._blocking)
        self._receipts = CloseReceipts(self.settings.close_receipts_for, clock)
        limits = EpisodeLimits(self.settings.run_limit, self.settings.cleanup_limit)
        self._runs = AgentRuns(
            hooks, self.admission, self._steps, self._sessions, self.names, limits, self.settings.routing_id
        )
        self._state = AgentState(
            hooks, self.admission, self._blocking, self._steps, self._sessions, self._seeds, self._runs
        )

    # ---- legacy runs

    async def run(
        self,
        episode: EpisodeId,
        task: Mapping[str, Any],
        protocol: Callable[[RunContext], Awaitable[T]],
        *,
        cookie_session_id: str | None = None,
    ) -> T:
        """Run a legacy episode to its end and give what `protocol` returns.

        Held while a checkpoint is open; continues at the restored protocol boundary if there is one, once the
        author's hook has installed its session. cookie_session_id: under which the author finds that session in a
        cookie of its own. Raises StaleAttempt for a retired attempt, InvalidArgument for one that runs already,
        TimeoutError past `run_limit`.
        """
        return await self._runs.run(episode, task, protocol, cookie_session_id)

    # ---- seeding

    async def seed(self, episode: EpisodeId, key: str, body: Any, build: Callable[[], Awaitable[Any]]) -> Any:
        """Seed a session once and give the reply; the same seed again gets the same reply and builds nothing.

        key: the session's id, which may not begin with `run:`. body: JSON-able, what makes a seed the same. build:
        builds the author's state and gives the JSON-able reply. Held while closed. Raises StaleAttempt (retired,
        closed, or another episode's session), InvalidArgument (another body), and what `build` raises.
        """
        if key.startswith(RUN_PREFIX):
            raise InvalidArgument(f"{key} is kept for a legacy run", episodes=[episode])
        digest = digest_of(body)
        while True:
            admitted = await self.admission.admit(lambda: self._admit_seed(episode, key, digest), episode)
            if not isinstance(admitted, _Building):
                return admitted.seed["reply"]
            with admitted.counted:
                if admitted.before is not None:
                    await asyncio.wait({admitted.before})
                    continue  # and look again
                return await self._build(episode, key, digest, build)

    def _admit_seed(self, episode: EpisodeId, key: str, digest: str) -> Any:
        self.admission.check_mark(episode)
        self._receipts.check_seed(key, episode)
        session = self._sessions.get(key)
        if self.admission.closed or (session is not None and session.deleting):
            return HELD
        if session is None:
            return _Building(self._seeds.begin(episode, key, "seed"), self._seeds.building(key))
        self._check_session(session, episode)
        if session.seed and session.seed["digest"] != digest:
            raise InvalidArgument(f"session {key} was seeded with another body", episodes=[episode])
        self._sessions.claim(episode)
        return session

    async def _build(self, episode: EpisodeId, key: str, digest: str, build: Callable[[], Awaitable[Any]]) -> Any:
        """Build and register; a session whose attempt was retired meanwhile is freed before the seed ends."""
        with self._seeds.build(key):
            reply = await build()
            session = Session(key, episode, {"digest": digest, "reply": reply})
            self._sessions.add(session)
            if self.admission.refuses(episode):
                self._state.mark_retired(session)
                await self._state.free(session)
                self.admission.check_mark(episode)
            return reply

    # ---- activations

    async def invoke(self, episode: EpisodeId, key: str, loop: Loop, *, index: str | None = None) -> Any:
        """Run one activation of a session, or of a run that is under way (`run_key`), and give its reply.

        index: value of the activation header, or None. The last completed one gets its recorded reply, the running
        one is joined. An activation with an index outlives a caller that goes away. Raises StateNotFound (no such
        session), StaleAttempt, InvalidArgument (busy, or an illegal index), and what `loop` raises.
        """
        invocation, number, session = await self.admission.admit(
            lambda: self._admit_invocation(episode, key, loop, index), episode
        )
        if invocation is Invocation.RECORDED:
            return session.index.reply
        activation = session.activation
        assert activation is not None, "a running session has its task"
        return await self._reply_of(session, activation, outlives=number is not None)

    def _admit_invocation(
        self, episode: EpisodeId, key: str, loop: Loop, index: str | None
    ) -> tuple[Invocation, int | None, Session] | Literal[Held.HELD]:
        self.admission.check_mark(episode)
        session = self._sessions.get(key)
        if session is None or (session.legacy and (session.run is None or session.run.finishing)):
            raise StateNotFound(f"there is no session {key}", episodes=[episode])
        if session.deleting:
            return HELD
        self._check_session(session, episode)
        invocation, number = session.index.judge(index, busy=session.activation is not None)
        self._sessions.claim(episode)
        if invocation is Invocation.RUN:
            self._start(session, loop, number)
        return invocation, number, session

    def _start(self, session: Session, loop: Loop, number: int | None) -> None:
        """Start an activation in a task that the session owns, and count it at once."""
        continuation, session.continuation = session.continuation, None
        task = asyncio.create_task(self._activation(session, loop, continuation, number))
        session.live = self._steps.begin(
            session.key, session.episode, boundary=continuation, task=task, within=session.run
        )
        session.activation, session.index.running = task, number
        # A callback, since a task cancelled before its first turn runs no `finally`.
        task.add_done_callback(lambda _: self._activation_over(session))

    async def _activation(self, session: Session, loop: Loop, continuation: Any, number: int | None) -> Any:
        assert session.live is not None, "set before the task's first turn"
        reply = await loop(SessionContext(session, session.live, self._steps), plain(continuation))
        session.index.complete(number, reply)
        return reply

    def _activation_over(self, session: Session) -> None:
        live, session.live, session.activation, session.index.running = session.live, None, None, None
        session.restored_replies.clear()
        session.kept.clear()
        if live is not None:
            live.keep_blocking = session.retired or session.closing is not None
            self._steps.end(live)
        self._runs.let_go(session)

    async def _reply_of(self, session: Session, activation: asyncio.Task[Any], *, outlives: bool) -> Any:
        try:
            await asyncio.wait({activation})
        except asyncio.CancelledError:
            if not outlives:
                if session.activation is activation and session.live is not None:
                    session.live.runs.cancel()
                await asyncio.wait({activation})
            raise
        failed = activation.cancelled() or activation.exception() is not None
        if session.retired or (failed and (activation.cancelled() or session.closing is not None)):
            raise StaleAttempt(f"session {session.key} was stopped", episodes=[session.episode])
        return activation.result()

    def _check_session(self, session: Session, episode: EpisodeId) -> None:
        if session.episode != episode or session.retired or session.closing is not None:
            raise StaleAttempt(f"session {session.key} is not one of {episode} any more", episodes=[episode])

    # ---- closing a session

    async def close_session(
        self, episode: EpisodeId, key: str, free: Callable[[], Awaitable[Any]] | None = None
    ) -> Any:
        """Stop a session's activation, free it and forget it. Repeats succeed, and get the first one's reply.

        free: frees the author's state and gives the reply; runs once, after the activation has ended. Admitted
        while closed; blocks until done. One that a retire or a Commit frees is left to that.
        """
        session = await self.admission.admit(lambda: self._admit_close(key), episode)
        if session is None or session.episode != episode or session.retired or session.legacy:
            return self._receipts.get(key, episode)
        if session.closing is not None:
            await asyncio.wait({session.closing})
            return await self.close_session(episode, key, free)  # it is gone, unless the other close failed
        session.closing = asyncio.get_running_loop().create_future()
        self._sessions.claim(episode)
        self._blocking.set(key, BlockerReason.RUNNING, episode, "close")
        self.admission.changed()
        try:
            await self._stop(session)
            reply = await free() if free is not None and not session.retired else None
        except BaseException:
            self._reopen(session)
            raise
        self._receipts.add(key, episode, reply)
        session.closing.set_result(None)
        if not session.retired:
            self._sessions.remove(session)
            self._blocking.clear(key)
            self.admission.changed()
        return reply

    def _admit_close(self, key: str) -> Session | Literal[Held.HELD] | None:
        session = self._sessions.get(key)
        return HELD if session is not None and session.deleting else session

    async def _stop(self, session: Session) -> None:
        live = session.live
        if live is not None:
            live.runs.cancel()
            await asyncio.wait({live.ended})

    def _reopen(self, session: Session) -> None:
        """A close that failed half way leaves the session as it is, to be closed again or retired."""
        closing, session.closing = session.closing, None
        if closing is not None and not closing.done():
            closing.set_result(None)
        if session.live is None and not session.retired:
            self._blocking.clear(session.key)
            self.admission.changed()

    def gate(self, *, passing: Sequence[str] = ()) -> RouteGate:
        """The gate of an agent server's middleware: seeds are held there, sessions park in their loop.

        passing: further routes that are admitted while closed.
        """
        return RouteGate(self.admission, self.names, passing=("/v1/responses", "/close_session", *passing))

    # ---- StateOwner

    def attach(self, port: OwnerPort) -> None:
        self.admission.attach(port)

    async def close_admission(self, closing: Closing) -> None:
        self.admission.close()
        self._steps.close()
        self._state.work.closed(closing.checkpoint_id)
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)

    async def open_admission(self, opening: Opening) -> None:
        self.admission.open()
        self._steps.open()
        self._state.work.opened()

    def is_ready(self) -> bool:
        return not self._blocking

    def report(self, limit: int) -> PrepareReport:
        counts = {"sessions": len(self._sessions), **at_boundaries(self._steps), **self.admission.counts()}
        return make_report(limit, self._blocking, self._steps.restarts(), counts)

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        found = {
            EpisodeListKind.BLOCKING: self._blocking.episodes,
            EpisodeListKind.RESTART: self._steps.restarts,
            EpisodeListKind.RESTORED_PENDING: self.restored_pending,
        }[which]()
        for batch in batches(found):
            yield batch

    async def precopy(self, pace: Pace) -> Precopied:
        return await self._state.precopy.run(pace)

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        async for records in self._state.export(scope):
            yield RecordBatch(records)

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        self._state.work.write_ended(checkpoint_id, durable)

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> StagedSessions:
        return await self._state.stage(records, scope)

    async def activate(self, staged: StagedSessions) -> None:
        self._state.activate(staged)

    async def discard(self, staged: StagedSessions) -> None:
        await self._state.discard(staged)

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        self.admission.wake(episode.rollout_id)
        self._runs.forget_restored(episode)
        self._state.work.drop_covered(episode)
        for session in self._sessions.covered_by(episode):
            self._state.mark_retired(session)
        await self._seeds.wait(episode, budget)
        await run_side_by_side(self._state.retire(each, budget) for each in self._sessions.covered_by(episode))

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        left = [
            each.episode
            for each in self._sessions.of_rollout(rollout_id)
            if each.retired and each.episode.attempt <= through_attempt
        ]
        if left:
            raise RetireIncomplete(f"{left[0]} is not freed yet", episodes=left)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        self._receipts.forget(rollout_id, through_attempt)

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset((*self._sessions.pending(), *self._runs.pending()))

    async def delete_restored(self, episode: EpisodeId) -> None:
        await self._state.delete_restored(episode)

    def status_extra(self) -> Mapping[str, str]:
        return self._state.precopy.counts()

    def gauges(self) -> Mapping[Instrument, float]:
        return {**self.admission.gauges(), HELD_RESPONSES: self._steps.held_ends}


@dataclass(frozen=True, slots=True)
class _Building:
    """A seed that is counted. before: the same session is being built by another seed; wait for its end."""

    counted: Seed
    before: asyncio.Future[None] | None
