"""How often a process comes to a span site and to a metric site, and when.

`python -m benchmarks.telemetry_counts FILE MODULE ARGUMENTS...` runs a module as `python -m` would, and writes a line
for each visit at once: a signal may end it.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.telemetry_sites import COUNTER, HISTOGRAM, MADE, SERVED, SPAN
from gym_ckpt_grpc.telemetry import Telemetry, catalogue
from gym_ckpt_grpc.telemetry.catalogue import Kind

_SIDES = {catalogue.RPC_DURATION["client"].name: MADE, catalogue.RPC_DURATION["server"].name: SERVED}
_CALLS = (catalogue.RPC_CLIENT, catalogue.RPC_SERVER)

Visits = list[tuple[int, str]]
"""(ns since 1970, site) of each."""


@contextmanager
def counting(tell: Callable[[tuple[int, str]], object]) -> Iterator[None]:
    """Tell of every visit to a site in this process while the block lasts."""
    span, add = Telemetry.span, Telemetry.add

    def counted_span(self: Telemetry, which: Any, /, *arguments: Any, **named: Any) -> Any:
        if which not in _CALLS:  # these are counted by their metric
            tell((time.time_ns(), SPAN))
        return span(self, which, *arguments, **named)

    def counted_add(self: Telemetry, instrument: Any, *arguments: Any, **named: Any) -> None:
        other = HISTOGRAM if instrument.kind is Kind.HISTOGRAM else COUNTER
        tell((time.time_ns(), _SIDES.get(instrument.name, other)))
        add(self, instrument, *arguments, **named)

    Telemetry.span, Telemetry.add = counted_span, counted_add  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Telemetry.span, Telemetry.add = span, add  # type: ignore[method-assign]


def within(visits: Iterable[tuple[int, str]], began: int, ended: int) -> Mapping[str, int]:
    """How many of each site there were in that time, in ns since 1970."""
    return Counter(site for at, site in visits if began <= at <= ended)


def read(file: Path) -> Visits:
    """What a process has written."""
    return [msgspec.json.decode(line, type=tuple[int, str]) for line in file.read_bytes().splitlines()]


def main() -> None:
    """Run a module, counted."""
    _, file, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    with Path(file).open("ab", buffering=0) as lines, counting(lambda at: lines.write(msgspec.json.encode(at) + b"\n")):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
