"""Put the tables of a report into docs/performance.md, between its two markers.

python -m benchmarks.page FILE     of `python -m benchmarks --json FILE`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import from_json
from benchmarks.table import markdown

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- tables: begin, by python -m benchmarks.page -->", "<!-- tables: end -->"


class NoMarkers(ValueError):
    """The page has not both markers, in their order."""


def rewritten(page: str, tables: str) -> str:
    """The page with these tables between its markers. Raises NoMarkers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise NoMarkers(f"the page needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description="Put a report's tables into docs/performance.md.")
    parser.add_argument("report", type=Path)
    given = parser.parse_args(arguments)
    report = from_json(given.report.read_bytes())
    if report.smoke:
        print(f"{given.report} is of a smoke run: its figures mean nothing", file=sys.stderr)
        return 2
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), markdown(report)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
