"""The benchmark of telemetry counts every site once and adds up what they cost; its gates can be missed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import telemetry_counts, telemetry_sites
from benchmarks.figures import Row
from benchmarks.telemetry_cost import OFF_SIDE, ON_SIDE, Cycles, cost_group, cycles_group
from benchmarks.telemetry_counts import within
from benchmarks.telemetry_sites import COUNTER, EXPORTED, HISTOGRAM, LATER, MADE, OFF, READER, SERVED, SITES, SPAN, Mode
from gym_ckpt_grpc.telemetry import Recorder, Telemetry, catalogue
from tests.telemetry.kept import Kept


def work(telemetry: Telemetry) -> None:
    """An operation with its metric, a step without, an event, and one call on each side."""
    recorder = Recorder("agent", telemetry=telemetry)
    with recorder.operation("prepare", checkpoint_id="c"), recorder.step(catalogue.CLEANUP, timed=False):
        recorder.event("preempted")
    with asyncio.Runner() as runner:
        mode = Mode("here", telemetry, runner)
        telemetry_sites.made(mode, 1)
        telemetry_sites.served(mode, 1)


def test_every_visit_is_counted_once() -> None:
    """A call is its span and its metric; both are one visit. Nothing is counted outside of the block."""
    kept, visits = Kept(), telemetry_counts.Visits()
    work(kept.telemetry)
    with telemetry_counts.counting(visits.append):
        work(kept.telemetry)
    work(kept.telemetry)
    times = [at for at, _ in visits]
    assert within(visits, min(times), max(times)) == {SPAN: 2, HISTOGRAM: 1, COUNTER: 1, MADE: 1, SERVED: 1}
    assert within(visits, max(times) + 1, max(times) + 2) == {}
    assert len(kept.spans) == 3 * 4


def test_a_process_that_is_killed_has_written_what_it_counted(tmp_path: Path) -> None:
    file = tmp_path / "counts"
    command = ["-m", "benchmarks.telemetry_counts", str(file), "tests.telemetry.killed_counter"]
    ended = subprocess.run([sys.executable, *command], cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == -9
    assert [site for _, site in telemetry_counts.read(file)] == [SPAN, HISTOGRAM]


@pytest.mark.parametrize("site", SITES)
def test_each_site_is_what_it_says(site: str) -> None:
    """So many spans and points per visit as the product makes."""
    kept = Kept()
    with asyncio.Runner() as runner:
        SITES[site](Mode("here", kept.telemetry, runner), 3)
    points = sum(value for name in kept.names() for _, value in kept.points(name))
    assert (len(kept.spans), points) == ({SPAN: 3, COUNTER: 0, HISTOGRAM: 0}.get(site, 3), 0 if site == SPAN else 3)
    kept.all_ended()


def sites(nanoseconds: float) -> dict[tuple[str, str], Row]:
    modes = (OFF, READER, EXPORTED, LATER)
    return {(site, mode): Row(name="", samples=(nanoseconds,)) for site in SITES for mode in modes}


def test_the_cost_is_sites_times_their_counts_over_a_cycle() -> None:
    """Of all processes with spans off, of the costliest with spans on. 10 visits of 10 us in 100 ms are 0.1 %."""
    cycles = Cycles(seconds={OFF_SIDE: [0.1, 0.1, 0.2], ON_SIDE: [0.3]}, pauses={OFF_SIDE: [1.0], ON_SIDE: [1.0]})
    cycles.counts = {"coordinator": {SPAN: 3, MADE: 4}, "agent": {SERVED: 1, HISTOGRAM: 1, COUNTER: 1}}
    group = cost_group(sites(10_000), cycles)
    assert [round(row.median, 6) for row in group.rows] == [70, 30]
    assert [round(gate.value, 6) for gate in group.gates] == [0.1, 0.07]
    assert [gate.limit for gate in group.gates] == [1.0, 5.0]
    assert [gate.held for gate in cost_group(sites(99_000), cycles).gates] == [True, True]
    assert [gate.held for gate in cost_group(sites(101_000), cycles).gates] == [False, True]
    assert [gate.held for gate in cost_group(sites(714_000), cycles).gates] == [False, True]
    assert [gate.held for gate in cost_group(sites(715_000), cycles).gates] == [False, False]
    assert "3.000" in cycles_group(cycles).notes[0]
