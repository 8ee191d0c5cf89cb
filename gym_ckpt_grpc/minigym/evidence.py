"""What the inference workers' own log says about a crash and a restore.

Nothing here asks a coordinator or a participant. A turn that was generated in the first life and not again in the
second was saved; one that was generated again was redone, but for the tokens that the second life took from a cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gym_ckpt_grpc.minigym.inference_log import Call, calls_of, read_rows


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums over the rollouts that were in flight.

    continued: rollouts that went on behind their first turn, or needed no further token. restarted: those that
    began again at turn 0. tokens_saved, turns_saved: of turns of the first life that were not generated again.
    tokens_kept: taken from generations that the checkpoint cut, `calls_continued` of them. tokens_redone: of the
    first life, generated again.
    """

    continued: frozenset[str]
    restarted: frozenset[str]
    tokens_saved: int
    tokens_kept: int
    tokens_redone: int
    turns_saved: int
    calls_continued: int


def judge(log: Path, in_flight: Iterable[str], finished: Iterable[str], *, life: int = 2) -> Evidence:
    """Compare the lives before `life` with it, for rollouts in flight at the checkpoint.

    finished: those that have a result after the second life; a rollout without one continued nothing.
    """
    earlier: defaultdict[str, list[Call]] = defaultdict(list)
    later: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls_of(read_rows(log)):
        (later if call.life >= life else earlier)[call.rollout_id].append(call)
    done = frozenset(finished)
    continued, restarted = set(), set()
    saved = kept = redone = turns = cuts = 0
    for rollout in in_flight:
        calls = later[rollout]
        first = min((call.turn for call in calls), default=None)
        if any(call.turn == 0 and not call.continued_from for call in calls):
            restarted.add(rollout)
        elif rollout in done:
            continued.add(rollout)
        reused = {call.turn: call.reused for call in calls if call.continued_from}
        kept, cuts = kept + sum(reused.values()), cuts + len(reused)
        for turn, tokens in _tokens_by_turn(earlier[rollout]).items():
            if rollout in done and (first is None or turn < first):
                saved, turns = saved + tokens, turns + 1
            else:
                # The log counts a killed call's tokens only now and then: it may have fewer than were cut.
                redone += max(0, tokens - reused.get(turn, 0))
    return Evidence(frozenset(continued), frozenset(restarted), saved, kept, redone, turns, cuts)


def _tokens_by_turn(calls: Iterable[Call]) -> Mapping[int, int]:
    """Tokens of each turn, also of calls that were killed on the way."""
    tokens: defaultdict[int, int] = defaultdict(int)
    for call in calls:
        tokens[call.turn] += call.tokens
    return tokens


def turns_begun(log: Path, *, life: int) -> dict[str, int]:
    """Per rollout the highest turn whose generation has begun in a life: so many turns are done."""
    highest: dict[str, int] = {}
    if not log.exists():
        return highest
    for call in calls_of(read_rows(log)):
        if call.life == life:
            highest[call.rollout_id] = max(call.turn, highest.get(call.rollout_id, 0))
    return highest
