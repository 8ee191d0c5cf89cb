"""Random sequences of starts, releases, checkpoints, retires and crashes on real processes.

GYM_CKPT_TEST_SEED=7 make test ARGS="tests/e2e/test_random_real.py"     # the sequences of a failed run again
GYM_CKPT_TEST_SEQUENCES=100 make soak                                   # how many `make soak` runs
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.conftest import SEED_VARIABLE
from tests.e2e.random_world import World
from tests.e2e.rig import COUNTER, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

IN_CI = 4
IN_SOAK = int(os.environ.get("GYM_CKPT_TEST_SEQUENCES", "100"))
OPERATIONS = 10


@pytest.mark.behaviour("E37", "E38", "E39", "E40", "R15", "R16", "R17", "R18", "R19", "R20")
@pytest.mark.parametrize(
    "number", [*range(IN_CI), *(pytest.param(n, marks=pytest.mark.soak) for n in range(IN_CI, IN_SOAK))]
)
async def test_a_random_sequence_costs_nothing_that_was_done(number: int, tmp_path: Path) -> None:
    """No failure that the controller did not cause, every reward 1.0, nothing repeated, everything empty at the end."""
    seed = f"{os.environ[SEED_VARIABLE]}-{number}"
    print(f"sequence {seed}:", end=" ")
    async with rig(tmp_path, COUNTER) as gym:
        world = World(gym, random.Random(seed))
        await world.run(OPERATIONS)
        await world.check()
