"""What every test shares: a random seed that is printed, and can be given again."""

from __future__ import annotations

import os
import random

import pytest

SEED_VARIABLE = "GYM_CKPT_TEST_SEED"


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run once, or take the given one."""
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**32)))


def pytest_report_header(config: pytest.Config) -> str:
    """Say how a run with random choices can be repeated."""
    return f"random seed: {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """A generator of its own for each test, from the run's seed and the test's name."""
    return random.Random(f"{os.environ[SEED_VARIABLE]} {request.node.nodeid}")
