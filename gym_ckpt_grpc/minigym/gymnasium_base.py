"""The base of servers that speak Gymnasium: `/reset` begins a session, the last `/step` ends it.

A subclass writes `reset` and `step`. It is restart-only until it states `checkpoint_mode = ResourcesMode.EXPORTED` of
its own; then its state goes through `encode` and `decode`, which by default copy it as JSON.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer, UnknownSession, built_aside
from gym_ckpt_grpc.minigym.strict_json import json_copy
from gym_ckpt_grpc.minigym.weather_server import tool_results
from gym_ckpt_grpc.participants import ResourcesMode, RestoredState, VerifyMode

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gave. terminated: the game is over. truncated: it was cut off, by a limit of steps for example."""

    observation: Any
    reward: float
    terminated: bool = False
    truncated: bool = False

    @property
    def done(self) -> bool:
        """Whether it was the session's last."""
        return self.terminated or self.truncated


class GymnasiumServer(ResourcesServer, Generic[StateT]):
    """One game per session, seeded at `/reset` (or `/seed_session`, which is the same).

    Verify sums up the rewards of the steps in the transcript (`messages`), so it needs no session and may run twice.
    """

    checkpoint_mode = ResourcesMode.RESTART_ONLY
    checkpoint_verify = VerifyMode.REPLAY
    seed_paths = ("/reset", "/seed_session")
    frees_at_verify = False

    def __init__(self) -> None:
        self.states: dict[str, StateT] = {}

    # ---- what a subclass writes

    @abstractmethod
    def reset(self, setup: Mapping[str, Any]) -> tuple[StateT, Any]:
        """Begin a game: its state, and the first observation."""

    @abstractmethod
    def step(self, state: StateT, action: Any) -> Step:
        """Play one action, changing `state`. Raises ValueError for an action that there is not."""

    def shut(self, state: StateT) -> None:
        """Free what a state holds outside the process's memory."""

    def encode(self, state: StateT) -> Any:
        """The state as JSON-able values, apart from it. Raises ValueError for what cannot be kept."""
        return json_copy(state)

    def decode(self, value: Any) -> StateT:
        """The state of what `encode` gave. Raises ValueError naming what is wrong with it."""
        state: StateT = json_copy(value)
        return state

    # ---- the routes

    def open(self, session_id: str, setup: Mapping[str, Any]) -> Mapping[str, Any]:
        state, observation = self.reset(setup)
        self.close(session_id)
        self.states[session_id] = state
        return {"observation": observation}

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if tool != "step" or set(arguments) != {"action"}:
            raise ValueError(f"no tool {tool!r} with arguments {sorted(arguments)}")
        if session_id not in self.states:
            raise UnknownSession(f"no game of session {session_id}: it has not begun, or is over")
        step = self.step(self.states[session_id], arguments["action"])
        if step.done:
            self.close(session_id)
            if self.owner is not None:
                self.owner.session_ended(session_id)
        return {**asdict(step), "done": step.done}

    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        """Sum of the steps' rewards, cut to 0..1: a pure function of `setup`."""
        steps = [each for each in tool_results(setup["messages"]) if isinstance(each, dict) and "reward" in each]
        total = sum(float(each["reward"]) for each in steps)
        return max(0.0, min(1.0, total)), {"steps": len(steps), "total": total}

    def close(self, session_id: str) -> None:
        if session_id in self.states:
            self.shut(self.states.pop(session_id))

    # ---- the hooks of an exported subclass

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        return {each: self.encode(self.states[each]) for each in session_ids if each in self.states}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        """Convert all, then install all."""
        made: list[StateT] = []

        def build(value: Any) -> StateT:
            made.append(self.decode(value))
            return made[-1]

        try:
            self.states.update(built_aside(sessions, build))
        except InvalidState:
            for state in made:
                self.shut(state)
            raise
