"""What telemetry is told in random sequences: calls cut short, hooks and writes that hang or fail, expired leases."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_ckpt_grpc.telemetry import catalogue, emitting
from tests.random.sequences import run_seed
from tests.telemetry.kept import Kept, short

SEEDS = (*range(16), 60, 74, 94, 96, 101, 106, 119, 123)
"""The last ones cut work off."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hooks fail by the dozen here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.behaviour("C307", "C310")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_span_ends_once_and_each_success_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """None is left open, none has an attribute that is not declared, no checkpoint succeeds twice."""
    kept = Kept()
    monkeypatch.setattr(emitting, "_default", kept.telemetry)
    outcome = run_seed(seed, "scripted", tmp_path)
    assert outcome.error is None, outcome.error
    kept.all_ended()
    kept.check_declared()
    for span in (catalogue.COMMIT, catalogue.RESTORE, catalogue.LEASE_REOPEN):  # resumes reach fresh processes too
        told = [short(ended.attributes) for ended in kept.of(span)]
        successes = Counter(each["id"] for each in told if each["outcome"] == "ok" and "replayed" not in each)
        assert not successes or max(successes.values()) == 1, span.name
    expiries = kept.value(catalogue.EVENTS_TOTAL, event="lease_expired")
    assert expiries == len([s for s in kept.of(catalogue.LEASE_REOPEN) if s.status.is_unset])
