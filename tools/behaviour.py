"""Which behaviours of `docs/behaviour` have a test, and which milestone owes the others.

The lists of `docs/behaviour/*.md` give every behaviour an id (`- C12 ...`); `docs/behaviour/owners.toml`
gives every id to one milestone; a test names what it proves by `@pytest.mark.behaviour("C12", ...)`.

    python tools/behaviour.py             print the ids without a test, by milestone
    python tools/behaviour.py --check     exit 1 where a finished milestone lacks a test, an id has no
                                          owner or two, or a test or owner names an unknown id
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MILESTONES = (
    "slice",
    "control",
    "participants",
    "storage",
    "nemo_gym",
    "telemetry",
    "coordination",
    "collection",
    "workers",
    "later",
)
# What the first milestone already proves is named in its list only: it is taken out of the others' ranges.
OVERRIDING = "slice"

LINE = re.compile(r"^- ([A-Z]\d+) (\*\(later\)\*)?")
RANGE = re.compile(r"^([A-Z])(\d+)(?:-([A-Z])(\d+))?$")


class BehaviourError(Exception):
    """A file of the lists, the owners or the tests cannot be read as what it should be."""


@dataclass(slots=True)
class Behaviours:
    """The ids of the lists: which there are, which are marked *(later)*, which stand there twice."""

    ids: dict[str, str] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    twice: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Owners:
    """Who owns which id, in the order of MILESTONES, and which milestones are finished."""

    ids: dict[str, list[str]]
    finished: list[str]

    def of(self, identifier: str) -> list[str]:
        """The milestones that name the id: one, if all is well."""
        return [milestone for milestone, ids in self.ids.items() if identifier in ids]


def order(identifier: str) -> tuple[str, int]:
    """Sort key: by group, then by number."""
    return identifier[0], int(identifier[1:])


def expand(entry: str) -> list[str]:
    """The ids of `C12` or of the range `C1-C4`, both ends included."""
    match = RANGE.match(entry)
    if match is None or (match[3] is not None and match[3] != match[1]):
        raise BehaviourError(f"{entry!r} is neither an id nor a range of ids of one group")
    first, last = int(match[2]), int(match[4] or match[2])
    if last < first:
        raise BehaviourError(f"the range {entry!r} runs backwards")
    return [f"{match[1]}{number}" for number in range(first, last + 1)]


def compress(identifiers: Iterable[str]) -> str:
    """Write ids as briefly as `expand` reads them: `C1-C4 C7`."""
    runs: list[list[str]] = []
    for identifier in sorted(identifiers, key=order):
        if runs and identifier == f"{runs[-1][-1][0]}{int(runs[-1][-1][1:]) + 1}":
            runs[-1].append(identifier)
        else:
            runs.append([identifier])
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def read_behaviours(directory: Path) -> Behaviours:
    """Read the ids of every list in the directory."""
    found = Behaviours()
    for path in sorted(directory.glob("*.md")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if (match := LINE.match(text)) is None:
                continue
            if match[1] in found.ids:
                found.twice.add(match[1])
            found.ids[match[1]] = f"{path.name}:{number}"
            if match[2]:
                found.later.add(match[1])
    return found


def read_owners(path: Path) -> Owners:
    """Read the owners; an id that `slice` names is taken out of the ranges of the others."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    finished = document.pop("finished", [])
    unknown = [name for name in (*document, *finished) if name not in MILESTONES]
    if unknown:
        raise BehaviourError(f"{path.name}: unknown milestones {', '.join(unknown)}")
    ids: dict[str, list[str]] = {}
    for milestone in MILESTONES:
        entries = document.get(milestone, {}).get("ids", [])
        ids[milestone] = [identifier for entry in entries for identifier in expand(entry)]
    taken = set(ids[OVERRIDING])
    for milestone in MILESTONES:
        if milestone != OVERRIDING:
            ids[milestone] = [identifier for identifier in ids[milestone] if identifier not in taken]
    return Owners(ids, finished)


def marks(path: Path) -> Iterator[tuple[str, str]]:
    """Each id that a test module names in a `pytest.mark.behaviour(...)`, with its place."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if node.func.attr != "behaviour" or not isinstance(owner, ast.Attribute) or owner.attr != "mark":
            continue
        place = f"{path.name}:{node.lineno}"
        for argument in node.args:
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise BehaviourError(f"{place}: behaviour ids are written out as plain strings")
            yield argument.value, place


def read_tests(directory: Path) -> dict[str, list[str]]:
    """The places in the tests that name each id."""
    named: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(directory.rglob("*.py")):
        for identifier, place in marks(path):
            named[identifier].append(place)
    return dict(named)


def problems(behaviours: Behaviours, owners: Owners, named: dict[str, list[str]]) -> list[str]:
    """What `--check` fails on, one line each."""
    lines = [f"{i} stands twice in the lists" for i in sorted(behaviours.twice, key=order)]
    for identifier in behaviours.ids:
        owning = owners.of(identifier)
        if not owning:
            lines.append(f"{identifier} has no owner")
        elif len(owning) > 1:
            lines.append(f"{identifier} has several owners: {', '.join(owning)}")
        elif identifier in behaviours.later and owning != ["later"] and identifier not in named:
            lines.append(f"{identifier} is marked (later), but {owning[0]} owns it")
    for milestone, ids in owners.ids.items():
        lines += [f"{milestone} owns the unknown id {i}" for i in ids if i not in behaviours.ids]
        lines += [f"{milestone} names {i} twice" for i in sorted({i for i in ids if ids.count(i) > 1})]
    for identifier, places in named.items():
        if identifier not in behaviours.ids:
            lines.append(f"{', '.join(places)}: unknown id {identifier!r}")
    for milestone in owners.finished:
        lacking = [i for i in owners.ids[milestone] if i not in named]
        if lacking:
            lines.append(f"{milestone} is finished, and these have no test: {compress(lacking)}")
    return lines


def print_report(owners: Owners, named: dict[str, list[str]]) -> None:
    """Print, for each milestone, how many of its ids have a test and which do not."""
    for milestone, ids in owners.ids.items():
        lacking = [identifier for identifier in ids if identifier not in named]
        state = " (finished)" if milestone in owners.finished else ""
        print(f"{milestone}{state}: {len(ids) - len(lacking)} of {len(ids)} have a test")
        if lacking:
            print(f"    without: {compress(lacking)}")


def main(argv: list[str] | None = None) -> int:
    """Print the report, or check; the process's exit status."""
    parser = argparse.ArgumentParser(description="Which behaviours have a test.")
    parser.add_argument("--check", action="store_true", help="exit 1 where the rules are broken")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to read")
    options = parser.parse_args(argv)
    lists = options.root / "docs" / "behaviour"
    try:
        behaviours = read_behaviours(lists)
        owners = read_owners(lists / "owners.toml")
        named = read_tests(options.root / "tests")
    except (BehaviourError, SyntaxError) as error:
        print(f"behaviour: {error}", file=sys.stderr)
        return 1
    if not options.check:
        print_report(owners, named)
        return 0
    lines = problems(behaviours, owners, named)
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
    if not lines:
        print(f"behaviour: {len(behaviours.ids)} ids, {len(named)} named by tests")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
