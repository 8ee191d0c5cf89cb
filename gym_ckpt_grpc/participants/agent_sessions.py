"""Agent sessions, native and of legacy runs: what the owner keeps of each, and what its loop is given."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gym_ckpt_grpc.participants.activations import ActivationIndex
from gym_ckpt_grpc.participants.blocking import Clock
from gym_ckpt_grpc.participants.records import AgentRecord
from gym_ckpt_grpc.participants.rollout_index import RolloutIndex
from gym_ckpt_grpc.participants.steps import Live, StepTracker
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId

RUN_PREFIX = "run:"
"""How the keys of legacy runs begin, and those of native sessions do not."""


def run_key(episode: EpisodeId) -> str:
    """The session key of a legacy run: of the attempt, so that two attempts of a rollout never meet."""
    return f"{RUN_PREFIX}{episode.capture_key}"


@dataclass(frozen=True, slots=True)
class RestoredSession:
    """A session to install: its key, the episode it belongs to from now on, and the state its author exported.

    cookie_session_id: of a legacy run, the id that its author's own cookie had in the crashed attempt, or None.
    content_type: of RAW state (`storage.raw`), which comes back as bytes; empty for any other.
    """

    key: str
    episode: EpisodeId
    state: Any
    cookie_session_id: str | None = None
    content_type: str = ""


class AgentHooks(Protocol):
    """What the author of an agent writes. All of a checkpoint or restore comes in one call.

    An optional `session_revisions(self) -> Mapping[str, int]` is as for a resources server (`ResourcesHooks`).
    """

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """State of each session, JSON-able or `storage.raw` bytes, and not changed afterwards.

        With `session_revisions` it is also called while admission is open, for a few sessions at a time and beside
        the loops that change them, and may be cancelled at any of its awaits.
        """

    async def restore_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        """Check all, then install all. Raise InvalidState naming an episode whose state is unusable."""

    async def retire_session(self, key: str) -> None:
        """Free a session; must tolerate repeats and keys it never saw."""


@dataclass(slots=True, eq=False)
class Session:
    """One session. continuation: loop state for the first activation after a restore, or None.

    seed: digest of the seed's body and the reply it got. kept: the policy's replies since the last boundary, by
    request digest. restored_replies: those of the crashed attempt, each good for one equal request. Of a legacy
    run, run: what tracks its protocol. record: what it was claimed as, until the author's hook has installed it.
    """

    key: str
    episode: EpisodeId
    seed: dict[str, Any] = field(default_factory=dict)
    continuation: Any = None
    index: ActivationIndex = field(default_factory=ActivationIndex)
    live: Live | None = None
    activation: asyncio.Task[Any] | None = None
    closing: asyncio.Future[None] | None = None
    """Set while it is being closed; done when that has ended."""
    retired: bool = False
    deleting: bool = False
    kept: dict[str, Any] = field(default_factory=dict)
    restored_replies: dict[str, Any] = field(default_factory=dict)
    run: Live | None = None
    record: AgentRecord | None = None
    claiming: asyncio.Future[None] | None = None
    """Done when the restore hook of a claimed run has ended, however it did."""
    cookie_session_id: str | None = None

    @property
    def legacy(self) -> bool:
        """Whether this is a legacy run."""
        return self.key.startswith(RUN_PREFIX)

    @property
    def executions(self) -> list[Live]:
        """What runs of it: the protocol of a legacy run, an activation."""
        return [each for each in (self.run, self.live) if each is not None]


class SessionContext:
    """One activation of a session, as its loop sees it."""

    def __init__(self, session: Session, live: Live, steps: StepTracker) -> None:
        self._session = session
        self._live = live
        self._steps = steps
        self.waiting_policy = 0
        """Policy calls under way. Parallel ones count as one wait: between them the loop must have no effect."""

    @property
    def key(self) -> str:
        return self._session.key

    @property
    def episode(self) -> EpisodeId:
        return self._session.episode

    async def boundary(self, state: Any) -> None:
        """Record where the loop is; while a checkpoint is open, wait here until it is over.

        state: JSON-able, or a function that is called only if a checkpoint exports the session, and must then give
        the loop state as of this call: pin list lengths, copy nothing. Raises StaleAttempt if retired.
        """
        self._session.kept.clear()  # what they said is in the new boundary
        await self._steps.boundary(self._live, state)

    # ---- for PolicyClient

    @property
    def checkpoint_open(self) -> bool:
        return self._steps.admission.closed

    def take_restored_reply(self, digest: str) -> Any:
        """The reply that the crashed attempt had for an equal request, once; None if it had none."""
        reply = self._session.restored_replies.pop(digest, None)
        if reply is not None:
            self.keep(digest, reply)
        return reply

    def begin_waiting(self) -> None:
        """From now on the last boundary stands for the session."""
        self.waiting_policy += 1
        self._steps.enter_replay(self._live, "policy")

    def end_waiting(self, *, cancelled: bool = False) -> None:
        """Run on; while a checkpoint is open the boundary goes on standing for the session, unless cancelled."""
        self.waiting_policy -= 1
        if self.waiting_policy:
            return
        if cancelled:
            self._steps.stopped(self._live)
        else:
            self._steps.leave_replay(self._live)

    def keep(self, digest: str, reply: Any) -> None:
        """Keep a reply until the next boundary: a checkpoint that still finds the session at the last one exports it.

        For the policy it is delivered, so it must not be made again.
        """
        self._session.kept[digest] = reply

    async def stay(self) -> None:
        """Stay parked until the checkpoint is over."""
        try:
            await self._steps.park(self._live)
        finally:
            if self.waiting_policy:
                # Another call of the session is still under way, and the next checkpoint must not wait for it.
                self._steps.enter_replay(self._live, "policy")


class CloseReceipts:
    """Sessions that were closed, and what the close replied, for a while: a late seed of one is refused.

    keep_for: seconds, 0 and up.
    """

    def __init__(self, keep_for: float, clock: Clock) -> None:
        self._keep_for = keep_for
        self._clock = clock
        self._receipts: OrderedDict[tuple[str, EpisodeId], tuple[float, Any]] = OrderedDict()
        self._index: RolloutIndex[tuple[str, EpisodeId]] = RolloutIndex()

    def add(self, key: str, episode: EpisodeId, reply: Any) -> None:
        self._drop_old()
        self._receipts[(key, episode)] = (self._clock() + self._keep_for, reply)
        self._index.add((key, episode), episode)

    def get(self, key: str, episode: EpisodeId) -> Any:
        """What the close replied, or None."""
        self._drop_old()
        found = self._receipts.get((key, episode))
        return found[1] if found else None

    def check_seed(self, key: str, episode: EpisodeId) -> None:
        """Raise StaleAttempt for a seed of a session that was closed."""
        self._drop_old()
        if (key, episode) in self._receipts:
            raise StaleAttempt(f"session {key} of {episode} was closed", episodes=[episode])

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        """Drop the receipts of a finished rollout."""
        for receipt in self._index.through(rollout_id, through_attempt):
            self._drop(receipt)

    def _drop_old(self) -> None:
        now = self._clock()
        while self._receipts and next(iter(self._receipts.values()))[0] <= now:
            self._drop(next(iter(self._receipts)))

    def _drop(self, receipt: tuple[str, EpisodeId]) -> None:
        del self._receipts[receipt]
        self._index.drop(receipt, receipt[1])
