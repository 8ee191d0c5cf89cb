"""What a run found: rows of figures, gates, and the report that holds them all."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.rounds import Took

PROCESSOR = "CPU s"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was measured. samples: one per round, in `unit`. facts: what stands beside it, by column."""

    name: str
    unit: str = "s"
    samples: tuple[float, ...]
    facts: dict[str, float | str] = {}

    @property
    def median(self) -> float:
        """Of all samples."""
        return statistics.median(self.samples)


def timed_row(name: str, took: Took, facts: Mapping[str, float | str] | None = None) -> Row:
    """The row of a timed case; how long the processor worked stands beside the time."""
    return Row(
        name=name, samples=tuple(took.seconds), facts={**(facts or {}), PROCESSOR: statistics.median(took.processor)}
    )


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """A promise and what was found. at_most: whether `limit` is the largest value allowed, else the least.

    aim: what we want it to be and do not promise, if that is another value; a run says whether it was reached.
    """

    name: str
    value: float
    limit: float
    unit: str = "x"
    at_most: bool = False
    aim: float | None = None

    @property
    def held(self) -> bool:
        """Whether the promise holds."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        sign = "at most" if self.at_most else "at least"
        text = f"{self.name}: {self.value:.3g} {self.unit}, {sign} {self.limit:.3g} {self.unit}"
        if self.aim is None:
            return text
        reached = self.value <= self.aim if self.at_most else self.value >= self.aim
        return f"{text}; aimed at {self.aim:.3g} {self.unit}, {'reached' if reached else 'not reached'}"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One table. notes: what a reader has to know to read it."""

    name: str
    title: str
    rows: tuple[Row, ...]
    gates: tuple[Gate, ...] = ()
    notes: tuple[str, ...] = ()


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured. cores: that this process may use. memory in GB. filesystem: of the work directory."""

    python: str
    system: str
    processor: str
    cores: int
    memory: float
    filesystem: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one run found. seed: of the order of all rounds and of all sessions."""

    machine: Machine
    seed: int
    smoke: bool
    groups: tuple[Group, ...]

    def missed(self) -> list[Gate]:
        """The gates that do not hold."""
        return [gate for group in self.groups for gate in group.gates if not gate.held]


def to_json(report: Report) -> bytes:
    """One JSON object, with the medians beside the samples and whether each gate is held."""
    built = msgspec.to_builtins(report)
    for group, made in zip(report.groups, built["groups"], strict=True):
        for row, each in zip(group.rows, made["rows"], strict=True):
            each |= {"median": row.median, "min": min(row.samples), "max": max(row.samples)}
        for gate, each in zip(group.gates, made["gates"], strict=True):
            each["held"] = gate.held
    return msgspec.json.format(msgspec.json.encode(built), indent=1) + b"\n"


def from_json(data: bytes) -> Report:
    """The report of `to_json`. Raises msgspec.ValidationError."""
    return msgspec.json.decode(data, type=Report)


def this_machine(filesystem: str) -> Machine:
    """What this process runs on."""
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release().split('-')[0]}",
        processor=_line("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        filesystem=filesystem,
    )


def _line(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
