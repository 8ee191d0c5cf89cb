"""What commands print: one JSON object for programs, or tables for people."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

WIDE = 400
"""Columns where the output is no terminal: a table in a log is not folded, and no id in it is cut."""

people = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
"""Standard output."""
errors = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else WIDE)
"""Standard error: progress and problems, so that standard output stays clean for `--json`."""


_UNSHOWN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""What JSON need not escape, and a terminal obeys."""


def print_json(value: Any) -> None:
    """One object on standard output, indented, followed by a newline; no character in it commands a terminal."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    except TypeError:  # the name of a file that is no Unicode
        text = json.dumps(value, indent=2, default=str)
    sys.stdout.write(_UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
    sys.stdout.flush()


def printable(text: object) -> str:
    """A text on one line, with an escape for whatever a terminal would obey: ids and state are other people's."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


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
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(printable(value))


def say(console: Console, colour: str, head: str, text: object = "") -> None:
    """One line: a coloured head, then text as it is, whatever brackets a server or a path put into it."""
    shown = "\n".join(printable(line) for line in str(text).split("\n"))
    console.print(Text.assemble((printable(head), colour), f" {shown}" if shown else ""), soft_wrap=True)


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
