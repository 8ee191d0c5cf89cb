"""Seeded faults: each must be found by the tests that are named beside it.

`tests/mutants.toml` lists faults as (file, text as it is, text with the fault, tests). Each is put into a copy of the
tree and its tests are run until the first failure; a fault that all of them survive fails the run, and so does one
whose text is not in its file exactly once any more: the list is kept in step with the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = REPOSITORY / "tests" / "mutants.toml"
COPIED = ("gym_ckpt_grpc", "gen", "benchmarks", "tests", "tools", "docs", "protos", "pyproject.toml")
LIMIT = 300.0
"""Seconds for the tests of one fault; one that hangs them is found too."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One seeded fault. tests: files or test ids, relative to the repository."""

    name: str
    file: str
    was: str
    becomes: str
    tests: tuple[str, ...]


def read_faults(path: Path) -> list[Fault]:
    """The list; raises ValueError for one that does not apply to the tree exactly once."""
    faults = [
        Fault(entry["name"], entry["file"], entry["was"], entry["becomes"], tuple(entry["tests"]))
        for entry in tomllib.loads(path.read_text())["fault"]
    ]
    counts = {fault: (REPOSITORY / fault.file).read_text().count(fault.was) for fault in faults}
    if off := [f"{f.name}: its text stands {n} times in {f.file}" for f, n in counts.items() if n != 1]:
        raise ValueError("; ".join(off))
    if len({fault.name for fault in faults}) != len(faults):
        raise ValueError("two faults have one name")
    return faults


def copy_tree(to: Path) -> Path:
    """A copy of the tree to put faults into."""
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def survives(tree: Path, fault: Fault) -> tuple[bool, str]:
    """Whether the tests pass with the fault in, and what they said last."""
    target = tree / fault.file
    sound = target.read_text()
    target.write_text(sound.replace(fault.was, fault.becomes))
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'gen/python'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *fault.tests]
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return False, "hung"
    finally:
        target.write_text(sound)
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ended.returncode not in (0, 1):
        return True, f"pytest ended with {ended.returncode}: {ended.stdout[-300:]}{ended.stderr[-300:]}"
    return ended.returncode == 0, failed[0][:110] if failed else ""


def run(faults: list[Fault], workers: int) -> list[str]:
    """Try every fault; gives the names of those that survive."""
    with tempfile.TemporaryDirectory(prefix="gym-ckpt-mutants-") as scratch:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            (directory := Path(scratch) / str(number)).mkdir()
            trees.put(copy_tree(directory))

        def one(fault: Fault) -> str | None:
            tree, began = trees.get(), time.monotonic()
            try:
                alive, said = survives(tree, fault)
            finally:
                trees.put(tree)
            verdict = "SURVIVES" if alive else "found   "
            print(f"{verdict} {fault.name}  ({time.monotonic() - began:.0f} s) {said}", flush=True)
            return fault.name if alive else None

        with ThreadPoolExecutor(workers) as pool:
            return [name for name in pool.map(one, faults) if name]


def main() -> int:
    """Run the whole list, or the faults whose name has one of the given words."""
    parser = argparse.ArgumentParser(prog="mutants")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="only check that every fault applies")
    arguments = parser.parse_args()
    faults = read_faults(LIST)
    chosen = [f for f in faults if not arguments.words or any(word in f.name for word in arguments.words)]
    if arguments.list:
        print(f"{len(faults)} faults, each applies once")
        return 0
    alive = run(chosen, arguments.workers)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} seeded faults found")
    for name in alive:
        print(f"survives: {name}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
