"""Blackjack, `resources_servers/blackjack`: both hands, and the generator that draws the cards to come."""

from __future__ import annotations

import random
from typing import Any, Final

from gym_ckpt_grpc.integrations.nemo_gym.hooks.sessions import WatchedHooks
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import StateRefused, exactly

RANKS: Final = frozenset(["2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K", "A"])


class BlackjackHooks(WatchedHooks):
    """Of `BlackjackEnv`. Without them a game goes on after a crash: with an empty hand, which loses."""

    tables = ("session_state",)

    def check(self, table: str, entry: Any) -> None:
        exactly(entry, {"player", "dealer", "rng"})
        for name in ("player", "dealer"):
            hand = entry[name]
            if type(hand) is not list or len(hand) < 2:
                raise StateRefused("is no hand of two cards or more", f".{name}")
            for at, card in enumerate(hand):
                if type(card) is not str or card not in RANKS:
                    raise StateRefused(f"is {card!r:.40}, not a card", f".{name}[{at}]")
        if type(entry["rng"]) is not random.Random:
            raise StateRefused("is no generator", ".rng")
