"""Blackjack: a restored session goes on exactly as its uninterrupted twin, cards and rewards included."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gym_ckpt_grpc.minigym.blackjack import (
    BlackjackSession,
    BlackjackSessions,
    GameOver,
    Rules,
    UnknownSession,
)


def _actions(count: int) -> list[str]:
    return random.Random(4).choices(["hit", "stand"], k=count)


def _play(session: BlackjackSession, actions: list[str]) -> list[dict[str, Any]]:
    return [session.step(action) for action in actions]


@pytest.mark.behaviour("P325")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("played", [0, 1, 7])
def test_the_next_20_steps_equal_those_of_an_uninterrupted_twin(seed: int, played: int) -> None:
    """Through JSON and into a session that had other cards, across the ends of several games."""
    actions = _actions(played + 20)
    twin = BlackjackSession(seed=seed, games=30)
    _play(twin, actions[:played])
    restored = BlackjackSession.from_state(json.loads(json.dumps(twin.export())))
    assert restored.observe() == twin.observe()
    steps = _play(twin, actions[played:])
    assert _play(restored, actions[played:]) == steps
    assert sum(step["finished"] is not None for step in steps) >= 3
    assert restored.export() == twin.export()
    assert restored.reward == twin.reward


@pytest.mark.behaviour("P325")
def test_cut_at_every_step_a_session_ends_like_its_twin() -> None:
    """Also with half a 64-bit draw cached in the generator, which a state without it would lose."""
    actions = _actions(40)
    twin = BlackjackSession(seed=11)
    moving = BlackjackSession(seed=11)
    cached = set()
    for action in actions:
        if twin.done:
            break
        cached.add(moving.export()["generator"]["has_uint32"])
        moving = BlackjackSession.from_state(json.loads(json.dumps(moving.export())))
        assert moving.step(action) == twin.step(action)
    assert twin.done
    assert moving.done
    assert cached == {0, 1}
    assert moving.export() == twin.export()


def test_a_lost_generator_deals_other_cards() -> None:
    """The negative of P325: hands alone are not the state."""
    differs = 0
    for seed in range(5):
        twin = BlackjackSession(seed=seed, games=30)
        state = {**twin.export(), "generator": BlackjackSession(seed=99).export()["generator"]}
        differs += _play(BlackjackSession.from_state(state), _actions(20)) != _play(twin, _actions(20))
    assert differs == 5


def test_a_finished_session_is_restored_finished() -> None:
    session = BlackjackSession(seed=3, games=2)
    while not session.done:
        session.step("stand")
    restored = BlackjackSession.from_state(json.loads(json.dumps(session.export())))
    assert restored.done
    assert (restored.observe(), restored.reward) == (session.observe(), session.reward)
    for over in (session, restored):
        with pytest.raises(GameOver, match="all 2 games"):
            over.step("hit")


def test_the_reward_is_the_mean_of_the_games_and_open_games_are_lost() -> None:
    session = BlackjackSession(seed=5, games=4)
    assert session.reward == 0
    while not session.done:
        session.step("stand")
    assert session.reward == (sum(session.rewards) / 4 + 1) / 2
    assert 0 <= session.reward <= 1


def test_an_export_is_apart_from_the_session() -> None:
    session = BlackjackSession(seed=1)
    frozen = session.export()
    copy = json.loads(json.dumps(frozen))
    _play(session, ["hit", "stand", "stand"])
    assert frozen == copy


def _state() -> dict[str, Any]:
    return BlackjackSession(seed=2).export()


def _with_generator(**changes: Any) -> dict[str, Any]:
    return {**_state(), "generator": {**_state()["generator"], **changes}}


@pytest.mark.behaviour("P326")
@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({**_state(), "player": [11, 2]}, "player card is 11"),
        ({**_state(), "player": [0, 2]}, "player card is 0"),
        ({**_state(), "dealer": [5, 2.0]}, r"dealer card is 2\.0"),
        ({**_state(), "dealer": [True, 2]}, "dealer card is True"),
        ({**_state(), "dealer": [5]}, "dealer does not hold"),
        ({**_state(), "dealer": [5, 5, 5]}, "dealer holds 3 cards"),
        ({**_state(), "player": [10, 10, 2]}, "player holds 22"),
        ({**_state(), "player": "10"}, "player does not hold"),
        (_with_generator(name="MT19937"), "generator is 'MT19937'"),
        (_with_generator(state="-1"), "generator state is '-1'"),
        (_with_generator(state=str(2**128)), "generator state"),
        (_with_generator(state=5), "generator state is 5"),
        (_with_generator(inc="4"), "generator inc is 4, which is even"),
        (_with_generator(has_uint32=2), "has_uint32 is 2"),
        (_with_generator(uinteger=2**32), "uinteger is 4294967296"),
        (_with_generator(more=1), "generator does not have exactly"),
        ({**_state(), "generator": []}, "generator is no mapping"),
        ({**_state(), "rules": {"natural": True, "sab": False}}, "rules are .*'natural': True"),
        ({**_state(), "version": 2}, "version is 2"),
        ({**_state(), "games": 0}, "games is 0"),
        ({**_state(), "rewards": [0.5]}, r"reward 0\.5"),
        ({**_state(), "rewards": [1.5]}, r"reward 1\.5"),
        ({**_state(), "rewards": [1.0] * 7}, "rewards is no list"),
        ({**_state(), "steps": -1}, "steps is -1"),
        ({**_state(), "more": 1}, "exactly the fields"),
        ([], "exactly the fields"),
    ],
)
def test_impossible_state_installs_nothing(state: object, fault: str) -> None:
    """Cards, generator and rules that cannot be; the error names the fault."""
    sessions = BlackjackSessions()
    with pytest.raises(ValueError, match=fault):
        sessions.restore("s", state)
    assert "s" not in sessions
    assert len(sessions) == 0


def test_other_rules_of_the_server_are_a_fault_of_the_state() -> None:
    casino = Rules(natural=True, sab=False)
    with pytest.raises(ValueError, match="this server plays"):
        BlackjackSession.from_state(_state(), rules=casino)
    session = BlackjackSession(seed=2, rules=casino)
    assert BlackjackSession.from_state(session.export(), rules=casino).export() == session.export()


@pytest.mark.behaviour("P326")
def test_a_step_without_a_session_is_unknown_and_starts_nothing() -> None:
    sessions = BlackjackSessions()
    with pytest.raises(UnknownSession, match="no blackjack session s"):
        sessions.call("s", "step", {"action": "hit"})
    with pytest.raises(UnknownSession):
        sessions.export("s")
    assert len(sessions) == 0


def test_sessions_open_once_and_close_repeatably() -> None:
    sessions = BlackjackSessions()
    sessions.open("s", seed=1, games=3)
    with pytest.raises(ValueError, match="open already"):
        sessions.open("s", seed=1)
    assert sessions.call("s", "step", {"action": "stand"})["games_over"] == 1
    for tool, arguments in (("step", {}), ("step", {"action": "fold"}), ("deal", {"action": "hit"})):
        with pytest.raises(ValueError, match=r"no tool|action is"):
            sessions.call("s", tool, arguments)
    sessions.close("s")
    sessions.close("s")
    assert "s" not in sessions


def test_games_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="games is 0"):
        BlackjackSession(seed=1, games=0)
