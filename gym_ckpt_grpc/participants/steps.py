"""`StepTracker`: where each live episode is, whether it may be cut there, and how it is stopped.

| state | blocks | exported as |
| --- | --- | --- |
| running, wait_step | yes, unless a restart | - |
| replay_step | no | its latest boundary (the one before the step), or none |
| parked | no | its latest boundary |
| retired, not ended | yes | never |

Source: participants section 5.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import HookFailed
from gym_ckpt_grpc.participants.admission import Admission, Cancellable, wait_for
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StaleAttempt, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason


class StepMode(enum.StrEnum):
    """How a step of an episode behaves under a checkpoint."""

    WAIT = "wait"
    """It may run only once: a checkpoint waits for its end."""
    REPLAY = "replay"
    """It may run twice: a checkpoint leaves it out, and it runs again after a restore."""


class StepState(enum.StrEnum):
    """Where a live episode is."""

    RUNNING = "running"
    WAIT_STEP = "wait_step"
    REPLAY_STEP = "replay_step"
    PARKED = "parked"


class Deadline(Protocol):
    """The time limit of an episode, which stands still while the episode does."""

    def suspend(self) -> None:
        """Stop the count. Harmless if it stands still or has ended."""

    def resume(self) -> None:
        """Go on with exactly what was left. Harmless if it runs or has ended."""


class EpisodeDeadline:
    """A Deadline over an `asyncio.timeout` scope; one that has exited is left alone."""

    __slots__ = ("_left", "_scope")

    def __init__(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        self._left: float | None = None

    def suspend(self) -> None:
        when = self._scope.when()
        if self._left is None and when is not None and self._reschedule(None):
            self._left = when - asyncio.get_running_loop().time()

    def resume(self) -> None:
        if self._left is not None:
            left, self._left = self._left, None
            self._reschedule(asyncio.get_running_loop().time() + left)

    def _reschedule(self, when: float | None) -> bool:
        try:
            self._scope.reschedule(when)
        except RuntimeError:  # asyncio's word for a scope that has expired or exited
            return False
        return True


@dataclass(slots=True, eq=False)
class Live:
    """One live episode. boundary: a value, a function that gives it, or None (start over from input).

    turns: what was done of it in this process, as boundaries behind its first: that one stands for its beginning, or
    for what was restored. -1 before the first.
    """

    key: Hashable
    episode: EpisodeId
    runs: Cancellable
    ended: asyncio.Future[None]
    deadline: Deadline | None = None
    boundary: Any = None
    turns: int = field(default=-1, init=False)
    restart: bool = False
    retired: bool = False
    finishing: bool = False
    state: StepState = StepState.RUNNING
    place: str = ""
    step_over: bool = False
    sleepers: set[asyncio.Future[None]] = field(default_factory=set)
    """What waits for the opening: one, or several if the episode makes calls in parallel."""
    keep_blocking: bool = False
    """Whether the end of this execution leaves its key blocking: something else of it is still to be freed."""


@dataclass(slots=True)
class StepTracker:
    """The live episodes of one owner, by key.

    admission: whose flag says whether a checkpoint is open. blocking: where blockers go, shared with the owner.
    """

    admission: Admission
    blocking: Blocking
    live: dict[Hashable, Live] = field(default_factory=dict)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a checkpoint waits, for a wait step that can end early."""
    _opened: asyncio.Event = field(default_factory=asyncio.Event)
    _restarts: dict[Hashable, EpisodeId] = field(default_factory=dict)
    _late_marks: list[Live] = field(default_factory=list)
    held_ends: int = 0
    """Ended executions whose callers hear of it once the checkpoint is over."""
    _by_rollout: dict[str, dict[Hashable, Live]] = field(default_factory=dict)

    def begin(
        self,
        key: Hashable,
        episode: EpisodeId,
        *,
        boundary: Any = None,
        deadline: Deadline | None = None,
        restart: bool = False,
        task: asyncio.Task[Any] | None = None,
        within: Live | None = None,
    ) -> Live:
        """Start to track the execution of `task` (the current one by default).

        boundary: the restored one, at which it is exported until it records another. within: the execution that
        this one is a part of: it is a restart if that is one, and from then on. Raises InvalidArgument if the key
        is live, StaleAttempt if what lives there is being retired.
        """
        self.check_free(key)
        restart = restart or (within is not None and within.restart)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        live = Live(key, episode, Cancellable(task), ended, deadline, boundary, restart)
        if within in self._late_marks:
            self._late_marks.append(live)
        self.live[key] = live
        self._by_rollout.setdefault(episode.rollout_id, {})[key] = live
        if restart:
            self._restarts[key] = episode
        self._enter(live, StepState.RUNNING)
        return live

    def check_free(self, key: Hashable) -> None:
        """Raise InvalidArgument if the key is live, StaleAttempt if what lives there is being retired."""
        other = self.live.get(key)
        if other is None:
            return
        if other.retired:
            raise StaleAttempt(f"{key} is being retired", episodes=[other.episode])
        raise InvalidArgument(f"{key} is running already", episodes=[other.episode])

    def end(self, live: Live) -> None:
        """Stop tracking. Harmless if it was ended before; never touches another execution of the same key."""
        if self.live.get(live.key) is not live:
            return
        del self.live[live.key]
        self._restarts.pop(live.key, None)
        of_rollout = self._by_rollout[live.episode.rollout_id]
        del of_rollout[live.key]
        if not of_rollout:
            del self._by_rollout[live.episode.rollout_id]
        if not live.keep_blocking:
            self.blocking.clear(live.key)
        if not live.ended.done():
            live.ended.set_result(None)
        self.admission.changed()

    # ---- moving

    async def boundary(self, live: Live, state: Any) -> None:
        """Record a boundary; while closed, park there until the checkpoint is over.

        state: JSON-able, or a function that gives it when a checkpoint exports the episode, and then as of now.
        Raises StaleAttempt if the attempt was retired.
        """
        self._check_retired(live)
        live.boundary, live.step_over = state, False
        live.turns += 1
        if not self.admission.closed or live.restart:
            self._enter(live, StepState.RUNNING)
        else:
            await self.park(live)

    async def park(self, live: Live) -> None:
        """While closed, stay at the latest boundary; overtaken by a new close, stay for that one as well."""
        while self.admission.closed and not live.restart:
            self._check_retired(live)
            self._enter(live, StepState.PARKED)
            self._suspend(live)
            try:
                await self._asleep(live)
            except asyncio.CancelledError:
                self.stopped(live)
                raise
        self._check_retired(live)
        live.step_over = False
        self._enter(live, StepState.RUNNING)

    @asynccontextmanager
    async def step(self, live: Live, name: str, mode: StepMode | str = StepMode.WAIT) -> AsyncIterator[None]:
        """Run one step. name: what a report calls it. mode: see StepMode. Raises StaleAttempt if retired."""
        self._check_retired(live)
        if StepMode(mode) is StepMode.REPLAY:
            async with self._replay(live, name):
                yield
            return
        self._enter(live, StepState.WAIT_STEP, name)
        try:
            yield
        finally:
            self._enter(live, StepState.RUNNING)

    @asynccontextmanager
    async def _replay(self, live: Live, name: str) -> AsyncIterator[None]:
        self.enter_replay(live, name)
        try:
            yield
        except BaseException:
            if self.admission.closed:
                # Its cleanup may destroy what the boundary names.
                live.boundary = None
            self.leave_replay(live)
            raise
        self.leave_replay(live)

    def enter_replay(self, live: Live, name: str) -> None:
        """Begin what may run twice: from now on the latest boundary stands for the episode."""
        live.step_over = False
        self._enter(live, StepState.REPLAY_STEP, name)
        if self.admission.closed:
            self._suspend(live)

    def leave_replay(self, live: Live) -> None:
        """End it. While closed the boundary goes on standing for the episode, until it records the next one."""
        if self.admission.closed:
            live.step_over = True
            self.admission.changed()
        else:
            self._enter(live, StepState.RUNNING)

    def stopped(self, live: Live) -> None:
        """A cancel arrived where it stood still. Its cleanup may destroy what the boundary names, so it blocks."""
        if live.key in self.blocking:
            return  # it is being closed or retired
        if not live.sleepers:  # else a call beside this one goes on standing for it
            live.step_over = False
            self._enter(live, StepState.RUNNING)

    async def mark_restart(self, live: Live) -> None:
        """Say that this episode cannot be captured. Takes effect when no checkpoint is open.

        Waits for that in a replay step, which a checkpoint does not wait for; elsewhere it would hold up that very
        checkpoint, and the mark is set once it is over.
        """
        if live.restart:
            return
        if self.admission.closed and live.state is StepState.REPLAY_STEP:
            while self.admission.closed:
                await self._opened.wait()
        if self.admission.closed:
            self._late_marks.append(live)
        else:
            self._set_restart(live)

    def _set_restart(self, live: Live) -> None:
        if self.live.get(live.key) is live:
            live.restart = True
            self._restarts[live.key] = live.episode
            self._enter(live, live.state, live.place)

    def finish(self, live: Live, *, cleans: bool = True) -> None:
        """The protocol is over and cleanup runs: a retire waits for it and does not cancel.

        After a replay step that ended while closed it stands for *start over from input*, and does not block.
        cleans: whether there is any cleanup, which may destroy what the boundary names.
        """
        live.finishing = True
        if not live.step_over:
            self._enter(live, StepState.RUNNING, "cleanup")
        elif cleans:
            live.boundary = None

    async def hold_end(self, live: Live) -> None:
        """After such a step, keep the failure from the caller until the checkpoint is over, or a retire."""
        while self.admission.closed and live.step_over and not live.retired:
            self.held_ends += 1
            try:
                await self._asleep(live)
            finally:
                self.held_ends -= 1

    # ---- closing, opening, retiring

    def close(self) -> None:
        """A checkpoint is open: stop the deadlines of what does not move."""
        self.closing.set()
        self._opened.clear()
        for live in self.live.values():
            if live.state in (StepState.PARKED, StepState.REPLAY_STEP):
                self._suspend(live)

    def open(self) -> None:
        """It is over: give the deadlines back what was left, and wake what parked. Safe to repeat."""
        self.closing.clear()
        self._opened.set()
        late, self._late_marks = self._late_marks, []
        for live in late:
            self._set_restart(live)
        for live in self.live.values():
            if live.deadline is not None:
                live.deadline.resume()
            if live.step_over:
                live.step_over = False
                self._enter(live, StepState.RUNNING)
            _wake(live)

    async def retire(self, live: Live, budget: Budget) -> None:
        """Cancel it, once and never in its cleanup, and wait until it has ended.

        Raises OutOfTime if it has not when the budget is spent: then it stays tracked and blocks, and the same
        call again goes on waiting.
        """
        live.retired = True
        self._restarts.pop(live.key, None)
        self._enter(live, live.state, live.place)
        if not live.finishing:
            live.runs.cancel()
        else:
            _wake(live)
        await wait_for(live.ended, budget, f"the retire of {live.episode}")

    # ---- questions

    def of_rollout(self, rollout_id: str) -> list[Live]:
        """The live episodes of a rollout, any attempt."""
        return list(self._by_rollout.get(rollout_id, {}).values())

    def restarts(self) -> list[EpisodeId]:
        """Episodes that cannot be captured, each once, in the order they began."""
        return list(dict.fromkeys(self._restarts.values()))

    @property
    def restart_count(self) -> int:
        return len(self._restarts)

    def exported(self) -> Iterator[tuple[Live, Any]]:
        """What a checkpoint takes: (episode, boundary or a function of it or None)."""
        for live in self.live.values():
            still = live.state in (StepState.PARKED, StepState.REPLAY_STEP)
            if still and not live.retired and not live.restart:
                yield live, live.boundary

    # ---- inside

    def _enter(self, live: Live, state: StepState, place: str = "") -> None:
        if self.live.get(live.key) is not live:
            return
        live.state, live.place = state, place
        if live.retired:
            self.blocking.set(live.key, BlockerReason.RETIRING, live.episode, place)
        elif live.restart or state in (StepState.PARKED, StepState.REPLAY_STEP):
            self.blocking.clear(live.key)
        else:
            reason = BlockerReason.WAIT_STEP if state is StepState.WAIT_STEP else BlockerReason.RUNNING
            self.blocking.set(live.key, reason, live.episode, place)
        self.admission.changed()

    async def _asleep(self, live: Live) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        live.sleepers.add(sleeper)
        try:
            await sleeper
        finally:
            live.sleepers.discard(sleeper)

    def _suspend(self, live: Live) -> None:
        if live.deadline is not None:
            live.deadline.suspend()

    def _check_retired(self, live: Live) -> None:
        if self.live.get(live.key) is not live:
            raise UsageError(f"{live.key} has ended and cannot move on")
        if live.retired:
            raise StaleAttempt(f"attempt {live.episode} was retired", episodes=[live.episode])


def _wake(live: Live) -> None:
    for sleeper in live.sleepers:
        if not sleeper.done():
            sleeper.set_result(None)


def value_of(boundary: Any, episode: EpisodeId) -> Any:
    """A boundary's value: what its function gives, if it is one. Raises HookFailed naming the episode if that fails."""
    if not callable(boundary):
        return boundary
    try:
        return boundary()
    except Exception as error:
        raise HookFailed(f"the boundary function of {episode} failed: {error!r}", episode) from error
