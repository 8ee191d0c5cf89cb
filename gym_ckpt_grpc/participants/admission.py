"""`Admission`: the one gate of every kind. It holds, admits or refuses, and knows no HTTP framework.

A request is checked by a plain function, the *attempt*: it raises a ControlError to refuse, gives `HELD` to wait
at the gate, or counts the request and gives what stands for it. Since there is no await inside, accepting and
counting are one step: a request that races a close is counted before the cut or held, never between. A held
request runs its attempt again, whole, each time it is woken. Source: participants section 4.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.ports import OwnerPort
from gym_ckpt_grpc.participants.blocking import Clock
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.protocol.errors import AdmissionClosed, ControlError, OutOfTime, StaleAttempt, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry.attributes import ERROR_CODE
from gym_ckpt_grpc.telemetry.catalogue import ADMISSION_HELD, ADMISSION_REFUSED, HELD_REQUESTS, Instrument

T = TypeVar("T")

MAX_WAITING = 65_536
"""Requests that one process holds at most."""
RETRY_AFTER = 1.0
"""Seconds that a request refused at a full gate is asked to wait."""


class Held(enum.Enum):
    """What an attempt gives to wait at the gate."""

    HELD = "held"


HELD: Final = Held.HELD


class CallerLeft(Exception):
    """The client of a held request went away: the request never runs, and nobody is left to answer."""


class Caller:
    """The client of one request: whether it left, and whom that wakes.

    on_hold is called when the request is first held; only then it is worth to watch for a client that leaves.
    on_refusal is told of a refusal that the application answers itself, as an exception handler does.
    """

    __slots__ = ("_on_hold", "_waiter", "left", "on_refusal")

    def __init__(
        self,
        on_hold: Callable[[], None] | None = None,
        on_refusal: Callable[[ControlError], None] | None = None,
    ) -> None:
        self.left = False
        self.on_refusal = on_refusal
        self._on_hold = on_hold
        self._waiter: asyncio.Future[None] | None = None

    def hold(self, waiter: asyncio.Future[None]) -> None:
        """Remember what waits for this client."""
        self._waiter = waiter
        if self._on_hold is not None:
            on_hold, self._on_hold = self._on_hold, None
            on_hold()

    def leave(self) -> None:
        """The client went away."""
        self.left = True
        if self._waiter is not None:
            _wake(self._waiter)


CALLER: ContextVar[Caller | None] = ContextVar("gymckpt_caller", default=None)
"""The client of the request that runs in this context; set by the middleware."""


class Admission:
    """The flag, the held requests and the marks of one process.

    max_waiting: requests held at most, 1 and up; one more is refused ADMISSION_CLOSED and counted.
    """

    def __init__(self, *, max_waiting: int = MAX_WAITING, clock: Clock = time.monotonic) -> None:
        if max_waiting < 1:
            raise UsageError(f"max_waiting is {max_waiting}, it must be at least 1")
        self.closed = False
        self.clock = clock
        self.waiting = 0
        self.waiting_overflow = 0
        self._max_waiting = max_waiting
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order they came
        self._of_rollout: dict[str, dict[asyncio.Future[None], None]] = {}
        self._port: OwnerPort | None = None
        self._announced = False

    def attach(self, port: OwnerPort) -> None:
        """Take the port; a second call with the same one changes nothing."""
        if self._port is not None and self._port is not port:
            raise UsageError("this owner is attached to another participant already")
        self._port = port

    @property
    def port(self) -> OwnerPort:
        """The port of the control plane. Raises UsageError before `attach`."""
        if self._port is None:
            raise UsageError("this owner is not attached to a participant yet")
        return self._port

    @property
    def attached(self) -> bool:
        return self._port is not None

    # ---- marks and notifications

    def refuses(self, episode: EpisodeId | None) -> bool:
        """Whether this attempt was retired."""
        return episode is not None and self._port is not None and self._port.marks.refuses(episode)

    def check_mark(self, episode: EpisodeId | None) -> None:
        """Raise StaleAttempt if this attempt was retired."""
        if episode is not None and self.refuses(episode):
            raise StaleAttempt(f"attempt {episode} was retired", episodes=[episode])

    def changed(self) -> None:
        """Tell the control plane that readiness may have changed: only while closed, once per loop turn."""
        if self.closed and not self._announced and self._port is not None:
            self._announced = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._announced = False
        if self.closed:
            self.port.changed()

    # ---- the gate

    def close(self) -> None:
        """Close the gate; from now on attempts see `closed`."""
        self.closed = True

    def open(self) -> None:
        """Open the gate and wake what is held, first come, first served. Safe to repeat."""
        self.closed = False
        for waiter in self._waiters:
            _wake(waiter)

    def wake(self, rollout_id: str) -> None:
        """Let the held requests of a rollout run their checks again: a mark rose, or a deletion ended."""
        for waiter in self._of_rollout.get(rollout_id, ()):
            _wake(waiter)

    async def admit(self, attempt: Callable[[], T | Literal[Held.HELD]], episode: EpisodeId | None = None) -> T:
        """Run `attempt` until it admits or refuses; wait at the gate while it gives HELD.

        episode: whose request it is, so that a mark wakes it. Raises what `attempt` raises, AdmissionClosed past
        `max_waiting`, CallerLeft if the client went away while the request was held.
        """
        result = attempt()
        if result is not HELD:
            return result
        if self.waiting >= self._max_waiting:
            self.waiting_overflow += 1
            raise AdmissionClosed(f"{self.waiting} requests are held already", retry_after=RETRY_AFTER)
        caller = CALLER.get()
        began = self.clock()
        self.waiting += 1
        try:
            while result is HELD:
                await self._held(episode.rollout_id if episode else "", caller)
                if caller is not None and caller.left:
                    raise CallerLeft
                result = attempt()
            return result
        finally:
            self.waiting -= 1
            self.count(ADMISSION_HELD, 1000 * (self.clock() - began))

    async def _held(self, rollout_id: str, caller: Caller | None) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        of_rollout = self._of_rollout.setdefault(rollout_id, {})
        self._waiters[waiter] = of_rollout[waiter] = None
        try:
            if caller is not None:
                caller.hold(waiter)
            await waiter
        finally:
            del self._waiters[waiter], of_rollout[waiter]
            if not of_rollout:
                del self._of_rollout[rollout_id]

    # ---- telemetry

    def refused(self, error: ControlError) -> None:
        """A refusal becomes an answer: count it. Once for each request, whoever raised it."""
        self.count(ADMISSION_REFUSED, labels={ERROR_CODE: error.code.name})

    def count(self, instrument: Instrument, amount: float = 1, *, labels: Mapping[str, str] | None = None) -> None:
        """Count, or record in a histogram, as this participant. Without one nobody asks."""
        if self._port is not None:
            self._port.recorder.count(instrument, amount, labels=labels)

    def gauges(self) -> dict[Instrument, float]:
        """The gauge that every kind has."""
        return {HELD_REQUESTS: self.waiting}

    def counts(self) -> dict[str, int]:
        """Counts that every kind reports."""
        return {"waiting": self.waiting, "waiting_overflow": self.waiting_overflow}


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


# ---- what a gate and a middleware say to each other ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateRequest:
    """A request as a gate sees it. path: behind the rollout prefix. headers: lower-case names.

    scope: the framework's own view of the request (an ASGI scope), for functions that find a session in it.
    """

    method: str
    path: str
    episode: EpisodeId | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    scope: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Reply:
    """The head of a reply, before it is sent. headers: lower-case names. add: headers the gate adds."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    add: dict[str, str] = field(default_factory=dict)


class Visit:
    """One admitted request, from admission to its end; this one only passes through."""

    __slots__ = ()

    async def starting(self, reply: Reply) -> None:
        """Before the head of the reply is sent: may hold it, or add headers."""

    async def sending(self, body: bytes) -> None:
        """Before a piece of the body is sent: may hold it."""

    def delivered(self) -> None:
        """The whole reply was sent."""

    def absorbs(self) -> bool:
        """Asked when the request was cancelled: whether a retire did it, so that the caller can be answered."""
        return False

    def leave(self) -> None:
        """The request has ended, however it did. Synchronous: nothing can cancel it half way."""


class Gate(Protocol):
    """What a middleware asks. One per server and kind; `integrations.asgi` has the middleware."""

    @property
    def names(self) -> DataPlaneNames:
        """Names of the data plane."""

    async def enter(self, request: GateRequest) -> Visit:
        """Hold, admit or refuse. Raises ControlError to refuse, CallerLeft if nobody is there any more."""

    def reply_headers(self) -> Mapping[str, str]:
        """Headers of every reply of this server, refusals included."""

    def refused(self, error: ControlError) -> None:
        """A refusal is being answered: this gate's, or one of the application behind it. Counts it; must not wait."""


# ---- tasks that may be cancelled once ----------------------------------------------------------------------


class Cancellable:
    """The task of one request, which its owner may cancel once, and can tell that cancel from others."""

    __slots__ = ("_absorbed", "_task", "cancelled")

    def __init__(self, task: asyncio.Task[Any] | None = None) -> None:
        self._task = task or asyncio.current_task()
        self.cancelled = False
        self._absorbed = False

    def cancel(self) -> None:
        """Cancel it, the first time only: a second cancel would break into the cleanup the first one started."""
        if not self.cancelled and self._task is not None:
            self.cancelled = True
            self._task.cancel()

    def absorb(self) -> bool:
        """After a CancelledError: whether it was ours alone. Then the task is as if never cancelled."""
        if not self.cancelled or self._absorbed or self._task is None:
            return False
        self._absorbed = True
        return self._task.uncancel() == 0


async def wait_for(future: asyncio.Future[Any], budget: Budget, step: str) -> None:
    """Wait until `future` is done, whatever its result. Raises OutOfTime naming `step`; cancels nothing."""
    if not future.done():
        await asyncio.wait({future}, timeout=budget.require(step))
        if not future.done():
            raise OutOfTime(f"{step} did not end in time")
