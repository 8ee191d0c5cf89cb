"""The state of a numpy generator as JSON-able values. One that starts anew looks fine and draws other numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

GENERATOR = "PCG64"
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,38}")


def export_generator(generator: np.random.Generator) -> dict[str, Any]:
    """Name, state and increment as decimal text (they have 128 bits), and the cached 32 bits."""
    bits = generator.bit_generator.state
    return {
        "name": bits["bit_generator"],
        "state": str(bits["state"]["state"]),
        "inc": str(bits["state"]["inc"]),
        "has_uint32": int(bits["has_uint32"]),
        "uinteger": int(bits["uinteger"]),
    }


def restored_generator(state: Mapping[str, Any]) -> np.random.Generator:
    """The generator of a state that `check_generator` accepted."""
    bits = np.random.PCG64(0)
    bits.state = {
        "bit_generator": GENERATOR,
        "state": {"state": int(state["state"]), "inc": int(state["inc"])},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }
    return np.random.Generator(bits)


def check_generator(generator: Any) -> None:
    """Raise ValueError, naming the fault, for what is no exported state of a PCG64 generator."""
    if not isinstance(generator, Mapping):
        raise ValueError("generator is no mapping")
    if generator.get("name") != GENERATOR:
        raise ValueError(f"generator is {generator.get('name')!r}, not {GENERATOR}")
    if set(generator) != {"name", "state", "inc", "has_uint32", "uinteger"}:
        raise ValueError("generator does not have exactly the fields name, state, inc, has_uint32, uinteger")
    for name in ("state", "inc"):
        text = generator[name]
        if not isinstance(text, str) or not _DECIMAL.fullmatch(text) or int(text) >= 2**128:
            raise ValueError(f"generator {name} is {text!r}, not a decimal number below 2**128")
    if int(generator["inc"]) % 2 == 0:
        raise ValueError(f"generator inc is {generator['inc']}, which is even")
    check_integer("generator has_uint32", generator["has_uint32"], 0, 1)
    check_integer("generator uinteger", generator["uinteger"], 0, 2**32 - 1)


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raise ValueError for what is no integer from low to high."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, not an integer from {low} to {high}")
