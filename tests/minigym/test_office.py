"""The office: five tables per session that a restore gives back as they were, or not at all."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.minigym.office import SCHEMA, Office, Table
from gym_ckpt_grpc.minigym.office_server import OfficeServer
from gym_ckpt_grpc.minigym.resources_server import built_aside
from gym_ckpt_grpc.participants import RestoredState
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from tests.minigym.gated import Gated, life, plays
from tests.participants.fakes import R1, R, S

SETUP = {"seed": 3, "goal": 8}
KINDS = {"name": "text", "count": "integer", "rate": "number", "good": "flag"}


def cells(table: Table) -> list[Any]:
    """Labels and values with their types; NaN, which equals nothing, by its text."""
    return [
        (type(label), label, [(name, type(value), str(value)) for name, value in table.row(label).items()])
        for label in table.index
    ]


def stored(value: Any) -> Any:
    """As it comes back from a file of strict JSON."""
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.behaviour("P329")
def test_null_and_nan_column_types_and_labels_survive() -> None:
    table = Table(KINDS)  # type: ignore[arg-type]
    table.put(3, {"name": "x", "count": 2**70, "rate": math.nan, "good": True})
    table.put("3", {"name": None, "count": None, "rate": None, "good": False})
    table.put("last", {"name": "nan", "count": 0, "rate": 2.0, "good": None})
    table.append({"rate": -0.0})
    back = Table.from_state(stored(table.export()), KINDS)  # type: ignore[arg-type]
    assert cells(back) == cells(table)
    assert (back.types, back.index) == (KINDS, [3, "3", "last", 4])
    assert math.isnan(back.columns["rate"][0]) is True  # type: ignore[arg-type]
    assert back.columns["rate"][1] is None
    assert math.copysign(1, back.columns["rate"][3]) == -1  # type: ignore[arg-type]


@pytest.mark.behaviour("P329")
async def test_appending_by_label_works_after_a_restore(tmp_path: Path) -> None:
    """The next free label, a named one, and one that is there: as in the office that nothing interrupted."""
    twin, server = OfficeServer(), OfficeServer()
    calls = plays(twin.tools, 12, 7)
    twin.open("k", SETUP)
    async with life(server, tmp_path) as (gated, client):
        await gated.seed(SETUP)
        for name, arguments in calls:
            assert (await gated.post(f"/{name}", arguments)).json() == twin.call("k", name, arguments)
        await client.prepare("c")
        await client.commit("c", [R])
    restored = OfficeServer()
    async with life(restored, tmp_path) as (_, client):
        await client.restore("r", [R], source="c")
        await client.resume("r")
        offices = [each._offices["k"] for each in (twin, restored)]
        for name in SCHEMA:
            assert cells(offices[1][name]) == cells(offices[0][name])
        for office in offices:
            office["email"].append({"to": "eve"})
            office["projects"].put("P9", {"task": "new"})
            office["projects"].put("P1", {"estimate": math.nan})
        assert offices[1].export() == offices[0].export()
        assert offices[1]["email"].index[-1] == max(each for each in offices[0]["email"].index if isinstance(each, int))


def test_labels_of_deleted_rows_are_not_renumbered() -> None:
    table = Table(SCHEMA["email"])
    for _ in range(4):
        table.append({})
    table.remove(1)
    assert (table.index, Table.from_state(stored(table.export()), SCHEMA["email"]).append({})) == ([0, 2, 3], 4)


def state(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """An office's state with one thing wrong."""
    made: dict[str, Any] = stored(Office.furnished(1).export())
    change(made)
    return made


def column(made: dict[str, Any], table: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = made["tables"][table]["columns"][number]
    return found


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a missing table": (lambda made: made["tables"].pop("calendar"), "table calendar is missing"),
    "an extra table": (lambda made: made["tables"].update(more={}), "table more is unknown"),
    "a short column": (lambda made: column(made, "email", 1)["values"].pop(), "table email column subject is not as"),
    "a long column": (lambda made: column(made, "email", 0)["values"].append("x"), "table email column to is not as"),
    "a missing column": (
        lambda made: made["tables"]["email"]["columns"].pop(),
        "table email does not have exactly the",
    ),
    "columns in another order": (
        lambda made: made["tables"]["email"]["columns"].reverse(),
        "table email does not have exactly the columns",
    ),
    "another type": (lambda made: column(made, "analytics", 1).update(type="number"), "table analytics column pages"),
    "a value of another type": (
        lambda made: column(made, "calendar", 1)["values"].__setitem__(0, "1"),
        "table calendar column day takes integer, not '1'",
    ),
    "true for a number": (
        lambda made: column(made, "calendar", 1)["values"].__setitem__(0, True),
        "table calendar column day takes integer, not True",
    ),
    "NaN out of place": (
        lambda made: column(made, "analytics", 2)["nan"].append(99),
        "table analytics column engagement has places of NaN",
    ),
    "NaN in a text": (
        lambda made: column(made, "email", 0)["nan"].append(0),
        "table email column to has places of NaN",
    ),
    "NaN over a value": (
        lambda made: column(made, "analytics", 2)["values"].__setitem__(0, 1.5),
        "table analytics column engagement has a value where",
    ),
    "a raw NaN": (
        lambda made: (
            column(made, "analytics", 2).update(nan=[]),
            column(made, "analytics", 2)["values"].__setitem__(0, math.nan),
        ),
        "table analytics column engagement has a number that is not finite",
    ),
    "a label twice": (
        lambda made: made["tables"]["projects"]["index"].__setitem__(1, "P0"),
        "table projects has a label twice",
    ),
    "a label of another type": (
        lambda made: made["tables"]["projects"]["index"].__setitem__(1, 1.0),
        "table projects has an index",
    ),
    "another version": (lambda made: made.update(version=2), "version is 2"),
    "an extra field": (lambda made: made.update(more=1), "state does not have exactly"),
}


@pytest.mark.behaviour("P330")
@pytest.mark.parametrize("fault", BAD)
async def test_bad_tables_are_refused_naming_session_and_table_and_nothing_is_installed(fault: str) -> None:
    """With good sessions before and behind the bad one."""
    change, problem = BAD[fault]
    good, server = Office.furnished(2).export(), OfficeServer()
    with pytest.raises(InvalidState, match=f"session bad: {problem}") as caught:
        await server.restore_sessions(
            [
                RestoredState("first", R1, good),
                RestoredState("bad", S, state(change)),
                RestoredState("last", R1, good),
            ]
        )
    assert (caught.value.episode, server._offices) == (S, {})


@pytest.mark.behaviour("P330")
async def test_over_the_wire_it_is_state_corrupt(tmp_path: Path) -> None:
    server = OfficeServer()
    async with life(server, tmp_path) as (gated, client):
        await gated.seed(SETUP)
        await gated.seed(SETUP, "other", S)
        del server._offices["other"].tables["customers"]
        await client.prepare("c")
        await client.commit("c", [R, S])
    restored = OfficeServer()
    async with life(restored, tmp_path) as (gated, client):
        with pytest.raises(StateCorrupt, match="session other: table customers is missing") as caught:
            await client.restore("r", [R, S], source="c")
        assert (caught.value.episodes, restored._offices, gated.tracked) == ((S,), {}, 0)


@pytest.mark.behaviour("P330")
async def test_tables_are_rebuilt_in_a_thread_before_any_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    server, seen = OfficeServer(), []

    def watched(*arguments: Any) -> Any:
        made = built_aside(*arguments)
        seen.append((threading.current_thread() is threading.main_thread(), len(made), len(server._offices)))
        return made

    monkeypatch.setattr("gym_ckpt_grpc.minigym.office_server.built_aside", watched)
    exported = Office.furnished(2).export()
    await server.restore_sessions([RestoredState(name, R1, exported) for name in ("a", "b")])
    assert (seen, set(server._offices)) == ([(False, 2, 0)], {"a", "b"})


async def test_verify_discards_the_session() -> None:
    gated = Gated(OfficeServer())
    await gated.seed(SETUP)
    await gated.post("/send_email", {"to": "ada"})
    verified = (await gated.post("/verify", SETUP)).json()
    assert (verified["reward"] > 0, len(verified["state"]["tables"])) == (True, 5)
    assert (gated.tracked, (await gated.post("/send_email", {"to": "ada"})).status) == (0, 404)


async def test_an_export_is_apart_from_the_office() -> None:
    server = OfficeServer()
    server.open("k", SETUP)
    exported = (await server.export_sessions(["k", "gone"]))["k"]
    kept = copy.deepcopy(exported)
    for name, arguments in plays(server.tools, 20, 1):
        server.call("k", name, arguments)
    assert exported == kept


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("send_email", {"to": "nobody"}), ("send_email", {}), ("log_visit", {"pages": True}), ("fire", {"who": "ada"})],
)
def test_bad_calls_change_nothing(tool: str, arguments: dict[str, Any]) -> None:
    server = OfficeServer()
    server.open("k", SETUP)
    before = server._offices["k"].export()
    with pytest.raises(ValueError, match=r"no tool|not one of"):
        server.call("k", tool, arguments)
    assert server._offices["k"].export() == before


@pytest.mark.parametrize(
    ("row", "problem"), [({"rate": math.inf}, "infinite"), ({"count": 1.0}, "takes integer"), ({"x": 1}, "no column x")]
)
def test_a_table_takes_only_what_its_columns_hold(row: dict[str, Any], problem: str) -> None:
    table = Table(KINDS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=problem):
        table.append(row)
    assert len(table) == 0


def test_an_office_follows_from_its_seed() -> None:
    assert Office.furnished(1).export() == Office.furnished(1).export() != Office.furnished(2).export()
    assert any(each["nan"] for each in Office.furnished(1).export()["tables"]["analytics"]["columns"])
