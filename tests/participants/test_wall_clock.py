"""No clock on the wall: neither in code, nor in a message, nor in an outcome."""

from __future__ import annotations

import ast
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gym_ckpt_grpc
from gymckpt import v1
from tests.participants.fakes import R1, R, S
from tests.participants.served_kinds import S1, WITH_RECORDS, restored, served, written

PACKAGE = Path(gym_ckpt_grpc.__file__).parent
ROOMS = ["participants", "capture", "control", "protocol"]
WALL = {"time", "time_ns", "localtime", "gmtime", "strftime", "now", "utcnow", "today", "fromtimestamp"}


@pytest.mark.behaviour("P39")
@pytest.mark.parametrize("room", ROOMS)
def test_no_module_of_these_rooms_reads_the_wall_clock(room: str) -> None:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                read = node.value.id in ("time", "datetime", "date") and node.attr in WALL
                assert not read, f"{path.name} line {node.lineno} reads {node.value.id}.{node.attr}"
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                names = {alias.name for alias in node.names}
                assert not names & WALL, f"{path.name} line {node.lineno} imports {names & WALL}"


@pytest.mark.behaviour("P39")
def test_no_message_has_an_instant() -> None:
    found = {name for name, message in messages() if "Timestamp" in set(kinds_of(message))}
    assert found == set()


def messages() -> Iterator[tuple[str, Any]]:
    for path in sorted((Path(v1.__path__[0])).glob("*_pb2.py")):
        file = importlib.import_module(f"gymckpt.v1.{path.stem}").DESCRIPTOR
        for name, message in file.message_types_by_name.items():
            yield f"{path.stem}.{name}", message


def kinds_of(message: Any) -> Iterator[str]:
    for each in message.fields:
        if each.message_type is not None:
            yield each.message_type.name
    for nested in message.nested_types:
        yield from kinds_of(nested)


@pytest.mark.behaviour("P39")
@pytest.mark.parametrize("step", [3600.0, -3600.0], ids=["forward", "back"])
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_a_clock_that_is_put_right_changes_no_outcome(
    name: str, step: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look of this package at the wall clock is an hour from the one before; gRPC itself needs the true one."""
    now, real = [time.time()], time.time

    def stepped() -> float:
        caller = sys._getframe(1)  # of the C code of gRPC, which has no frame, it is who called it
        ours = caller.f_globals["__name__"].startswith("gym_ckpt_grpc")
        if not ours or "time_remaining" in caller.f_code.co_names:
            return real()
        now[0] += step
        return now[0]

    monkeypatch.setattr(time, "time", stepped)
    await written(name, tmp_path, R, S)
    async with served(name, tmp_path) as kind:
        await restored(kind, R, S)
        assert await kind.pending() == {R1, S1}
        await kind.commit("second", R1)
        assert await kind.pending() == {R1}
