"""The counter: the template of a resources server with state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gym_ckpt_grpc.minigym.counter import MAX_BY, CounterSession, CounterSessions


@pytest.mark.behaviour("P323")
def test_the_count_continues_after_a_restore() -> None:
    before, after = CounterSessions(), CounterSessions()
    assert before.call("s", "increment", {"by": 3}) == {"count": 3}
    assert before.call("s", "increment", {"by": 5}) == {"count": 8}
    after.restore("s", json.loads(json.dumps(before.export("s"))))
    for sessions in (before, after):
        assert sessions.call("s", "increment", {"by": 1}) == {"count": 9}
        assert sessions.call("s", "get_count", {}) == {"count": 9}
    assert before.export("s") == after.export("s") == {"version": 1, "count": 9, "increments": 3}


def test_a_forgotten_restore_is_silent_and_changes_the_reward() -> None:
    """What the demo's negative control rests on."""
    kept, forgotten = CounterSessions(), CounterSessions()
    kept.call("s", "increment", {"by": 4})
    for sessions in (kept, forgotten):
        sessions.call("s", "increment", {"by": 2})
    assert kept.get("s").reward(10) == 0.6
    assert forgotten.get("s").reward(10) == 0.2


def test_an_export_is_apart_from_the_session() -> None:
    sessions = CounterSessions()
    frozen = sessions.export("s")
    sessions.call("s", "increment", {"by": 1})
    assert frozen["count"] == 0


@pytest.mark.parametrize(
    ("tool", "arguments", "fault"),
    [
        ("increment", {"by": 0}, "by is 0"),
        ("increment", {"by": MAX_BY + 1}, "by is 6"),
        ("increment", {"by": True}, "by is True"),
        ("increment", {"by": "2"}, "by is '2'"),
        ("increment", {}, "no tool 'increment'"),
        ("get_count", {"by": 1}, "no tool 'get_count'"),
        ("reset", {}, "no tool 'reset'"),
    ],
)
def test_bad_calls_change_nothing(tool: str, arguments: dict[str, Any], fault: str) -> None:
    sessions = CounterSessions()
    sessions.call("s", "increment", {"by": 2})
    with pytest.raises(ValueError, match=fault):
        sessions.call("s", tool, arguments)
    assert sessions.export("s") == {"version": 1, "count": 2, "increments": 1}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"version": 2}, "version is 2"),
        ({"count": -1}, "count is -1"),
        ({"count": 2.0}, r"count is 2\.0"),
        ({"count": True}, "count is True"),
        ({"increments": None}, "increments is None"),
        ({"increments": 9}, "count 4 cannot come from 9"),
        ({"count": 11}, "count 11 cannot come from 2"),
        ({"extra": 1}, "exactly the fields"),
    ],
)
def test_bad_state_installs_nothing(changes: dict[str, Any], fault: str) -> None:
    sessions = CounterSessions()
    with pytest.raises(ValueError, match=fault):
        sessions.restore("s", {"version": 1, "count": 4, "increments": 2, **changes})
    assert "s" not in sessions
    with pytest.raises(ValueError, match="exactly the fields"):
        sessions.restore("s", [1])


def test_closing_is_repeatable_and_a_closed_session_starts_at_zero() -> None:
    sessions = CounterSessions()
    sessions.install("s", CounterSession(count=4, increments=2))
    sessions.close("s")
    sessions.close("s")
    assert len(sessions) == 0
    assert sessions.get("s").count == 0
