"""Records of every kind: strict both ways, migrated step by step, without a wall-clock instant."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gym_ckpt_grpc
from gym_ckpt_grpc.control import HookFailed
from gym_ckpt_grpc.participants import records
from gym_ckpt_grpc.participants.records import AgentRecord, EnvironmentRecord, ResourcesRecord
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.storage import Record, encode
from gymckpt import v1
from tests.participants.fakes import R1, R, S
from tests.participants.kinds import KINDS
from tests.participants.served_kinds import S1, WITH_RECORDS, export_these, restored, served, written

PACKAGE = Path(gym_ckpt_grpc.__file__).parent
AnyRecord = type[EnvironmentRecord] | type[AgentRecord] | type[ResourcesRecord]


def made(kind: AnyRecord, state: Any) -> Record:
    """A record whose author's state is `state`."""
    if kind is EnvironmentRecord:
        return EnvironmentRecord(R, "digest", {"a": "digest"}, state).to_record()
    if kind is AgentRecord:
        return AgentRecord(R, "key", state, {"turn": 1}).to_record()
    return ResourcesRecord(R, "session", state).to_record()


def state_of(kind: AnyRecord, record: Record) -> Any:
    found = kind.from_record(record)
    if isinstance(found, EnvironmentRecord):
        return found.boundary
    return found.session if isinstance(found, AgentRecord) else found.state


@pytest.mark.behaviour("P18")
@pytest.mark.parametrize("kind", [EnvironmentRecord, AgentRecord, ResourcesRecord])
class TestPayloads:
    def test_what_survives_a_round_trip(self, kind: AnyRecord) -> None:
        state = {"z": 2**200, "a": [-(2**64), 1.5, None, True], "m": {"y": 1, "b": 2}}
        back = state_of(kind, made(kind, state))
        assert back == state
        assert (list(back), list(back["m"]), type(back["z"])) == (["z", "a", "m"], ["y", "b"], int)

    @pytest.mark.parametrize(
        ("state", "path"),
        [
            ({"a": [{"b": {1: 2}}]}, "a[0].b"),
            ({"a": {"b": object()}}, "a.b"),
            ({"a": [(1, 2)]}, "a[0]"),
            ({"a": {"b": {3}}}, "a.b"),
        ],
        ids=["key", "object", "tuple", "set"],
    )
    def test_what_is_no_json_is_refused_naming_its_path(self, kind: AnyRecord, state: Any, path: str) -> None:
        with pytest.raises(HookFailed, match=re.escape(path)) as caught:
            made(kind, state)
        assert caught.value.episode == R


# ---- no clock on the wall ------------------------------------------------------------------------------------

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


# ---- versions ------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P17")
@pytest.mark.parametrize("name", WITH_RECORDS)
@pytest.mark.parametrize("change", ["field", "payload", "newer", "schema"])
async def test_an_unknown_part_or_a_newer_version_is_corrupt(name: str, change: str, tmp_path: Path) -> None:
    """And names the episode; nothing is installed, of the good record before it neither."""
    good, bad = await KINDS[name]().records(R, S)
    changed = {
        "field": replace(bad, fields={**bad.fields, "novel": 1}),
        "payload": replace(bad, payloads={**bad.payloads, "novel": encode(1)}),
        "newer": replace(bad, schema_version=records.VERSION + 1),
        "schema": replace(bad, schema="gymckpt.other"),
    }[change]
    async with served(name, tmp_path) as kind:
        export_these(kind.owner, [good, changed])
        await kind.commit("source", R, S)
    async with served(name, tmp_path) as kind:
        with pytest.raises(StateCorrupt, match=str(records.VERSION + 1) if change == "newer" else None) as caught:
            await kind.p.client.restore("restore", [R, S], source="source")
        assert (caught.value.episodes, await kind.pending()) == ((bad.episode,), set())


@pytest.mark.behaviour("P17")
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_each_older_version_is_brought_here_step_by_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two invented later versions: one moved a field into a payload, the next changed nothing of this kind."""
    (today,) = await KINDS[name]().records(R)
    moved = next(iter(today.fields))
    first = records.VERSION
    fields = {field: value for field, value in today.fields.items() if field != moved}
    old = replace(today, fields=fields, payloads={**today.payloads, "moved": encode(today.fields[moved])})

    def step(record: Record) -> Record:
        assert record.schema_version == first
        payloads = {part: value for part, value in record.payloads.items() if part != "moved"}
        return replace(record, fields={**record.fields, moved: record.decode("moved")}, payloads=payloads)

    monkeypatch.setattr(records, "VERSION", first + 2)
    monkeypatch.setitem(records.MIGRATIONS, (today.schema, first), step)
    for version, record in ((first, old), (first + 1, today), (first + 2, today)):
        root = tmp_path / str(version)
        root.mkdir()
        async with served(name, root) as kind:
            export_these(kind.owner, [replace(record, schema_version=version)])
            await kind.commit("source", R)
        async with served(name, root) as kind:
            await restored(kind, R)
            assert await kind.pending() == {R1}
