"""What every test shares: a random seed that is printed and can be given again, and a net under its end."""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Generator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

SEED_VARIABLE = "GYM_CKPT_TEST_SEED"
TEARDOWN_LIMIT = 120.0
"""Seconds for what a test leaves to be taken down."""


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run once, or take the given one."""
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**32)))


def pytest_report_header(config: pytest.Config) -> str:
    """Say how a run with random choices can be repeated."""
    return f"random seed: {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """End the run, with a stack, if a test is never taken down.

    A test that fails with something under way that nothing lets go any more (a handler that outlives its cancel)
    makes the end of its event loop wait for ever, and its own time limit is spent by then.
    """
    stderr = item.config.stash.get(fault_handler_stderr_fd_key, 2)  # the true one, which pytest captures
    faulthandler.dump_traceback_later(TEARDOWN_LIMIT, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """A generator of its own for each test, from the run's seed and the test's name."""
    return random.Random(f"{os.environ[SEED_VARIABLE]} {request.node.nodeid}")
