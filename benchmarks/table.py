"""Reports for people: tables on a terminal, and the same as Markdown."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Group, Machine, Report, Row

_WIDTH = 180  # where there is no terminal that has one


def show(report: Report) -> None:
    """Print one table per group, with its gates and notes below it."""
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(describe(report.machine, report.seed), highlight=False, markup=False)
    for group in report.groups:
        table = Table(title=group.title, title_justify="left")
        for name in header(group):
            table.add_column(name, justify="left" if name == "what" else "right")
        for row in group.rows:
            table.add_row(*cells(group, row))
        console.print(table)
        for line in below(group, smoke=report.smoke):
            console.print(line, highlight=False, markup=False)


def markdown(report: Report) -> str:
    """The same tables as Markdown."""
    parts = [describe(report.machine, report.seed)]
    for group in report.groups:
        names = header(group)
        lines = ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
        lines += ["| " + " | ".join(cells(group, row)) + " |" for row in group.rows]
        notes = [f"- {line}" for line in below(group, smoke=report.smoke)]
        parts += [f"### {group.title}", "\n".join(lines), *(["\n".join(notes)] if notes else [])]
    return "\n\n".join(parts) + "\n"


def describe(machine: Machine, seed: int) -> str:
    """Where it was measured, in one sentence."""
    return (
        f"Python {machine.python}, {machine.system}, {machine.processor}, {machine.cores} cores, "
        f"{machine.memory:g} GB, {machine.filesystem or 'unknown file system'}; seed {seed}."
    )


def header(group: Group) -> list[str]:
    """The columns of a group's table."""
    facts = dict.fromkeys(name for row in group.rows for name in row.facts)
    return ["what", "rounds", "median", "min", "max", *facts]


def cells(group: Group, row: Row) -> list[str]:
    """One line of a group's table."""
    facts = [row.facts.get(name, "") for name in header(group)[5:]]
    times = [f"{_number(each)} {row.unit}" for each in (row.median, min(row.samples), max(row.samples))]
    return [row.name, str(len(row.samples)), *times, *(_number(each) for each in facts)]


def below(group: Group, *, smoke: bool = False) -> list[str]:
    """Gates, unless the sizes were too small to mean anything, and notes."""
    gates = [] if smoke else [f"{'held' if gate.held else 'MISSED'}: {gate}" for gate in group.gates]
    return [*gates, *group.notes]


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
