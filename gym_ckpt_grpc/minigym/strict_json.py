"""State as strict JSON: what every reader of it understands alike."""

from __future__ import annotations

import copy
import math
from typing import Any

DEEPEST = 64
"""Levels of nesting, at most."""


def json_copy(value: Any, place: str = "state") -> Any:
    """A copy, all the way down, of a JSON value. Raises ValueError, naming the place, for what is none."""
    check_json(value, place)
    return copy.deepcopy(value)


def check_json(value: object, place: str = "state") -> None:
    """Raise ValueError, naming the place, for what is no strict JSON.

    That is NaN and infinities, keys that are no texts, tuples and other types, and what is nested too deep.
    """
    _check(value, place, 0)


def _check(value: object, place: str, depth: int) -> None:
    if depth > DEEPEST:
        raise ValueError(f"{place} is nested deeper than {DEEPEST} levels")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} is {value}, which is no JSON")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place} has the key {key!r}, which is no text")
            _check(inner, f"{place}.{key}", depth + 1)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            _check(inner, f"{place}[{at}]", depth + 1)
    elif value is not None and not isinstance(value, str | bool | int | float):
        raise ValueError(f"{place} is a {type(value).__name__}, which is no JSON")
