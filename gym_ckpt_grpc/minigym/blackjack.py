"""Blackjack on the real gymnasium environment, with state that can be exported and restored exactly.

A session plays several games with one `Blackjack-v1`. Its cards come from the session's own generator, whose
state is part of the export: a generator that starts anew looks fine and deals other cards. The suit and face
of the dealer's card, which only rendering reads, are not exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import gymnasium
from gymnasium.envs.toy_text.blackjack import BlackjackEnv

from gym_ckpt_grpc.minigym.generator_state import (
    check_generator,
    check_integer,
    export_generator,
    restored_generator,
)

DEFAULT_GAMES = 6
MAX_GAMES = 1000
SCHEMA_VERSION = 1

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "step",
            "description": "Play one action in the current game of blackjack.",
            "parameters": {
                "type": "object",
                "properties": {"action": {"type": "string", "enum": ["hit", "stand"]}},
                "required": ["action"],
            },
        },
    },
)
"""The tools as offered to the model."""

_ACTIONS = {"stand": 0, "hit": 1}
_FIELDS = frozenset({"version", "rules", "games", "steps", "rewards", "player", "dealer", "generator"})


class UnknownSession(LookupError):
    """A step or an export without a session. On the data plane it is 404, never a new game."""


class GameOver(ValueError):
    """A step after the last game."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of `Blackjack-v1`: pay 1.5 for a natural; follow Sutton and Barto, which overrides it."""

    natural: bool = False
    sab: bool = True

    @property
    def rewards(self) -> frozenset[float]:
        """What one game can pay."""
        return frozenset({-1.0, 0.0, 1.0, 1.5} if self.natural and not self.sab else {-1.0, 0.0, 1.0})


class BlackjackSession:
    """Several games in a row. games: 1..MAX_GAMES. seed: of all cards of the session, >= 0."""

    def __init__(self, *, seed: int, games: int = DEFAULT_GAMES, rules: Rules | None = None) -> None:
        if not 1 <= games <= MAX_GAMES:
            raise ValueError(f"games is {games}, not 1 to {MAX_GAMES}")
        self.games, self.rules = games, rules or Rules()
        self.steps = 0
        self.rewards: list[float] = []
        # The passive checker only warns about environments under development, at a cost per step.
        self._env = gymnasium.make("Blackjack-v1", disable_env_checker=True, **asdict(self.rules))
        self._table = cast(BlackjackEnv, self._env.unwrapped)
        self._env.reset(seed=seed)

    @property
    def done(self) -> bool:
        """Whether the last game is over."""
        return len(self.rewards) == self.games

    @property
    def reward(self) -> float:
        """Mean of the games' rewards, from -1..1 to 0..1. A game not finished counts as lost."""
        total = sum(self.rewards) - (self.games - len(self.rewards))
        return min(1.0, (total / self.games + 1) / 2)

    def observe(self) -> dict[str, Any]:
        """What the player sees: own cards, the dealer's open card, games over and to play."""
        return {
            "player": list(self._table.player),
            "dealer_shows": self._table.dealer[0],
            "games_over": len(self.rewards),
            "games": self.games,
            "done": self.done,
        }

    def step(self, action: str) -> dict[str, Any]:
        """Play `hit` or `stand`; when a game ends, deal the next.

        Returns what `observe` gives, and `finished`: None, or cards and reward of the game this step ended.
        Raises ValueError for another action and GameOver after the last game.
        """
        if action not in _ACTIONS:
            raise ValueError(f"action is {action!r}, not hit or stand")
        if self.done:
            raise GameOver(f"all {self.games} games are over")
        _, reward, over, _, _ = self._env.step(_ACTIONS[action])
        self.steps += 1
        return {"finished": self._finish(float(reward)) if over else None, **self.observe()}

    def _finish(self, reward: float) -> dict[str, Any]:
        self.rewards.append(reward)
        hands = {"player": list(self._table.player), "dealer": list(self._table.dealer)}
        if not self.done:
            self._env.reset()  # no seed: the generator goes on
        return {**hands, "reward": reward}

    def export(self) -> dict[str, Any]:
        """The state as JSON-able values, apart from this object. Integers over 64 bits are decimal text."""
        return {
            "version": SCHEMA_VERSION,
            "rules": asdict(self.rules),
            "games": self.games,
            "steps": self.steps,
            "rewards": list(self.rewards),
            "player": list(self._table.player),
            "dealer": list(self._table.dealer),
            "generator": export_generator(self._table.np_random),
        }

    @classmethod
    def from_state(cls, state: object, *, rules: Rules | None = None) -> BlackjackSession:
        """Build a session from exported state. rules: those of this server.

        Raises ValueError naming the fault: other rules, another generator, a card or hand that cannot be.
        """
        rules = rules or Rules()
        state = _checked(state, rules)
        session = cls(seed=0, games=state["games"], rules=rules)
        session.steps, session.rewards = state["steps"], [float(reward) for reward in state["rewards"]]
        session._table.player = list(state["player"])
        session._table.dealer = list(state["dealer"])
        session._table.np_random = restored_generator(state["generator"])
        return session

    def close(self) -> None:
        self._env.close()


def _checked(state: object, rules: Rules) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or set(state) != _FIELDS:
        raise ValueError(f"state does not have exactly the fields {', '.join(sorted(_FIELDS))}")
    if state["version"] != SCHEMA_VERSION:
        raise ValueError(f"version is {state['version']!r}, not {SCHEMA_VERSION}")
    if state["rules"] != asdict(rules):
        raise ValueError(f"rules are {state['rules']!r}, but this server plays {asdict(rules)!r}")
    check_integer("games", state["games"], 1, MAX_GAMES)
    rewards = state["rewards"]
    if not isinstance(rewards, list) or len(rewards) > state["games"]:
        raise ValueError(f"rewards is no list of at most {state['games']} games")
    for reward in rewards:
        if type(reward) not in (int, float) or reward not in rules.rewards:
            raise ValueError(f"reward {reward!r} is none that a game can pay")
    check_integer("steps", state["steps"], len(rewards), MAX_GAMES * 22)
    _check_hands(state["player"], state["dealer"], over=len(rewards) == state["games"])
    check_generator(state["generator"])
    return state


def _check_hands(player: Any, dealer: Any, *, over: bool) -> None:
    for name, hand in (("player", player), ("dealer", dealer)):
        if not isinstance(hand, list) or len(hand) < 2:
            raise ValueError(f"{name} does not hold at least two cards")
        for card in hand:
            check_integer(f"{name} card", card, 1, 10)
    if over:
        return
    if len(dealer) != 2:
        raise ValueError(f"dealer holds {len(dealer)} cards in a game that goes on, not 2")
    if sum(player) > 21:
        raise ValueError(f"player holds {sum(player)} in a game that goes on")


class BlackjackSessions:
    """All sessions of one blackjack server, by session id. Unlike a counter, none starts by itself."""

    def __init__(self, *, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._sessions: dict[str, BlackjackSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def open(self, session_id: str, *, seed: int, games: int = DEFAULT_GAMES) -> BlackjackSession:
        """Start a session. Raises ValueError if it is open already."""
        if session_id in self._sessions:
            raise ValueError(f"session {session_id} is open already")
        session = BlackjackSession(seed=seed, games=games, rules=self.rules)
        self._sessions[session_id] = session
        return session

    def get(self, session_id: str) -> BlackjackSession:
        """The session. Raises UnknownSession if there is none."""
        try:
            return self._sessions[session_id]
        except KeyError:
            raise UnknownSession(f"no blackjack session {session_id}") from None

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run a tool and return its result. Raises UnknownSession, or ValueError for a tool it has not."""
        if tool != "step" or set(arguments) != {"action"}:
            raise ValueError(f"no tool {tool!r} with arguments {sorted(arguments)}")
        return self.get(session_id).step(arguments["action"])

    def export(self, session_id: str) -> dict[str, Any]:
        """The session's state. Raises UnknownSession."""
        return self.get(session_id).export()

    def stage(self, state: object) -> BlackjackSession:
        """Check exported state and build it aside; ValueError names the fault."""
        return BlackjackSession.from_state(state, rules=self.rules)

    def install(self, session_id: str, session: BlackjackSession) -> None:
        """Put a checked session in place; cannot fail."""
        self._sessions[session_id] = session

    def restore(self, session_id: str, state: object) -> None:
        """`stage`, then `install`; nothing is installed if the state is bad."""
        self.install(session_id, self.stage(state))

    def close(self, session_id: str) -> None:
        """Forget a session; harmless if there is none."""
        if session := self._sessions.pop(session_id, None):
            session.close()
