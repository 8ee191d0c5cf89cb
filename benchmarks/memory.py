"""Peak memory of a commit, in a process of its own: beyond what it had before, against the bytes captured.

python -m benchmarks.memory --count N --size BYTES --seed N --directory DIR     one run, in this process
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import disk
from benchmarks.figures import Gate, Group, Row
from benchmarks.loads import IDENTITY, STATE, Load
from benchmarks.rounds import Tell, WrongResult
from benchmarks.sessions import SESSION_SIZE
from gym_ckpt_grpc.storage import CheckpointLocation, LocalFiles, write_part

MIB = 1 << 20
SPARE = 64.0
"""MiB that a commit may take beyond the captured bytes."""
RUNS = 3
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure_memory(smoke: bool, directory: Path, seed: int, tell: Tell) -> Group:
    """The memory of a commit of 1,000 sessions, plain and compressed. The highest of all runs counts."""
    count, size = (30, 20_000) if smoke else (1000, SESSION_SIZE)
    rows, notes = [], []
    worst = 0.0
    for compress in (False, True):
        found = []
        for number in range(1 if smoke else RUNS):
            tell(f"memory, run {number + 1}{', zstd' if compress else ''}")
            found.append(_in_child(count, size, seed + number, directory, compress=compress))
        peaks = tuple((each["peak"] - each["before"]) / MIB for each in found)
        captured = max(each["captured"] for each in found) / MIB
        name = "commit, zstd" if compress else "commit"
        facts: dict[str, float | str] = {"captured MiB": captured, "beyond MiB": max(peaks) - captured}
        rows.append(Row(name=name, unit="MiB", samples=peaks, facts=facts))
        worst = max(worst, max(peaks) - captured)
    notes.append(
        "The highest resident size from before the capture to the end of the commit, minus the resident size before; "
        "everything is encoded and kept before the first byte is written, as a checkpoint does."
    )
    gate = Gate(name="memory of a commit beyond its captured bytes", value=worst, limit=SPARE, unit="MiB", at_most=True)
    title = f"Memory of a commit of {count:,} sessions"
    return Group(name="memory", title=title, rows=tuple(rows), gates=(gate,), notes=tuple(notes))


def _in_child(count: int, size: int, seed: int, directory: Path, *, compress: bool) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.memory", "--count", str(count), "--size", str(size)]
    command += ["--seed", str(seed), "--directory", str(directory), *(["--compress"] if compress else [])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode != 0:
        raise WrongResult(f"the measuring process ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def one_run(count: int, size: int, seed: int, directory: Path, *, compress: bool) -> dict[str, int]:
    """Bytes resident before, at the peak, and captured."""
    load = Load("memory", count, size, seed=seed)
    del load.later, load.changes
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what is free but still resident would hide a part of the peak
    root = directory / f"memory-{seed}"
    (root / "checkpoints").mkdir(parents=True)
    before = _status("VmRSS")
    _CLEAR.write_text("5")  # the peak begins anew
    records = list(load.records())
    captured = sum(len(record.payloads[STATE].data) for record in records)
    location = CheckpointLocation(str(root), "memory")
    write_part(LocalFiles(), location, IDENTITY, checkpoint_id="memory", records=records, compress=compress)
    found = {"before": before, "peak": _status("VmHWM"), "captured": captured}
    disk.remove(root)
    return found


def _status(name: str) -> int:
    """A size from /proc, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """One run; prints one JSON object."""
    parser = argparse.ArgumentParser(description="Measure the memory of one commit, in this process.")
    for name in ("--count", "--size", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--compress", action="store_true")
    given = parser.parse_args(arguments)
    print(json.dumps(one_run(given.count, given.size, given.seed, given.directory, compress=given.compress)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
