"""Check that files and functions stay readable: no file over 500 lines, no function over 60.

    python tools/sizes.py DIRECTORY...

A function is measured from `def` to its last line, its docstring and what is nested in it included.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FILE_LIMIT = 500
FUNCTION_LIMIT = 60


@dataclass(frozen=True, slots=True)
class Measure:
    """The length in lines of one file or function, and where it stands."""

    place: str
    lines: int


def functions(path: Path, source: str) -> Iterator[Measure]:
    """Measure every function and method of one module."""
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield Measure(f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)


def report(title: str, measures: list[Measure], limit: int) -> list[str]:
    """Print one summary line; return a complaint for each measure over the limit."""
    if measures:
        lengths = [measure.lines for measure in measures]
        print(f"{title}: {len(lengths)}, median {median(lengths):.0f} lines, longest {max(lengths)}")
    return [f"{m.place}: {m.lines} lines, {limit} allowed" for m in measures if m.lines > limit]


def main(directories: list[str]) -> int:
    """Measure everything below the directories; 1 if anything is too long."""
    file_measures: list[Measure] = []
    function_measures: list[Measure] = []
    for path in sorted(p for directory in directories for p in Path(directory).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        file_measures.append(Measure(str(path), len(source.splitlines())))
        function_measures += functions(path, source)
    complaints = report("files", file_measures, FILE_LIMIT)
    complaints += report("functions", function_measures, FUNCTION_LIMIT)
    print("\n".join(complaints), end="\n" if complaints else "", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
