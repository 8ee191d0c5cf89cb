"""What commands print: one JSON object for programs, or tables for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

WIDE = 160
"""Columns where the output is no terminal: a table in a log must not be folded to 80."""

people = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
"""Standard output."""
errors = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else WIDE)
"""Standard error: progress and problems, so that standard output stays clean for `--json`."""


def print_json(value: Any) -> None:
    """One object on standard output, indented, followed by a newline."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode() + "\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A plain table; numbers are aligned to the right."""
    made = Table(title=title or None, title_justify="left", header_style="bold", show_header=any(columns))
    rows = [list(row) for row in rows]
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        last = i == len(columns) - 1
        made.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=not last)
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def _cell(value: object) -> str | Text:
    if isinstance(value, Text):
        return value
    if isinstance(value, float):
        return f"{value:,.1f}"
    # Escaped: what stands in brackets would be taken for a style.
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


def say(console: Console, colour: str, head: str, text: object = "") -> None:
    """One line: a coloured head, then text as it is, whatever brackets a server or a path put into it."""
    console.print(Text.assemble((head, colour), f" {text}" if text else ""), soft_wrap=True)


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
