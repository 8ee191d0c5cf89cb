"""Which attempt of which rollout a collection sends, and when. Source: coordination section 11.

It imports nothing of the framework; `collection.py` joins it to the framework's own rollout collection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from gym_ckpt_grpc.integrations.nemo_gym.dispatch_gate import DispatchGate
from gym_ckpt_grpc.protocol.errors import (
    AdmissionClosed,
    ControlError,
    GymCkptError,
    InvalidArgument,
    OutOfTime,
    StaleAttempt,
    StateCorrupt,
    WorkerUnavailable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""How often one row starts over from its input."""
AGAIN = 0.5
"""Seconds before a row is sent again to a server that does not listen yet, or that named no time itself."""
NAMED = 5


class Lost(Exception):
    """Nobody knows how an attempt ended: no reply, or one that only says that a server went away."""


class NotSent(Exception):
    """The server does not listen: nothing of this attempt has begun."""


@dataclass(slots=True, eq=False)
class _Row:
    """One row under way. installed: servers hold state of this attempt, put there by a restore.

    sending: the task of the attempt that is on the wire; recalled: it was given up by the controller. decisions: how
    often the controller has said how it goes on. untaken: since when nobody has taken the attempt, in the loop's time.
    """

    episode: EpisodeId
    installed: bool = False
    restarts: int = 0
    sending: asyncio.Task[Any] | None = None
    recalled: bool = False
    decisions: int = 0
    untaken: float | None = None


class Dispatch:
    """Sends rows, each attempt at most once, and knows what is in flight. For one event loop.

    An attempt whose end nobody knows is *lost*: it closes the gate and is not sent again, since servers that came back
    may know nothing of it. It goes on once the controller says as which attempt (`move_on`).

    retire: frees attempts on all servers; after that the row starts over from its input, at most `max_restarts` times.
    """

    def __init__(
        self,
        gate: DispatchGate,
        *,
        retire: Callable[[EpisodeId], Awaitable[None]] | None = None,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self.gate = gate
        self._retire = retire
        self._max_restarts = max_restarts
        self._rows: dict[str, _Row] = {}
        self._coming: dict[str, tuple[EpisodeId, bool]] = {}
        self._lost: dict[str, str] = {}
        self._reopen: Callable[[], None] | None = None
        self._loss = asyncio.Event()
        self.delivered: set[str] = set()
        """Rollouts whose result is in the collection's hands, kept since a restore must not bring them back."""

    @property
    def in_flight(self) -> tuple[EpisodeId, ...]:
        """Attempts that servers may hold: those sent and not answered, and those installed and not sent yet."""
        coming = (episode for episode, installed in self._coming.values() if installed)
        return (*(row.episode for row in self._rows.values()), *coming)

    @property
    def lost(self) -> tuple[EpisodeId, ...]:
        """Attempts that wait for the controller's decision."""
        return tuple(self._rows[rollout].episode for rollout in self._lost)

    async def loss(self) -> tuple[EpisodeId, ...]:
        """Wait until something is lost, and name it; at once if something is."""
        while not self._lost:
            await self._loss.wait()
        return self.lost

    # ---- what a row does

    async def run(self, episode: EpisodeId, send: Callable[[EpisodeId], Awaitable[T]]) -> T:
        """Send a row until an attempt of it has ended, and return that reply.

        episode: as the row says it; a restore may have installed a later attempt, which is sent instead. send: posts
        one attempt and returns its reply; raises Lost, NotSent, or the ControlError that the reply carries. Raises
        OutOfTime where the controller does not decide, or no server takes it, in time; StaleAttempt, StateCorrupt or
        WorkerUnavailable after too many restarts, and every other refusal. Raises InvalidArgument where this rollout is
        under way already.
        """
        row = self._take(episode)
        try:
            while True:
                await self.gate.passed(f"rollout {row.episode}", [row.episode])
                decisions = row.decisions
                try:
                    reply = await self._send(row, send)
                except (Lost, NotSent, AdmissionClosed, StaleAttempt, StateCorrupt, WorkerUnavailable) as error:
                    if row.decisions == decisions:  # else the controller has said meanwhile how it goes on
                        await self._answer(row, error)
                else:
                    self.delivered.add(row.episode.rollout_id)
                    return reply
        finally:
            self._rows.pop(row.episode.rollout_id, None)
            self._found([row.episode.rollout_id])

    async def _answer(self, row: _Row, error: Lost | NotSent | ControlError) -> None:
        """What becomes of a row whose attempt has no reply."""
        untaken, row.untaken = row.untaken, None
        if isinstance(error, Lost) or (isinstance(error, NotSent) and row.installed):
            self._lose(row, str(error))
        elif isinstance(error, StaleAttempt):
            self._start_over(row, error)
        elif isinstance(error, StateCorrupt | WorkerUnavailable):
            await self._replace(row, error)
        else:
            await self._again(row, error, untaken)

    async def _again(self, row: _Row, error: NotSent | ControlError, untaken: float | None) -> None:
        """Wait before the same attempt is sent again, if it may still be. Raises OutOfTime."""
        now = asyncio.get_running_loop().time()
        row.untaken = now if untaken is None else untaken
        if now - row.untaken > self.gate.patience:
            text = f"rollout {row.episode} was taken by no server for {self.gate.patience:g} s: {error}"
            raise OutOfTime(text, episodes=[row.episode]) from error
        await asyncio.sleep((isinstance(error, ControlError) and error.retry_after) or AGAIN)

    def _take(self, episode: EpisodeId) -> _Row:
        rollout = episode.rollout_id
        if rollout in self._rows:
            raise InvalidArgument(f"rollout {rollout} is under way already: each row needs a rollout id of its own")
        self.delivered.discard(rollout)
        row = self._rows[rollout] = _Row(episode)
        coming, installed = self._coming.pop(rollout, (episode, False))
        if coming.attempt >= episode.attempt:
            row.episode, row.installed = coming, installed
        return row

    async def _send(self, row: _Row, send: Callable[[EpisodeId], Awaitable[T]]) -> T:
        """One attempt on the wire; what the controller recalls meanwhile is lost."""
        sending = asyncio.ensure_future(send(row.episode))
        row.sending, row.recalled = sending, False
        try:
            await asyncio.wait({sending})
            if row.recalled and sending.cancelled():
                raise Lost("recalled by the controller")
            return sending.result()
        finally:
            sending.cancel()
            row.sending = None

    def _lose(self, row: _Row, why: str) -> None:
        rollout = row.episode.rollout_id
        self._lost[rollout] = why
        self._close_for_lost()
        self._loss.set()
        log.warning("attempt %s is lost: %s", row.episode, why)

    def _close_for_lost(self) -> None:
        """Nothing more is sent while the controller has not decided: fresh rows would meet the same servers."""
        previous, self._reopen = self._reopen, None
        if self._lost:
            named = ", ".join(str(self._rows[rollout].episode) for rollout in list(self._lost)[:NAMED])
            more = f" and {len(self._lost) - NAMED} more" if len(self._lost) > NAMED else ""
            why = next(iter(self._lost.values()))
            self._reopen = self.gate.close(f"lost, to be restored or restarted: {named}{more} ({why})")
        if previous:
            previous()

    def _found(self, rollouts: Iterable[str]) -> None:
        known = len(self._lost)
        for rollout in rollouts:
            self._lost.pop(rollout, None)
        if not self._lost:
            self._loss.clear()
        if len(self._lost) != known:
            self._close_for_lost()

    def _start_over(self, row: _Row, error: ControlError) -> None:
        row.restarts += 1
        if row.restarts > self._max_restarts:
            error.add_note(f"rollout {row.episode.rollout_id} has started over {self._max_restarts} times")
            raise error
        log.warning("rollout %s starts over as its next attempt: %s", row.episode.rollout_id, error)
        row.episode, row.installed = row.episode.next(), False

    async def _replace(self, row: _Row, error: ControlError) -> None:
        """The attempt may still run somewhere: it is freed there before the next one is sent."""
        if self._retire is None:
            self._lose(row, str(error))
            return
        decisions = row.decisions
        try:
            await self._retire(row.episode)
        except GymCkptError as failure:
            if row.decisions == decisions:
                self._lose(row, f"{error}; and it could not be retired: {failure}")
        else:
            if row.decisions == decisions:
                self._start_over(row, error)

    # ---- what the controller does

    def recall(self) -> tuple[EpisodeId, ...]:
        """Give up every attempt on the wire: it is lost. Returns all that is lost now.

        A reply that has come is not given up.
        """
        for row in self._rows.values():
            if _recalled(row):
                self._lose(row, "recalled by the controller")
        return self.lost

    def move_on(self, episodes: Iterable[EpisodeId], *, installed: bool) -> None:
        """Say as which attempt each rollout goes on: nothing else of it is sent from now on.

        installed: a restore has put its state there; else it starts over from its input. One that is not sent yet is
        sent as this attempt when its row comes.
        """
        chosen = list(episodes)
        for episode in chosen:
            if row := self._rows.get(episode.rollout_id):
                _recalled(row)
                row.episode, row.installed = episode, installed
                row.decisions += 1
            else:
                self._coming[episode.rollout_id] = (episode, installed)
        self._found(episode.rollout_id for episode in chosen)


def _recalled(row: _Row) -> bool:
    """Take a row's attempt off the wire; whether there was one without a reply."""
    if row.sending is None or row.sending.done():
        return False
    row.recalled = True
    row.sending.cancel()
    return True
