"""Tables come back as they were: dtypes, what is missing and how, index labels, the order of columns."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_ckpt_grpc.integrations.nemo_gym.hooks.tables import TableReader, TableWriter
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import StateRefused
from gym_ckpt_grpc.storage import decode, encode
from tests.nemo_gym.shown_table import shown_table

TEXTS = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
CELLS = (
    JSON
    | st.sampled_from([pd.NA, pd.NaT, math.nan, -0.0, np.float64("nan"), np.float64(1.5), np.int32(-3), np.bool_(True)])
    | st.tuples(JSON, JSON)
    | st.binary(max_size=3)
)
MISSING = {"str": math.nan, "string": pd.NA}


@st.composite
def arrays(draw: st.DrawFn, size: int, *, plain: bool = False) -> Any:
    """Values of a column or, with `plain`, of an index, of some dtype."""

    def values(of: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=size, max_size=size))

    kinds = ["object", "int64", "uint8", "float64", "float32", "bool", "datetime64", "timedelta64", "str", "category"]
    kind = draw(st.sampled_from(kinds))
    if kind == "object":
        cells = np.empty(size, dtype=object)
        for at, value in enumerate(values(TEXTS | st.integers() | st.none() if plain else CELLS)):
            cells[at] = value
        return cells
    if kind in ("datetime64", "timedelta64"):
        unit = draw(st.sampled_from(["s", "ms", "us", "ns"]))
        return (
            np.array(values(st.integers(-(2**62), 2**62) | st.just(-(2**63)))).astype("int64").view(f"{kind}[{unit}]")
        )
    if kind == "str":
        missing = draw(st.sampled_from(["str", "string"]))
        storage = draw(st.sampled_from(["python", "pyarrow"]))
        dtype = pd.StringDtype(storage, na_value=MISSING[missing])
        return pd.array(values(TEXTS | st.none()), dtype=dtype)
    if kind == "category":
        categories = draw(st.lists(TEXTS, min_size=1, max_size=3, unique=True))
        codes = values(st.integers(-1, len(categories) - 1))
        return pd.Categorical.from_codes(codes, categories, ordered=draw(st.booleans()))
    of: st.SearchStrategy[Any] = {
        "int64": st.integers(-(2**63), 2**63 - 1),
        "uint8": st.integers(0, 255),
        "float64": st.floats(),
        "float32": st.floats(width=32),
        "bool": st.booleans(),
    }[kind]
    return np.array(values(of), dtype=kind)


@st.composite
def indexes(draw: st.DrawFn, size: int) -> Any:
    name = draw(st.none() | TEXTS | st.integers())
    if draw(st.booleans()):
        start, step = draw(st.integers(-5, 5)), draw(st.sampled_from([1, 2, -1]))
        return pd.RangeIndex(start, start + size * step, step, name=name)
    array = draw(arrays(size, plain=True))
    dtype = array.dtype
    return pd.Index(array, dtype=dtype, name=name)


@st.composite
def tables(draw: st.DrawFn) -> Any:
    height, width = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    index = draw(indexes(height))
    columns = {
        at: pd.Series(array, index=index, dtype=array.dtype) for at in range(width) for array in [draw(arrays(height))]
    }
    table = pd.DataFrame(columns, index=index)
    table.columns = draw(indexes(width))
    table.attrs = draw(st.dictionaries(TEXTS, JSON, max_size=1))
    return table


def through_storage(table: Any) -> Any:
    return TableReader().read_table(decode(encode(TableWriter().write_table(table))))


@given(tables())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_table_comes_back_exactly(table: Any) -> None:
    before = shown_table(table)
    back = through_storage(table)
    assert shown_table(back) == before
    assert shown_table(table) == before


def people() -> Any:
    table = pd.DataFrame({"name": ["a", None, "c"], "phone": pd.Series([None, math.nan, 5], dtype=object)})
    table["seconds"] = [4.0, -0.0, math.nan]
    return table


def test_none_stays_apart_from_nan() -> None:
    back = through_storage(people())
    first, second, third = back["phone"].tolist()
    assert (first, third) == (None, 5)
    assert math.isnan(second)
    assert str(back["name"].dtype) == "str"
    assert math.copysign(1, back["seconds"][1]) == -1


def test_labels_stay_after_a_row_was_deleted_and_one_was_appended() -> None:
    table = people()
    table = pd.concat([table[table["name"] != "a"], pd.DataFrame({"name": ["d"], "phone": [1], "seconds": [0.0]})])
    back = through_storage(table)
    assert list(back.index) == [1, 2, 0] == list(table.index)
    table.loc[1, "seconds"] = back.loc[1, "seconds"] = 9.0
    assert shown_table(back) == shown_table(table)


def test_a_duplicate_label_names_both_rows_again() -> None:
    table = pd.concat([people(), people().iloc[:1]])
    back = through_storage(table)
    assert len(back.loc[0]) == 2
    assert type(back.index) is type(table.index) is pd.Index


def test_columns_of_one_label_stay_two() -> None:
    table = pd.DataFrame([[1, "x"]])
    table.columns = ["a", "a"]
    back = through_storage(table)
    assert list(back.columns) == ["a", "a"]
    assert back.iloc[0].tolist() == [1, "x"]


def test_what_is_written_shares_nothing_with_the_table() -> None:
    notes = ["l", {"k": 1}]
    table = pd.DataFrame({"notes": pd.Series([notes, "x"], dtype=object), "n": [1, 2]})
    written = TableWriter().write_table(table)
    kept = copy.deepcopy(written)
    notes.append("more")
    table.loc[0, "n"] = 7
    assert written == kept
    TableReader().read_table(written)["notes"][0].append("more")
    assert written == kept


def test_a_cell_in_two_tables_is_one_object_again() -> None:
    notes = ["l"]
    one = pd.DataFrame({"notes": pd.Series([notes], dtype=object)})
    writer, reader = TableWriter(), TableReader()
    written = [writer.write_table(one), writer.write_table(one.copy())]
    first, second = (reader.read_table(each) for each in decode(encode(written)))
    assert first["notes"][0] is second["notes"][0]


def test_no_duplicate_labels_stays_forbidden() -> None:
    table = people().set_flags(allows_duplicate_labels=False)
    assert through_storage(table).flags.allows_duplicate_labels is False


@pytest.mark.parametrize(
    ("table", "where"),
    [
        (pd.Series([1]), "is Series, not a DataFrame"),
        (pd.DataFrame({"a": pd.Series([pd.Timestamp("2024-01-01")], dtype=object)}), "['a'][0] is of type"),
        (pd.DataFrame({"when": pd.to_datetime(["2024-01-01"], utc=True)}), "['when'] has dtype datetime64"),
        (pd.DataFrame({"n": pd.array([1, None], dtype="Int64")}), "['n'] has dtype Int64"),
        (pd.DataFrame({"n": np.array([1], dtype=">i8")}), "['n'] has dtype"),
        (pd.DataFrame({"a": [1]}, index=pd.MultiIndex.from_tuples([("x", 1)])), ".index is a MultiIndex"),
        (pd.DataFrame({"a": [1]}, index=pd.date_range("2024-01-01", periods=1)), ".index is a DatetimeIndex"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(table: Any, where: str) -> None:
    with pytest.raises(StateRefused) as refused:
        TableWriter().write_table(table)
    assert where in str(refused.value)


def _damaged(place: str, value: Any) -> dict[str, Any]:
    record: dict[str, Any] = TableWriter().write_table(people())
    *outer, last = place.split(".")
    at: Any = record
    for step in outer:
        at = at[int(step)] if step.isdigit() else at[step]
    if last.isdigit():
        at[int(last)] = value
    else:
        at[last] = value
    return record


@pytest.mark.parametrize(
    ("place", "value", "where"),
    [
        ("columns.0.values.1", 7, "['name'] has values that are neither text nor missing"),
        ("columns.0.values.1", 1.5, "['name'] has values that are neither text nor missing"),
        ("columns.0.values.1", None, "['name'] has values that are neither text nor missing"),
        ("columns.0.storage", "csv", "['name'] has an unknown storage"),
        ("columns.0.values", ["a"], "['name'] has 1 values for 3 labels"),
        ("columns.0.values", "abc", "['name'] has no list of values"),
        ("columns.1.dtype", "complex128", "['phone'] has an unknown dtype"),
        ("columns.1.values.2", {"$": "what"}, "['phone'][2] has an unknown tag"),
        ("columns.1.extra", 1, "['phone'] has unknown fields: extra"),
        ("columns.2.values.0", "4.0", "['seconds'] has values that are no float"),
        ("columns.2.values.0", True, "['seconds'] has values that are no float"),
        ("columns.2.dtype", "float32", ""),
        ("columns", [], "has 0 columns and 3 labels"),
        ("index.range", [0, 3], ".index is no range"),
        ("index.range", [0, 3, 0], ".index cannot be built"),
        ("index", None, ".index is no index"),
        ("labels.values", ["a", "b"], "has 3 columns and 2 labels"),
        ("attrs", [], ".attrs is no object"),
        ("unique_labels", 1, "has 1 for a flag"),
        ("more", 1, "has unknown fields: more"),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_place(place: str, value: Any, where: str) -> None:
    record = _damaged(place, value)
    if not where:
        record["columns"][2]["values"][0] = 0.1  # which no float32 is
        where = "['seconds'] has values that are no float32"
    with pytest.raises(StateRefused) as refused:
        TableReader().read_table(record)
    assert where in str(refused.value)


def test_an_integer_too_large_for_its_dtype_is_refused() -> None:
    record = TableWriter().write_table(pd.DataFrame({"n": np.array([1], dtype="uint8")}))
    record["columns"][0]["values"] = [300]
    with pytest.raises(StateRefused, match=r"\['n'\] cannot be built"):
        TableReader().read_table(record)
