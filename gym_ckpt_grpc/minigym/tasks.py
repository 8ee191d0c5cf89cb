"""The data set of minigym: rollouts of blackjack and counter tasks, made from one seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gym_ckpt_grpc.minigym.counter import MAX_BY

Kind = Literal["blackjack", "counter"]
KINDS: tuple[Kind, ...] = ("blackjack", "counter")

ROLLOUTS_PER_TASK = 2
BLACKJACK_GAMES, BLACKJACK_TURNS = 5, 9
"""Five games take at least five steps; play ends after nine at the latest. One more call gives the answer."""


@dataclass(frozen=True, slots=True)
class Task:
    """One rollout to collect.

    rollout_id: `<task index>-<rollout index>`. seed: of sampling, different for each rollout. setup: what the
    resources server needs to seed the session, equal for all rollouts of a task. turns: most tool calls; then
    the agent asks once more without tools, which gives the final answer.
    """

    rollout_id: str
    kind: Kind
    seed: int
    prompt: str
    turns: int
    setup: Mapping[str, int]

    def as_row(self) -> dict[str, Any]:
        """JSON-able form, as sent to the environment server."""
        return asdict(self)


def make_tasks(count: int, seed: int, *, rollouts_per_task: int = ROLLOUTS_PER_TASK) -> list[Task]:
    """The first `count` rollouts, blackjack and counter tasks in turn; each takes 6 to 10 model calls.

    A longer list begins with the shorter one. Raises ValueError for a count < 0 or rollouts_per_task < 1.
    """
    if count < 0 or rollouts_per_task < 1:
        raise ValueError("count must be >= 0 and rollouts_per_task >= 1")
    return [_task(*divmod(number, rollouts_per_task), seed) for number in range(count)]


def _task(index: int, rollout: int, seed: int) -> Task:
    kind = KINDS[index % len(KINDS)]
    sampling = _number(seed, f"sampling {index} {rollout}")
    if kind == "blackjack":
        prompt = f"Task {index}: play {BLACKJACK_GAMES} games of blackjack, one hit or stand at a time."
        setup = {"seed": _number(seed, f"cards {index}"), "games": BLACKJACK_GAMES}
        turns = BLACKJACK_TURNS
    else:
        turns = 5 + _number(seed, f"turns {index}") % 5
        # Out of reach of any play, so that every count has a reward of its own.
        setup = {"target": turns * MAX_BY + 1}
        prompt = f"Task {index}: raise the counter toward {setup['target']} in {turns} calls."
    return Task(f"{index}-{rollout}", kind, sampling, prompt, turns, setup)


def _number(seed: int, use: str) -> int:
    """A number of 48 bits: exact in every JSON reader."""
    return int.from_bytes(hashlib.sha256(f"{seed} {use}".encode()).digest()[:6], "big")
