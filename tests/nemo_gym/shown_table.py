"""All that a table is, as values that can be compared: what pandas calls equal may differ in much of it."""

from __future__ import annotations

from typing import Any

import pandas as pd


def shown_labels(index: Any) -> Any:
    bounds = (index.start, index.stop, index.step) if type(index) is pd.RangeIndex else None
    return (
        type(index).__name__,
        repr(index.dtype),
        storage_of(index),
        index.name,
        bounds,
        [shown(each) for each in index.array],
    )


def storage_of(holder: Any) -> Any:
    return getattr(holder.dtype, "storage", None)


def shown(cell: Any) -> Any:
    """A cell with its type; its text tells NaN, -0.0, None and pandas' own missing values apart."""
    return type(cell).__name__, repr(cell)


def shown_table(table: Any) -> Any:
    """Labels, dtypes, and each cell with its type."""
    columns = [table.iloc[:, at] for at in range(table.shape[1])]
    return {
        "index": shown_labels(table.index),
        "columns": shown_labels(table.columns),
        "dtypes": [(repr(each.dtype), storage_of(each)) for each in columns],
        "cells": [[shown(cell) for cell in each.array] for each in columns],
        "attrs": repr(table.attrs),
        "unique": table.flags.allows_duplicate_labels,
    }
