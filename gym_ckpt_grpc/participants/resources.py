"""`ResourcesOwner`: the sessions of a resources server. Source: participants section 10.

The middleware's gate does all of the counting; handlers need not know. `session_started` and `session_ended` are
for protocols whose sessions begin and end elsewhere than in `/seed_session`, `/verify` and `/close_session`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
from gym_ckpt_grpc.participants.admission import HELD, MAX_WAITING, Admission, GateRequest, Held, Reply, Visit
from gym_ckpt_grpc.participants.blocking import Blocking, Clock
from gym_ckpt_grpc.participants.mcp import TokenReader
from gym_ckpt_grpc.participants.names import DataPlaneNames, header
from gym_ckpt_grpc.participants.reports import batches, make_report, run_side_by_side
from gym_ckpt_grpc.participants.resource_sessions import (
    RefusedSessions,
    Request,
    Requests,
    ResourceSession,
    SeenSessions,
    SessionAfter,
    SessionOf,
    session_from_cookie,
)
from gym_ckpt_grpc.participants.resources_state import ResourcesState, StagedSessions
from gym_ckpt_grpc.participants.session_table import SessionTable
from gym_ckpt_grpc.participants.verify_mode import ResourcesHooks, ResourcesMode, VerifyMode, check_hooks
from gym_ckpt_grpc.protocol.errors import ControlError, RetireIncomplete, RolloutIdRequired, StaleAttempt, StateNotFound
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import PrepareReport
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.telemetry.catalogue import Instrument

SESSION_COOKIE = "session"
"""Name of the cookie that carries the session id, unless the server says otherwise."""
_cookie_before, _cookie_after = session_from_cookie(SESSION_COOKIE)


@dataclass(frozen=True, slots=True)
class ResourcesSettings:
    """How a resources server takes part.

    mode, verify: see ResourcesMode and VerifyMode. require_identity: refuse a seed that names no rollout.
    session_of, session_after: where the session id stands. tokens: the server's MCP route is gated by the session of
    the token in `session_header`, there and below it. Paths are compared by their end; seeds may have several.
    ends_on_verify: a verify that succeeds ends its session. Off, for agents that verify a session several times, only
    a close ends it, or `session_ended`.
    brought: whether the client brought the session id of a request with it, from an earlier reply. With it, mode
    `exported` refuses a session that this process has neither seeded nor been given by a restore: the server was
    started anew, and would answer from an empty state. A seed or a close is not refused.
    """

    mode: ResourcesMode = ResourcesMode.RESTART_ONLY
    verify: VerifyMode = VerifyMode.WAIT
    require_identity: bool = True
    max_waiting: int = MAX_WAITING
    session_of: SessionOf = _cookie_before
    session_after: SessionAfter = _cookie_after
    tokens: TokenReader | None = None
    seed_path: str | tuple[str, ...] = "/seed_session"
    verify_path: str = "/verify"
    close_path: str = "/close_session"
    mcp_path: str = "/mcp"
    ends_on_verify: bool = True
    brought: Callable[[GateRequest], bool] | None = None


class ResourcesOwner(OwnerDefaults):
    """Owns the sessions of a resources server, and is the gate of its middleware.

    hooks: the author's, needed in mode `exported`. Raises UsageError naming those that are missing.
    """

    kind = ParticipantKind.RESOURCES

    def __init__(
        self,
        hooks: ResourcesHooks | None = None,
        settings: ResourcesSettings | None = None,
        *,
        names: DataPlaneNames | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.settings = settings or ResourcesSettings()
        check_hooks(self.settings.mode, hooks)
        self.names = names or DataPlaneNames()
        self.admission = Admission(max_waiting=self.settings.max_waiting, clock=clock)
        self._restarts_only = self.settings.mode is ResourcesMode.RESTART_ONLY
        self._blocking = Blocking(clock)
        self._sessions: SessionTable[ResourceSession] = SessionTable()
        self._requests = Requests(self.admission, self._blocking)
        self._refused = RefusedSessions()
        self._seen = SeenSessions()
        self._looks_for_lost = self.settings.brought is not None and self.settings.mode is ResourcesMode.EXPORTED
        self._unattributed = 0
        self._state = ResourcesState(
            self.settings.mode, hooks, self.admission, self._blocking, self._sessions, self._requests, self._refused
        )

    # ---- the gate

    def gate(self) -> ResourcesOwner:
        """The gate of the server's middleware: this owner itself."""
        return self

    async def enter(self, request: GateRequest) -> Visit:
        """Hold, admit and count, or refuse one request. Raises RolloutIdRequired, StaleAttempt, StateNotFound."""
        session_id = self._session_id(request)
        return await self.admission.admit(lambda: self._attempt(request, session_id), self._whose(request, session_id))

    def reply_headers(self) -> Mapping[str, str]:
        return {}

    def refused(self, error: ControlError) -> None:
        self.admission.refused(error)

    def _session_id(self, request: GateRequest) -> str | None:
        if self.settings.tokens is not None and self._is_mcp(request):
            return self.settings.tokens.read(header(request.headers, self.names.session_header))
        return self.settings.session_of(request)

    def _is_mcp(self, request: GateRequest) -> bool:
        return self.settings.tokens is not None and f"{self.settings.mcp_path}/" in f"{request.path}/"

    def _whose(self, request: GateRequest, session_id: str | None) -> EpisodeId | None:
        session = self._sessions.get(session_id)
        return session.episode if session is not None else request.episode

    def _attempt(self, request: GateRequest, session_id: str | None) -> Request | Literal[Held.HELD]:
        session = self._sessions.get(session_id)
        seed = request.path.endswith(self.settings.seed_path)
        closes = request.path.endswith(self.settings.close_path)
        if seed and request.episode is None and self.settings.require_identity:
            raise RolloutIdRequired("a seed must name its rollout: send it under the rollout prefix")
        if not closes:
            self._check_retired(request, session_id, session)
        if (session is not None and session.deleting) or (self.admission.closed and self._waits(request, session)):
            return HELD
        if self._looks_for_lost and session is None and session_id is not None and not (seed or closes):
            self._check_lost(request, session_id)
        if session is not None and session.episode is not None:
            self._sessions.claim(session.episode)
        blocks = not self._restarts_only and not self._replays(request)
        return self._requests.begin(request, session, self, seed=seed, closes=closes, blocks=blocks)

    def _waits(self, request: GateRequest, session: ResourceSession | None) -> bool:
        """Whether a request waits while closed."""
        if request.path.endswith(self.settings.seed_path):
            return True
        if self._restarts_only or self._replays(request):
            return False
        if request.path.endswith(self.settings.close_path):
            # What is retired or freed has nothing that a close could change.
            return session is not None and not session.retired and not self.admission.refuses(session.episode)
        return True

    def _replays(self, request: GateRequest) -> bool:
        return self.settings.verify is VerifyMode.REPLAY and request.path.endswith(self.settings.verify_path)

    def _check_retired(self, request: GateRequest, session_id: str | None, session: ResourceSession | None) -> None:
        self.admission.check_mark(request.episode)
        if session is not None:
            self.admission.check_mark(session.episode)
            if session.retired and session.episode is not None:
                raise StaleAttempt(f"session {session.key} was retired", episodes=[session.episode])
        elif (refused := self._refused.get(session_id)) is not None and request.episode in (None, refused):
            raise StaleAttempt(f"session {session_id} was retired", episodes=[refused])

    def _check_lost(self, request: GateRequest, session_id: str) -> None:
        """A session that is not tracked: never seeded, or ended, or lost; only then it is refused."""
        assert self.settings.brought is not None
        if not (self._is_mcp(request) or self.settings.brought(request)):
            self._seen.add(session_id)
        elif session_id not in self._seen:
            raise StateNotFound(
                f"session {session_id} is not known here: this server was started after it, and not restored since",
                episodes=[request.episode] if request.episode is not None else [],
            )

    # ---- what requests report

    def answered(self, request: Request, reply: Reply) -> None:
        """A reply is about to be sent: a seed's session is registered, a verify or close ends it."""
        if request.seed:
            reply.add[self.names.verify_header] = self.settings.verify.value
            if self._restarts_only:
                reply.add[self.names.restart_header] = "1"
        if not 200 <= reply.status < 300:
            return
        if request.seed:
            session_id = self.settings.session_after(request.asked, reply)
            if session_id is not None:
                self.session_started(session_id, request.asked.episode)
        elif request.session and self._ends(request.asked.path):
            self._end(request.session, deferred=self.admission.closed and self._replays(request.asked))

    def _ends(self, path: str) -> bool:
        """Whether success at this path ends the session."""
        return path.endswith(self.settings.close_path) or (
            self.settings.ends_on_verify and path.endswith(self.settings.verify_path)
        )

    def ended(self, request: Request) -> None:
        """A request has ended."""
        self._requests.end(request)

    def session_started(self, session_id: str, episode: EpisodeId | None) -> None:
        """Track a session from now on. A restored one of the same id is claimed; an ended one begins anew."""
        known = self._sessions.get(session_id)
        if known is not None and known.episode == episode:
            if episode is not None:
                self._sessions.claim(episode)
            known.ends_at_open = False
            self._state.precopy.drop(session_id)  # it may have begun anew
            return
        if known is not None:
            self._drop(known)
        self._refused.drop(session_id)
        session = ResourceSession(session_id, episode)
        self._sessions.add(session)
        self._unattributed += episode is None
        if episode is not None and self.admission.refuses(episode):
            self._state.mark_retired(session)

    def session_ended(self, session_id: str) -> None:
        """Track a session no more. Harmless if it is not tracked."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._end(session, deferred=False)

    def _end(self, session: ResourceSession, *, deferred: bool) -> None:
        if deferred:
            session.ends_at_open = True
        elif not session.retired:
            self._seen.add(session.key)
            self._drop(session)

    def _drop(self, session: ResourceSession) -> None:
        if self._sessions.get(session.key) is session:
            self._sessions.remove(session)
            self._unattributed -= session.episode is None
            self._blocking.clear(session.key)  # of a retire, if a later attempt has begun the session anew
            self.admission.changed()

    # ---- StateOwner

    def attach(self, port: OwnerPort) -> None:
        self.admission.attach(port)

    async def close_admission(self, closing: Closing) -> None:
        self.admission.close()
        self._state.look_for_gone()

    async def open_admission(self, opening: Opening) -> None:
        for session in self._sessions:
            if session.ends_at_open:
                self._end(session, deferred=False)
        self._state.forget_gone()
        self.admission.open()

    def is_ready(self) -> bool:
        return not self._blocking

    def report(self, limit: int) -> PrepareReport:
        counts = {
            "inflight": self._requests.inflight,
            "sessions": len(self._sessions),
            "unattributed_sessions": self._unattributed,
            **self.admission.counts(),
        }
        return make_report(limit, self._blocking, self._restarts(), counts)

    def _restarts(self) -> list[EpisodeId]:
        sessions = self._sessions if self._restarts_only else self._state.gone()
        return list(dict.fromkeys(each.episode for each in sessions if each.episode is not None and not each.retired))

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        found = {
            EpisodeListKind.BLOCKING: self._blocking.episodes,
            EpisodeListKind.RESTART: self._restarts,
            EpisodeListKind.RESTORED_PENDING: self._sessions.pending,
        }[which]()
        for batch in batches(found):
            yield batch

    async def precopy(self, pace: Pace) -> Precopied:
        return await self._state.precopy.run(pace)

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        async for batch in self._state.export(scope):
            yield batch

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> StagedSessions:
        return await self._state.stage(records, scope, self._unattributed)

    async def activate(self, staged: StagedSessions) -> None:
        for session in staged.sessions:
            self._refused.drop(session.key)
            self._sessions.add(session, pending=True)

    async def discard(self, staged: StagedSessions) -> None:
        await self._state.discard(staged)

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        self.admission.wake(episode.rollout_id)
        for session in self._sessions.covered_by(episode):
            self._state.mark_retired(session)
        await self._state.wait_seeds(episode, budget)
        frees = [self._state.retire(each, budget) for each in self._sessions.covered_by(episode)]
        await run_side_by_side([*frees, self._state.end_orphans(episode, budget)])

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        through = EpisodeId(rollout_id, through_attempt)
        left = [each.episode for each in self._sessions.covered_by(through) if each.retired and each.episode]
        left += [each.episode for each in self._requests.others_of(through) if each.runs.cancelled and each.episode]
        if left:
            raise RetireIncomplete(f"a session of {left[0]} is not freed yet", episodes=left)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        self._refused.forget(rollout_id, through_attempt)

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset(self._sessions.pending())

    async def delete_restored(self, episode: EpisodeId) -> None:
        await self._state.delete_restored(episode)

    def status_extra(self) -> Mapping[str, str]:
        return {
            "mode": self.settings.mode.value,
            "verify": self.settings.verify.value,
            "retired_sessions": str(len(self._refused)),
            **self._state.precopy.counts(),
        }

    def gauges(self) -> Mapping[Instrument, float]:
        return self.admission.gauges()
