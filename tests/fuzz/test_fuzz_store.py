"""Changed files of checkpoints: read right or refused by type, without hanging, and in bounded memory.

GYM_CKPT_FUZZ_FILES: how many files. Each run is a process of its own, whose memory can be limited and measured; it
prints the seed and number of a case that fails: `python -m tests.fuzz.store_cases SEED 1 NUMBER` repeats it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.store_cases import IDS, Case, Corpus, check_case, make_case, read_all_ways

FILES = int(os.environ.get("GYM_CKPT_FUZZ_FILES", "1000"))
SOAK_FILES = int(os.environ.get("GYM_CKPT_FUZZ_FILES", "20000"))
REPOSITORY = Path(__file__).parents[2]


def try_cases(seed: str, count: int, patience: float) -> dict[str, int]:
    """Try the first cases of a seed in a process of its own; counts of what they came to."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.store_cases", seed, str(count)],
        cwd=REPOSITORY,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=patience,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.behaviour("C160", "C169", "C184")
@pytest.mark.timeout(300)
def test_changed_files_are_read_right_or_refused_by_type(rng: random.Random) -> None:
    found = try_cases(str(rng.randrange(2**32)), FILES, 280)
    # Not all refused at the first digest: some are read, and some pass.
    assert min(found[each] for each in ("right", "read", "StateCorrupt", "failed", "passed")) > FILES // 100


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.behaviour("C160", "C169")
def test_many_changed_files(rng: random.Random) -> None:
    seed = str(rng.randrange(2**32))
    print(f"seed {seed}", flush=True)
    try_cases(seed, SOAK_FILES, 3500)


def test_what_nobody_changed_passes() -> None:
    """The corpus is sound, or everything above would pass for the wrong reason."""
    corpus = Corpus("0")
    for name in IDS:
        case = Case(0, name, corpus.files.copy(), True, "nothing")
        assert read_all_ways(corpus, case) == ["right", "right", "passed"]


def test_the_same_number_makes_the_same_case() -> None:
    corpus = Corpus("0")
    for number in range(20):
        first, second = make_case(corpus, number), make_case(corpus, number)
        assert first.files.all_files() == second.files.all_files()
    assert make_case(Corpus("1"), 1).files.all_files() != make_case(corpus, 1).files.all_files()


def test_a_reader_that_takes_too_much_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Corpus("0")

    def greedy(*_: object) -> list[str]:
        bytearray(b"x" * (100 << 20))
        return []

    monkeypatch.setattr("tests.fuzz.store_cases.read_all_ways", greedy)
    with pytest.raises(AssertionError, match="are allowed"):
        check_case(corpus, make_case(corpus, 0))
