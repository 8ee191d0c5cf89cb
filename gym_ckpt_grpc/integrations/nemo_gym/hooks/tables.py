"""pandas tables as plain values and back: dtypes, None apart from NaN, index labels and their dtype, column order.

Column by column: numbers and texts are lists of plain values, instants and durations integers of their unit, cells of
`object` columns what `values.Writer` makes of them. What a table holds beyond that (a MultiIndex, a frequency, another
dtype) is refused where it is written, never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import SCALARS, TAG, Reader, StateRefused, Writer, exactly, under

NUMBERS: Final = frozenset(f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)) | {
    "bool",
    "float16",
    "float32",
    "float64",
}
"""numpy dtypes whose values are plain values, exactly."""
UNITS: Final = ("s", "ms", "us", "ns")
INSTANTS: Final = frozenset(f"{kind}[{unit}]" for kind in ("datetime64", "timedelta64") for unit in UNITS)


class TableWriter(Writer):
    """A Writer that also knows cells of tables: pandas' NA and NaT, and scalars of numpy."""

    def write_table(self, table: Any) -> dict[str, Any]:
        """A DataFrame. Raises StateRefused."""
        if type(table) is not pd.DataFrame:
            raise StateRefused(f"is {type(table).__qualname__}, not a DataFrame")
        columns = []
        for at, label in enumerate(table.columns):
            with under(f"[{label!r}]"):
                columns.append(self._array(table.iloc[:, at]))
        return {
            "index": self._index(table.index, ".index"),
            "labels": self._index(table.columns, ".columns"),
            "columns": columns,
            "attrs": self.write(table.attrs),
            "unique_labels": not table.flags.allows_duplicate_labels,
        }

    def write_other(self, value: Any) -> Any:
        if value is pd.NA:
            return {TAG: "NA"}
        if value is pd.NaT:
            return {TAG: "NaT"}
        if isinstance(value, np.generic) and value.dtype.name in NUMBERS:
            return {TAG: "numpy", "dtype": value.dtype.name, "value": value.item()}
        return super().write_other(value)

    def _index(self, index: Any, path: str) -> dict[str, Any]:
        with under(path):
            name = self.write(index.name)
            if type(index) is pd.RangeIndex:
                return {"name": name, "range": [index.start, index.stop, index.step]}
            if isinstance(index, pd.MultiIndex) or getattr(index, "freq", None) is not None:
                raise StateRefused(f"is a {type(index).__qualname__} with levels or a frequency")
            return {"name": name, **self._array(index)}

    def _array(self, holder: Any) -> dict[str, Any]:
        """The values of a column or an index."""
        dtype = holder.dtype
        if isinstance(dtype, pd.StringDtype):
            return {**_kind_of(dtype), "values": _written_texts(holder)}
        if isinstance(dtype, pd.CategoricalDtype):
            categories = self._index(dtype.categories, ".categories")
            codes = holder.array.codes.tolist()
            return {"dtype": "category", "categories": categories, "ordered": bool(dtype.ordered), "values": codes}
        name = str(dtype)
        if name in NUMBERS and dtype.isnative:
            return {"dtype": name, "values": holder.to_numpy().tolist()}
        if name in INSTANTS and dtype.isnative:
            return {"dtype": name, "values": holder.to_numpy().view("i8").tolist()}
        if name == "object":
            cells = holder.to_numpy().tolist()
            return {"dtype": name, "values": cells if SCALARS.issuperset(map(type, cells)) else self._items(cells)}
        raise StateRefused(f"has dtype {dtype}, which cannot be kept exactly")


class TableReader(Reader):
    """Reads what a TableWriter wrote, in the same order."""

    def read_table(self, value: Any) -> Any:
        """A DataFrame. Raises StateRefused."""
        exactly(value, {"index", "labels", "columns", "attrs", "unique_labels"})
        columns = value["columns"]
        if type(columns) is not list:
            raise StateRefused("is no list", ".columns")
        names = _shown(value["labels"])
        read = []
        for at, column in enumerate(columns):
            with under(f"[{names[at]!r}]" if at < len(names) else f"[column {at}]"):
                read.append(self._array(column))
        # Its order is that of the writer: what stands in several places stands first where it was met first.
        index = self._index(value["index"], ".index")
        labels = self._index(value["labels"], ".columns")
        attrs = self.read(value["attrs"])
        return _assembled(read, index, labels, attrs, value["unique_labels"])

    def read_other(self, value: dict[str, Any]) -> Any:
        if value == {TAG: "NA"}:
            return pd.NA
        if value == {TAG: "NaT"}:
            return pd.NaT
        if value[TAG] == "numpy":
            exactly(value, {TAG, "dtype", "value"})
            return _numbers(value["dtype"], [value["value"]])[0]
        return super().read_other(value)

    def _index(self, value: Any, path: str) -> Any:
        with under(path):
            if type(value) is not dict or "name" not in value:
                raise StateRefused("is no index")
            name = self.read(value["name"])
            if "range" in value:
                exactly(value, {"name", "range"})
                return _range(value["range"], name)
            array = self._array({key: part for key, part in value.items() if key != "name"})
            return _checked(pd.Index, array, dtype=array.dtype, name=name, copy=False)

    def _array(self, value: Any) -> Any:
        if type(value) is not dict or type(value.get("values")) is not list:
            raise StateRefused("has no list of values")
        dtype, values = value.get("dtype"), value["values"]
        if dtype in ("str", "string"):
            exactly(value, {"dtype", "storage", "values"})
            return _texts(dtype, value["storage"], values)
        if dtype == "category":
            exactly(value, {"dtype", "categories", "ordered", "values"})
            categories = self._index(value["categories"], ".categories")
            codes = _numbers("int64", values)
            return _checked(pd.Categorical.from_codes, codes, categories, ordered=_flag(value["ordered"]))
        exactly(value, {"dtype", "values"})
        if dtype in NUMBERS:
            return _numbers(dtype, values)
        if dtype in INSTANTS:
            return _numbers("int64", values).view(dtype)
        if dtype == "object":
            cells = np.empty(len(values), dtype=object)
            if SCALARS.issuperset(map(type, values)):
                cells[:] = values
            else:
                for at, cell in enumerate(self._fill_list([], values)):
                    cells[at] = cell
            return cells
        raise StateRefused(f"has an unknown dtype {dtype!r:.40}")


def _kind_of(dtype: Any) -> dict[str, Any]:
    return {"dtype": "string" if dtype.na_value is pd.NA else "str", "storage": dtype.storage}


def _written_texts(holder: Any) -> list[Any]:
    texts: list[Any] = holder.array.to_numpy(dtype=object, na_value=None).tolist()
    if holder.dtype.na_value is not pd.NA and None in texts:
        return [math.nan if text is None else text for text in texts]
    return texts


_TYPES: Final[Mapping[str, type]] = {"b": bool, "f": float, "i": int, "u": int}


def _numbers(dtype: Any, values: list[Any]) -> Any:
    """A numpy array, each of whose values is the one that was written."""
    if type(dtype) is not str or dtype not in NUMBERS:
        raise StateRefused(f"has an unknown dtype {dtype!r:.40}")
    kind = _TYPES[np.dtype(dtype).kind]
    if not {kind}.issuperset(map(type, values)):
        raise StateRefused(f"has values that are no {kind.__name__}")
    if kind is float and dtype != "float64":
        array = _checked(np.array, values, dtype="float64")
        with np.errstate(all="ignore"):
            exact = array.astype(dtype)
        if not np.array_equal(exact.astype("float64"), array, equal_nan=True):
            raise StateRefused(f"has values that are no {dtype}")
        return exact
    return _checked(np.array, values, dtype=dtype)


def _texts(dtype: str, storage: Any, values: list[Any]) -> Any:
    """A string array. Missing: NaN in `str`, None in `string`."""
    if storage not in ("python", "pyarrow"):
        raise StateRefused(f"has an unknown storage {storage!r:.40}")
    absent = float if dtype == "str" else type(None)
    kinds = set(map(type, values))
    if not kinds <= {str, absent} or (float in kinds and any(type(each) is float and each == each for each in values)):
        raise StateRefused("has values that are neither text nor missing")
    na_value = np.nan if dtype == "str" else pd.NA
    # Another storage would answer alike, and would be another dtype: pyarrow, if the table had it, must be here.
    wanted = _checked(pd.StringDtype, storage, na_value=na_value)
    cells = np.empty(len(values), dtype=object)
    cells[:] = values
    return _checked(pd.array, cells, dtype=wanted, copy=False)


def _range(value: Any, name: Any) -> Any:
    if type(value) is not list or len(value) != 3 or not {int}.issuperset(map(type, value)):
        raise StateRefused("is no range of three integers")
    return _checked(pd.RangeIndex, *value, name=name)


def _assembled(columns: list[Any], index: Any, labels: Any, attrs: Any, unique: Any) -> Any:
    """Columns may share a label: they are put together by position and named afterwards."""
    if len(labels) != len(columns):
        raise StateRefused(f"has {len(columns)} columns and {len(labels)} labels")
    if type(attrs) is not dict:
        raise StateRefused("is no object", ".attrs")
    for at, column in enumerate(columns):
        if len(column) != len(index):
            raise StateRefused(f"has {len(column)} values for {len(index)} labels", f"[{labels[at]!r}]")
    # A Series of its own dtype for each column: from bare arrays pandas would infer `str` where objects stood.
    series = {at: pd.Series(each, index=index, dtype=each.dtype, copy=False) for at, each in enumerate(columns)}
    table = pd.DataFrame(series, index=index, copy=False)
    table.columns = labels
    table.attrs = attrs
    return _checked(table.set_flags, allows_duplicate_labels=False) if _flag(unique) else table


def _shown(labels: Any) -> list[Any]:
    """Labels of columns as far as they can be told before they are read, for errors."""
    values = labels.get("values") if type(labels) is dict else None
    return values if type(values) is list else []


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise StateRefused(f"has {value!r:.40} for a flag")
    return value


def _checked(make: Callable[..., Any], *parts: Any, **settings: Any) -> Any:
    """What pandas or numpy make of it; what they refuse is StateRefused."""
    try:
        return make(*parts, **settings)
    except (TypeError, ValueError, OverflowError, ImportError, NotImplementedError) as error:
        raise StateRefused(f"cannot be built: {error}") from error
