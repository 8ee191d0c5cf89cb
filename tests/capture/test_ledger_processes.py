"""Several real processes on one ledger directory, and one that is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.capture.ledger_child import RACED
from tests.capture.ledger_rig import ASK, R0, R1, admitted, calls, exported, made, said, user

ROOT = Path(__file__).parents[2]
RACED_WITHIN = 20.0
"""Seconds for two processes to append a row each."""


class Child:
    """A process that runs ledger_child.py; said(): its next line."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.capture.ledger_child", *map(str, arguments)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def said(self) -> Any:
        assert self.process.stdout is not None
        return orjson.loads(self.process.stdout.readline())

    def tell(self, *command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(orjson.dumps(command) + b"\n")
        self.process.stdin.flush()

    def ask(self, *command: str) -> Any:
        self.tell(*command)
        return self.said()

    def end(self) -> None:
        self.process.communicate(timeout=30)
        assert self.process.returncode == 0


@contextmanager
def children(*commands: tuple[object, ...]) -> Iterator[list[Child]]:
    started = [Child(*command) for command in commands]
    try:
        yield started
    finally:
        for child in started:
            child.process.kill()
            child.process.communicate()


@pytest.mark.behaviour("P247")
def test_a_kill_between_fence_and_unlink_leaves_the_attempt_refused(tmp_path: Path) -> None:
    with children(("killed", tmp_path)) as (child,):
        assert child.said() == "unlink"
        child.process.kill()
        child.process.wait()
    assert (tmp_path / "rows" / "r-a1.rows").stat().st_size > 0
    ledger = CaptureLedger(tmp_path)
    for episode in (R0, R1):
        assert ledger.admit(episode, "new", ASK) is None
        with pytest.raises(StaleAttempt):
            ledger.manifest(episode)
        with pytest.raises(StaleAttempt):
            ledger.export([episode])
    found = ledger.retire([R1])  # also frees the lock's holder and what was left
    assert (found.removed, found.absent) == ((R1,), ())
    assert list((tmp_path / "rows").iterdir()) == []


@pytest.mark.behaviour("P121", "P243")
def test_a_fence_is_visible_to_every_process_at_once(tmp_path: Path) -> None:
    """To one that has the attempt's rows in memory; and so are its deletion, and what is written then."""
    ledger = CaptureLedger(tmp_path)
    with children(("serve", tmp_path)) as (child,):
        assert child.said() == "ready"
        conversation = child.ask("talk", "r", "theirs")
        assert calls(ledger, R0) == ["theirs0", "theirs1"]
        assert child.ask("admit", "r", "before") is True
        ledger.retire([R0])
        assert child.ask("admit", "r", "fenced") is False
        assert child.ask("manifest", "r", "") == "STALE_ATTEMPT"
        ledger.delete(["r"])
        assert child.ask("manifest", "r", "") == []
        made(ledger, R0, "ours")
        assert child.ask("manifest", "r", "") == ["ours"]
        assert child.ask("talk", "r", "again") == conversation
        assert admitted(ledger, R0, "next", [*conversation[:2], user("q1"), said("a1")]).parent_id == "again1"
        child.end()


@pytest.mark.parametrize("count", [150])
def test_no_row_of_many_appending_processes_is_lost_or_torn(tmp_path: Path, count: int) -> None:
    names = ["a", "b", "c"]
    with children(*(("append", tmp_path, "r-a1", name, count) for name in names)) as started:
        assert [child.said() for child in started] == ["ready"] * len(names)
        for child in started:
            child.tell("go")
        for child in started:
            child.end()
    found = exported(CaptureLedger(tmp_path), R1)
    assert sorted(found) == sorted(f"{name}-{number}" for name in names for number in range(count))
    for name in names:
        mine = [call_id for call_id in found if call_id.startswith(name)]
        assert mine == [f"{name}-{number}" for number in range(count)]


def test_racing_appends_leave_nothing_behind_a_fence(tmp_path: Path) -> None:
    """Two processes append while this one reads, deletes and retires: no row but of live attempts is on disk."""
    ledger = CaptureLedger(tmp_path, sync_rows=False)
    with children(("race", tmp_path, "a"), ("race", tmp_path, "b")) as started:
        assert [child.said() for child in started] == ["ready"] * 2
        for child in started:
            child.tell("go")
        for number in range(RACED):
            episode = EpisodeId(f"x{number}")
            by = time.monotonic() + RACED_WITHIN
            while len(exported(ledger, episode)) < 2:  # the rows are those of other processes
                assert time.monotonic() < by, f"the children appended no two rows of {episode} in time"
            if number % 3 == 0:
                ledger.delete([episode.rollout_id])
            ledger.retire([episode])
        kept = [child.said() for child in started]
        for child in started:
            child.end()
    assert all(sum(len(each[f"x{number}"]) for each in kept) >= 2 for number in range(RACED))
    assert list((tmp_path / "rows").iterdir()) == []
    for number in range(RACED):
        with pytest.raises(StaleAttempt):
            ledger.manifest(EpisodeId(f"x{number}"))
