"""The data set of minigym: rollouts of tasks of every kind, made from one seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gym_ckpt_grpc.minigym.counter import MAX_BY

Kind = Literal["blackjack", "counter", "weather", "office", "inbox", "tally", "proofs"]
"""The kind of a task is the name of the resources server that serves it."""
KINDS: tuple[Kind, ...] = ("blackjack", "counter")
"""What the demo plays."""

ROLLOUTS_PER_TASK = 2
BLACKJACK_GAMES, BLACKJACK_TURNS = 5, 9
"""Five games take at least five steps; play ends after nine at the latest. One more call gives the answer."""


@dataclass(frozen=True, slots=True)
class Task:
    """One rollout to collect.

    rollout_id: `<task index>-<rollout index>`. seed: of sampling, different for each rollout. setup: what the
    resources server needs to seed the session, equal for all rollouts of a task. turns: most tool calls; then
    the agent asks once more without tools, which gives the final answer. stream: the agent reads the model's
    replies as event streams.
    """

    rollout_id: str
    kind: Kind
    seed: int
    prompt: str
    turns: int
    setup: Mapping[str, int]
    stream: bool = False

    def as_row(self) -> dict[str, Any]:
        """JSON-able form, as sent to the environment server."""
        return asdict(self)


def make_tasks(
    count: int, seed: int, *, rollouts_per_task: int = ROLLOUTS_PER_TASK, kinds: Sequence[Kind] = KINDS
) -> list[Task]:
    """The first `count` rollouts, tasks of the kinds in turn; each takes 6 to 10 model calls.

    A longer list begins with the shorter one. Raises ValueError for a count < 0, rollouts_per_task < 1, or no kind.
    """
    if count < 0 or rollouts_per_task < 1 or not kinds:
        raise ValueError("count must be >= 0, rollouts_per_task >= 1, and there must be a kind")
    return [_task(*divmod(number, rollouts_per_task), seed, kinds) for number in range(count)]


def _task(index: int, rollout: int, seed: int, kinds: Sequence[Kind]) -> Task:
    kind = kinds[index % len(kinds)]
    turns = 5 + _number(seed, f"turns {index}") % 5
    if kind == "blackjack":
        turns = BLACKJACK_TURNS
    prompt, setup = _setup(index, kind, seed, turns)
    return Task(f"{index}-{rollout}", kind, _number(seed, f"sampling {index} {rollout}"), prompt, turns, setup)


def _setup(index: int, kind: Kind, seed: int, turns: int) -> tuple[str, dict[str, int]]:
    """What a task asks for, and what its resources server needs to seed it."""
    if kind == "blackjack":
        prompt = f"Task {index}: play {BLACKJACK_GAMES} games of blackjack, one hit or stand at a time."
        return prompt, {"seed": _number(seed, f"cards {index}"), "games": BLACKJACK_GAMES}
    if kind == "counter" or kind == "tally":
        # Out of reach of any play, so that every count has a reward of its own.
        target = turns * MAX_BY + 1
        return f"Task {index}: raise the counter toward {target} in {turns} calls.", {"target": target}
    if kind == "weather":
        return f"Task {index}: report the weather.", {"cities": 1 + _number(seed, f"cities {index}") % 6}
    if kind == "office":
        return f"Task {index}: do the office's work.", {"seed": _number(seed, f"office {index}"), "goal": turns * 2}
    if kind == "inbox":
        return f"Task {index}: answer the mail.", {"seed": _number(seed, f"mail {index}")}
    return f"Task {index}: prove it.", {"difficulty": 1 + _number(seed, f"difficulty {index}") % 3}


def _number(seed: int, use: str) -> int:
    """A number of 48 bits: exact in every JSON reader."""
    return int.from_bytes(hashlib.sha256(f"{seed} {use}".encode()).digest()[:6], "big")
