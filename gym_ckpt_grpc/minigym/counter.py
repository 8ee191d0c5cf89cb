"""The counter: one number per session, and the template for a resources server with state.

A session nobody opened starts at 0, as in the field's own counter example. So a restore that was forgotten
raises nothing: it silently gives another reward. That is what the demo's negative control shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_BY = 5
"""The largest step of one increment; the smallest is 1."""

SCHEMA_VERSION = 1

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "increment",
            "description": "Add to the counter.",
            "parameters": {
                "type": "object",
                "properties": {"by": {"type": "integer", "enum": list(range(1, MAX_BY + 1))}},
                "required": ["by"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_count",
            "description": "Read the counter.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)
"""The tools as offered to the model."""


@dataclass(slots=True)
class CounterSession:
    """count: the number. increments: how often it was raised."""

    count: int = 0
    increments: int = 0

    def increment(self, by: int) -> int:
        """Add `by` (1..MAX_BY) and return the new count. Raises ValueError for anything else."""
        if type(by) is not int or not 1 <= by <= MAX_BY:
            raise ValueError(f"by is {by!r}, not an integer from 1 to {MAX_BY}")
        self.count += by
        self.increments += 1
        return self.count

    def reward(self, target: int) -> float:
        """Share of `target` (>= 1) that was reached, 0 to 1."""
        return min(1.0, self.count / target)

    def export(self) -> dict[str, Any]:
        """The state as JSON-able values, apart from this object."""
        return {"version": SCHEMA_VERSION, "count": self.count, "increments": self.increments}

    @classmethod
    def from_state(cls, state: object) -> CounterSession:
        """Build a session from exported state. Raises ValueError naming what is wrong with it."""
        if not isinstance(state, Mapping) or set(state) != {"version", "count", "increments"}:
            raise ValueError("state does not have exactly the fields version, count, increments")
        if state["version"] != SCHEMA_VERSION:
            raise ValueError(f"version is {state['version']!r}, not {SCHEMA_VERSION}")
        for name in ("count", "increments"):
            if type(state[name]) is not int or state[name] < 0:
                raise ValueError(f"{name} is {state[name]!r}, not an integer >= 0")
        count, increments = state["count"], state["increments"]
        if not increments <= count <= increments * MAX_BY:
            raise ValueError(f"count {count} cannot come from {increments} increments of 1 to {MAX_BY}")
        return cls(count, increments)


class CounterSessions:
    """All sessions of one counter server, by session id."""

    def __init__(self) -> None:
        self._sessions: dict[str, CounterSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def get(self, session_id: str) -> CounterSession:
        """The session; a new one at 0 if there is none."""
        return self._sessions.setdefault(session_id, CounterSession())

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run a tool and return its result. Raises ValueError for an unknown tool or bad arguments."""
        if tool == "increment" and set(arguments) == {"by"}:
            return {"count": self.get(session_id).increment(arguments["by"])}
        if tool == "get_count" and not arguments:
            return {"count": self.get(session_id).count}
        raise ValueError(f"no tool {tool!r} with arguments {sorted(arguments)}")

    def export(self, session_id: str) -> dict[str, Any]:
        return self.get(session_id).export()

    def install(self, session_id: str, session: CounterSession) -> None:
        """Put a checked session in place; cannot fail."""
        self._sessions[session_id] = session

    def restore(self, session_id: str, state: object) -> None:
        """Check exported state and install it; ValueError, and nothing installed, if it is bad."""
        self.install(session_id, CounterSession.from_state(state))

    def close(self, session_id: str) -> None:
        """Forget a session; harmless if there is none."""
        self._sessions.pop(session_id, None)
