"""Wordle, `resources_servers/wordle`: the state of a game."""

from __future__ import annotations

from typing import Any, Final

from gym_ckpt_grpc.integrations.nemo_gym.hooks.sessions import TableHooks
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import Classes, StateRefused

_TYPES: Final = {
    "target_word": str,
    "word_length": int,
    "max_turns": int,
    "turn": int,
    "guesses": list,
    "feedback_history": list,
    "known_greens": dict,
    "known_yellows": set,
    "eliminated_letters": set,
    "game_over": bool,
    "won": bool,
    "total_reward": float,
}


class WordleHooks(TableHooks):
    """Of `WordleResourcesServer`."""

    tables = ("session_state",)

    def classes(self) -> Classes:
        from resources_servers.wordle.app import WordleGameState

        return {"WordleGameState": WordleGameState}

    def check(self, table: str, entry: Any) -> None:
        if type(entry).__name__ != "WordleGameState":
            raise StateRefused(f"is {type(entry).__name__}, not a game")
        for name, wanted in _TYPES.items():
            if type(getattr(entry, name)) is not wanted:
                raise StateRefused(f"is no {wanted.__name__}", f".{name}")
