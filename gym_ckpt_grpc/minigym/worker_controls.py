"""What a test can ask of an inference worker: hold generations, break cuts, change weights, list what it did.

    POST /control/hold     {"after": n, "rollout_id"?, "attempt"?, "turn"?} -> {"id"}   stops matching calls at n tokens
    POST /control/release  {"id"?}                                         -> {}       that hold, or all, hung cuts too
    POST /control/rate     {"tick": seconds per token}                     -> {}
    POST /control/weights  {"version": n}                                  -> {}
    POST /control/cuts     {"mode": "fail" | "hang", "count"?: n}          -> {}       what happens to the next n cuts
    GET  /control/held     ?count=1&within=10&rollout_id=&attempt=&turn=    -> {"held": n} once so many are; 408 if not
    GET  /control/calls                                                    -> {"calls": [...]} in the order they began
    GET  /control/sweeps                                                   -> {"cuts": [...], "released": [cut ids]}

The routes exist only in a worker that was started for tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

CutFault = Literal["fail", "hang"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class HoldBody(_Body):
    """Which calls to hold, and after how many tokens of the reply (reused ones count). None matches every call."""

    after: int = Field(ge=0)
    rollout_id: str | None = None
    attempt: int | None = None
    turn: int | None = None


class ReleaseBody(_Body):
    """Which hold to release; None: all of them, and the hung cuts."""

    id: int | None = None


class RateBody(_Body):
    """tick: seconds per token, >= 0."""

    tick: float = Field(ge=0, allow_inf_nan=False)


class WeightsBody(_Body):
    """version: of the weights from the next token on."""

    version: int = Field(ge=0)


class CutsBody(_Body):
    """mode: what happens to the next `count` cuts."""

    mode: CutFault
    count: int = Field(default=1, ge=1)


@dataclass(frozen=True, slots=True)
class CallName:
    """What a hold can choose a call by. turn: number of assistant messages in its context."""

    rollout_id: str
    attempt: int
    turn: int

    def matches(self, rollout_id: str | None, attempt: int | None, turn: int | None) -> bool:
        """Whether this call is meant; None means any."""
        wanted = (rollout_id, attempt, turn)
        return all(want in (None, have) for want, have in zip(wanted, astuple(self), strict=True))


class WorkerControls:
    """The state behind the routes. Holds nothing and breaks nothing until it is told to."""

    def __init__(self) -> None:
        self._holds: dict[int, HoldBody] = {}
        self._numbers = 0
        self._faults: list[CutFault] = []
        self._unhang = asyncio.Event()
        self._stopped = asyncio.Event()

    def hold(self, which: HoldBody) -> int:
        """Hold matching calls; the number that releases them."""
        self._numbers += 1
        self._holds[self._numbers] = which
        return self._numbers

    def release(self, number: int | None) -> None:
        """Release a hold, or all of them and the hung cuts."""
        if number is not None:
            self._holds.pop(number, None)
            return
        self._holds.clear()
        self._faults.clear()
        self._unhang.set()
        self._unhang = asyncio.Event()

    def holds(self, call: CallName, tokens: int) -> bool:
        """Whether a call that has made so many tokens must wait."""
        return any(
            tokens >= hold.after and call.matches(hold.rollout_id, hold.attempt, hold.turn)
            for hold in self._holds.values()
        )

    def stopped(self) -> None:
        """A call has just come to a hold."""
        self._stopped.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until something holds that changes when calls come to a hold."""
        while True:
            self._stopped.clear()
            if reached():
                return
            await self._stopped.wait()

    def break_cuts(self, fault: CutFault, count: int) -> None:
        """Let the next `count` cuts fail, or hang until everything is released."""
        self._faults.extend([fault] * count)

    async def before_cut(self) -> None:
        """Called for each cut. Raises RuntimeError if this one is to fail."""
        fault = self._faults.pop(0) if self._faults else None
        if fault == "hang":
            await self._unhang.wait()
        elif fault == "fail":
            raise RuntimeError("a test asked for this cut to fail")
