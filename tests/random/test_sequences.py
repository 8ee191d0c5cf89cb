"""Random sequences on one participant in this process, every invariant after every step.

A failing seed prints itself and the shortest list of operations that still fails; give that list to `run_ops`.
GYM_CKPT_RANDOM_SEEDS sets how many seeds run, GYM_CKPT_RANDOM_FIRST the first of them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.random.ops import Op
from tests.random.sequences import explain, run_ops, run_seed, shrink

SEEDS = int(os.environ.get("GYM_CKPT_RANDOM_SEEDS", "440"))
FIRST = int(os.environ.get("GYM_CKPT_RANDOM_FIRST", "0"))
SOAK_SEEDS = 5000
PARTS = 10
LIMIT = 60.0
"""Seconds that one sequence may take (R12)."""
SHARES = {
    "scripted": 16,
    "resources": 5,
    "environment": 4,
    "agent": 4,
    "served": 1,
    "policy": 8,
    "legacy": 3,
    "replayed": 1,
    "stateless": 1,
    "restart_only": 1,
}
"""Of 44 seeds: how many run which server, and how many over gRPC."""

EVERY = pytest.mark.behaviour("R1", "R3", "R4", "R5", "R6", "R7", "R8", "R9", "R10", "R11", "R12", "R13", "R14")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hooks fail by the thousand here; their incidents would fill the memory of the log capture."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def subject_of(seed: int) -> tuple[str, bool]:
    """Which server a seed runs, and whether over gRPC."""
    at = seed % sum(SHARES.values())
    for name, share in SHARES.items():
        if at < share:
            return ("scripted", True) if name == "served" else (name, False)
        at -= share
    raise AssertionError("every seed has its share")


def check_seed(seed: int, root: Path) -> None:
    """Run one seed; on failure shrink it and say how to see it again."""
    kind, served = subject_of(seed)
    began = time.monotonic()
    outcome = run_seed(seed, kind, root, served=served)
    assert time.monotonic() - began < LIMIT, f"R12: seed {seed} took {time.monotonic() - began:.0f} s"
    if outcome.error is None:
        return
    first = str(outcome.error)[:20]

    def fails(ops: Sequence[Op]) -> bool:
        error = run_ops(ops, kind, root, served=served).error
        return error is not None and str(error)[:20] == first

    shortest = outcome.ops if served else shrink(outcome.ops, fails)
    error = run_ops(shortest, kind, root, served=served).error
    pytest.fail(explain(seed, kind, outcome, shortest, error), pytrace=False)


@EVERY
@pytest.mark.parametrize("part", range(PARTS))
def test_random_sequences(part: int, tmp_path: Path) -> None:
    for seed in range(FIRST + part, FIRST + SEEDS, PARTS):
        check_seed(seed, tmp_path)


@EVERY
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_sequences(part: int, tmp_path: Path) -> None:
    for seed in range(100_000 + part, 100_000 + SOAK_SEEDS, PARTS):
        check_seed(seed, tmp_path)
