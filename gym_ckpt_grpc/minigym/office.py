"""An office: five tables per session, which tools change, and which are written down column by column.

A column has one type for all its rows. A null (nothing was entered) and NaN (a measurement that gave nothing) are
different values, and so are the labels 3 and "3". What the tables hold after a restore is exactly what they held.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

ColumnType = Literal["text", "integer", "number", "flag"]
Value = None | str | int | float | bool
Label = int | str

SCHEMA_VERSION = 1
SCHEMA: Final[Mapping[str, Mapping[str, ColumnType]]] = {
    "email": {"to": "text", "subject": "text", "urgent": "flag"},
    "calendar": {"title": "text", "day": "integer", "hours": "number"},
    "analytics": {"visitor": "text", "pages": "integer", "engagement": "number"},
    "projects": {"task": "text", "state": "text", "estimate": "number"},
    "customers": {"name": "text", "status": "text", "value": "number"},
}
"""Table -> column -> type."""

_TYPES: Mapping[ColumnType, type] = {"text": str, "integer": int, "number": float, "flag": bool}


class Table:
    """Rows under unique labels, kept by column. A label is an integer or a text.

    columns: name -> type. Raises ValueError, naming the column, for a value of another type.
    """

    def __init__(self, columns: Mapping[str, ColumnType]) -> None:
        self.types = dict(columns)
        self.index: list[Label] = []
        self.columns: dict[str, list[Value]] = {name: [] for name in columns}

    def __len__(self) -> int:
        return len(self.index)

    def append(self, row: Mapping[str, Value]) -> Label:
        """Add a row under the next free integer label, and give the label; columns left out are null."""
        label = 1 + max((each for each in self.index if isinstance(each, int)), default=-1)
        self.put(label, row)
        return label

    def put(self, label: Label, row: Mapping[str, Value]) -> None:
        """Set the row of a label, at the end if it is new. Raises ValueError for an unknown column."""
        if unknown := set(row) - set(self.types):
            raise ValueError(f"there is no column {', '.join(sorted(unknown))}")
        checked = {name: _checked(name, kind, row.get(name)) for name, kind in self.types.items()}
        if type(label) not in (int, str):
            raise ValueError(f"label {label!r} is neither an integer nor a text")
        if label in self.index:
            at = self.index.index(label)
            for name, value in checked.items():
                self.columns[name][at] = value
        else:
            self.index.append(label)
            for name, value in checked.items():
                self.columns[name].append(value)

    def row(self, label: Label) -> dict[str, Value]:
        """The row of a label. Raises ValueError if there is none."""
        at = self.index.index(label)
        return {name: values[at] for name, values in self.columns.items()}

    def remove(self, label: Label) -> None:
        """Delete a row; the others keep their labels. Raises ValueError if there is none."""
        at = self.index.index(label)
        del self.index[at]
        for values in self.columns.values():
            del values[at]

    def find(self, column: str, wanted: Callable[[Value], bool]) -> Label | None:
        """The label of the first row whose value in `column` is wanted, or None."""
        pairs = zip(self.index, self.columns[column], strict=True)
        return next((label for label, value in pairs if wanted(value)), None)

    def export(self) -> dict[str, Any]:
        """Index and columns as strict JSON: NaN stands as null in `values`, and its places in `nan`."""
        columns = []
        for name, kind in self.types.items():
            values = self.columns[name]
            # NaN is the only value that differs from itself.
            nan = [at for at, value in enumerate(values) if value != value]
            kept = list(values)
            for at in nan:
                kept[at] = None
            columns.append({"name": name, "type": kind, "values": kept, "nan": nan})
        return {"index": list(self.index), "columns": columns}

    @classmethod
    def from_state(cls, state: object, types: Mapping[str, ColumnType]) -> Table:
        """Rebuild a table of exactly these columns. Raises ValueError naming what is wrong."""
        if not isinstance(state, Mapping) or set(state) != {"index", "columns"}:
            raise ValueError("does not have exactly index and columns")
        index, columns = state["index"], state["columns"]
        if not isinstance(index, list) or any(type(label) not in (int, str) for label in index):
            raise ValueError("has an index that is no list of integers and texts")
        if len(set(index)) != len(index):
            raise ValueError("has a label twice")
        if not isinstance(columns, list) or not all(isinstance(each, Mapping) for each in columns):
            raise ValueError("has columns that are no list of columns")
        if [each.get("name") for each in columns] != list(types):
            raise ValueError(f"does not have exactly the columns {', '.join(types)}")
        table = cls(types)
        table.index = list(index)
        for column, (name, kind) in zip(columns, types.items(), strict=True):
            table.columns[name] = _column(column, name, kind, len(index))
        return table


def _column(column: Mapping[str, Any], name: str, kind: ColumnType, length: int) -> list[Value]:
    if set(column) != {"name", "type", "values", "nan"} or column["type"] != kind:
        raise ValueError(f"column {name} does not have exactly name, type {kind}, values and nan")
    values, nan = column["values"], column["nan"]
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"column {name} is not as long as the index, which has {length} labels")
    places = set(nan) if isinstance(nan, list) and all(type(at) is int for at in nan) else None
    if places is None or len(places) != len(nan) or not places <= set(range(length)) or (nan and kind != "number"):
        raise ValueError(f"column {name} has places of NaN that cannot be")
    if any(values[at] is not None for at in places):
        raise ValueError(f"column {name} has a value where it has NaN")
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise ValueError(f"column {name} has a number that is not finite")
    checked = [_checked(name, kind, value) for value in values]
    return [math.nan if at in places else value for at, value in enumerate(checked)]


def _checked(name: str, kind: ColumnType, value: Value) -> Value:
    if value is not None and type(value) is not _TYPES[kind]:
        raise ValueError(f"column {name} takes {kind}, not {value!r:.80}")
    if isinstance(value, float) and math.isinf(value):
        raise ValueError(f"column {name} takes no infinite number")
    return value


@dataclass(slots=True)
class Office:
    """The tables of one session, by name."""

    tables: dict[str, Table] = field(default_factory=lambda: {name: Table(SCHEMA[name]) for name in SCHEMA})

    @classmethod
    def furnished(cls, seed: int) -> Office:
        """An office with some rows, made from `seed` alone; nulls, NaN and labels of both kinds among them."""
        rng, office = random.Random(f"office {seed}"), cls()
        for name in rng.sample(PEOPLE, 3):
            office["email"].append({"to": name, "subject": f"about {rng.choice(TOPICS)}", "urgent": None})
            office["customers"].put(
                f"{name}-{rng.randrange(10)}",
                {"name": name, "status": "lead", "value": rng.choice([None, math.nan, rng.randrange(1000) / 4])},
            )
        for day in rng.sample(range(1, 6), 2):
            office["calendar"].append({"title": rng.choice(TOPICS), "day": day, "hours": rng.choice([None, 1.5])})
        for visitor in rng.sample(PEOPLE, 2):
            office["analytics"].append({"visitor": visitor, "pages": rng.randrange(9), "engagement": math.nan})
        for number in range(4):
            estimate = rng.choice([None, math.nan, float(rng.randrange(1, 9))])
            office["projects"].put(f"P{number}", {"task": TOPICS[number], "state": "open", "estimate": estimate})
        return office

    def __getitem__(self, name: str) -> Table:
        return self.tables[name]

    def export(self) -> dict[str, Any]:
        """The state as strict JSON, apart from this object."""
        return {"version": SCHEMA_VERSION, "tables": {name: table.export() for name, table in self.tables.items()}}

    @classmethod
    def from_state(cls, state: object) -> Office:
        """Rebuild an office of exactly the five tables. Raises ValueError naming the table and what is wrong."""
        if not isinstance(state, Mapping) or set(state) != {"version", "tables"}:
            raise ValueError("state does not have exactly the fields version, tables")
        if state["version"] != SCHEMA_VERSION:
            raise ValueError(f"version is {state['version']!r}, not {SCHEMA_VERSION}")
        tables = state["tables"]
        if not isinstance(tables, Mapping):
            raise ValueError("tables is no object")
        for problem, names in (("is missing", set(SCHEMA) - set(tables)), ("is unknown", set(tables) - set(SCHEMA))):
            if names:
                raise ValueError(f"table {sorted(names)[0]} {problem}")
        made = {}
        for name, types in SCHEMA.items():
            try:
                made[name] = Table.from_state(tables[name], types)
            except ValueError as error:
                raise ValueError(f"table {name} {error}") from None
        return cls(made)

    def points(self) -> int:
        """What was achieved: urgent mails sent, events of a known length, visits, finished tasks, won customers."""
        counted: Sequence[tuple[str, str, Callable[[Value], bool]]] = (
            ("email", "urgent", lambda value: value is True),
            ("calendar", "hours", lambda value: value is not None),
            ("analytics", "engagement", lambda value: isinstance(value, float) and value >= 0),
            ("projects", "state", lambda value: value == "done"),
            ("customers", "status", lambda value: value == "won"),
        )
        return sum(sum(map(wanted, self[table].columns[column])) for table, column, wanted in counted)


PEOPLE = ("ada", "ben", "cleo", "dan", "eve")
TOPICS = ("budget", "hiring", "launch", "office", "travel")
