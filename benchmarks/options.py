"""The options that every benchmark understands."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks import disk
from benchmarks.figures import Group, Report, this_machine, to_json
from benchmarks.rounds import Tell
from benchmarks.table import show

LEAST_ROUNDS = 7
"""Fewer rounds are for trying things out, and the report says so."""


def parser(description: str) -> argparse.ArgumentParser:
    """A parser that knows the common options."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write one JSON object, to stdout by default"
    )
    made.add_argument("--gate", action="store_true", help="exit 1 and name the gates that are missed")
    made.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help="per case, default %(default)s")
    made.add_argument("--seed", type=int, help="of the sessions and of the order, default: a random one")
    made.add_argument("--directory", help="on the disk to measure, default: the current one")
    made.add_argument("--smoke", action="store_true", help="every path with tiny sizes; results are checked, times not")
    return made


def run(options: argparse.Namespace, measure: Callable[[Path, random.Random, Tell], Sequence[Group]]) -> int:
    """Measure in a new work directory, and say what was found; the exit code."""
    options.seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    if options.rounds < 1:
        print("--rounds must be at least 1", file=sys.stderr)
        return 2
    _tell(f"seed {options.seed}")
    try:
        with disk.work_directory(options.directory, on_disk=not options.smoke) as directory:
            machine = this_machine(disk.filesystem(directory))
            groups = measure(directory, random.Random(f"order {options.seed}"), _tell)
    except disk.NotADisk as error:
        print(error, file=sys.stderr)
        return 2
    report = Report(machine=machine, seed=options.seed, smoke=options.smoke, groups=tuple(groups))
    if options.json == "-":
        sys.stdout.write(to_json(report).decode())
    else:
        show(report)
        if options.json:
            Path(options.json).write_bytes(to_json(report))
    missed = [] if options.smoke else report.missed()
    for gate in missed if options.gate else []:
        print(f"missed: {gate}", file=sys.stderr)
    return 1 if options.gate and missed else 0


def _tell(text: str) -> None:
    with suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)
