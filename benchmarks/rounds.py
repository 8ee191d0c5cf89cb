"""Rounds: every case once per round, in an order shuffled anew, and each result checked after its time is taken."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Tell = Callable[[str], None]
"""Told how far it is, for people."""


class WrongResult(Exception):
    """What was measured did not do what it is measured for."""


def nothing(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something to be timed.

    before: makes things ready. run: is timed, and nothing else is. check: is given what `run` gave; raises WrongResult.
    after: removes what is left. Only `run` counts.
    """

    name: str
    run: Callable[[], Any]
    before: Callable[[], None] = nothing
    check: Callable[[Any], None] = nothing
    after: Callable[[], None] = nothing


@dataclass(slots=True)
class Took:
    """What a case took, per round. seconds: by the clock. processor: seconds of all threads of this process."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def take(
    cases: Sequence[Case], rounds: int, rng: random.Random, *, tell: Tell = nothing, warm: bool = True
) -> dict[str, Took]:
    """What each case took in each round, by name. warm: a round before them that does not count."""
    taken = {case.name: Took() for case in cases}
    for number in range(0 if warm else 1, rounds + 1):
        order = list(cases)
        rng.shuffle(order)
        for case in order:
            tell(f"round {number} of {rounds}: {case.name}")
            seconds, processor = _once(case)
            if number:
                taken[case.name].seconds.append(seconds)
                taken[case.name].processor.append(processor)
    return taken


def _once(case: Case) -> tuple[float, float]:
    case.before()
    try:
        gc.collect()
        begun, used = time.perf_counter(), time.process_time()
        result = case.run()
        seconds, processor = time.perf_counter() - begun, time.process_time() - used
        case.check(result)
        return seconds, processor
    finally:
        case.after()
