"""What telemetry costs a checkpoint: each site in a tight loop, times the sites of a counted cycle, over its time.

python -m benchmarks.telemetry_cost [--json [FILE]] [--gate] [--smoke]

Beside it, whole cycles of real servers: with nothing set up, and with spans and metrics exported over OTLP.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import options, telemetry_counts, telemetry_sites
from benchmarks.figures import Gate, Group, Row
from benchmarks.rounds import Tell, WrongResult
from benchmarks.telemetry_counts import within
from benchmarks.telemetry_sites import EXPORTED, LATER, OFF, READER

if TYPE_CHECKING:
    from gym_ckpt_grpc.telemetry import Telemetry
    from tests.e2e.rig import Rig

LIMIT_OFF, LIMIT_ON = 1.0, 5.0
"""Percent of a cycle that telemetry may take: of all processes with spans off and no exporter, and of each one with
all of it exported."""
ROLLOUTS = 64
"""As many as `make demo` has. A cycle takes longer with more of them; telemetry does not."""
COORDINATOR = "coordinator"
TIMES, SAMPLES = 20_000, 7
OFF_SIDE, ON_SIDE = "nothing set up", "spans and metrics exported"
_SITES = (
    "Processor time of all threads of the process, at the site and where its span is ended. Exporting has rows of its "
    "own: the SDK does it on a thread, by its defaults 5 s later, which is after the cycle. A call has in it its span, "
    "its metric and the trace context that travels."
)
_COST = (
    "Each process's sites in one cycle, counted, times what a site takes in the tight loop above, over the time of a "
    "cycle with nothing set up. With spans off all processes are added up, as if they had one core between them; with "
    "spans on the gate is about the costliest process, since servers have hosts of their own, and the sum stands here."
)
_CYCLE = (
    "A cycle is one checkpoint, released before it is written: from the entering of its block to its end, published. "
    "Both sides live side by side and take turns in an order shuffled anew; the difference is not gated, since it is "
    "smaller than what such a machine does to two equal cycles."
)


@dataclass(slots=True)
class Cycles:
    """What whole cycles showed. seconds: by side. counts: by process, visits of each site in one cycle."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {OFF_SIDE: [], ON_SIDE: []})
    pauses: dict[str, list[float]] = field(default_factory=lambda: {OFF_SIDE: [], ON_SIDE: []})
    counts: dict[str, dict[str, float]] = field(default_factory=dict)


# ---- whole cycles --------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(
    directory: Path, env: Mapping[str, str], telemetry: Telemetry | None, counts: Path | None = None
) -> AsyncIterator[Rig]:
    """A deployment whose rollouts all stand in a generation. counts: a directory in which each process counts."""
    from gym_ckpt_grpc.minigym.processes import ProcessSpec
    from tests.e2e.plays import counting
    from tests.e2e.rig import COUNTER, HELD_AFTER, Rig, rig

    class Counted(Rig):
        """Servers that count their sites."""

        def specs(self) -> list[ProcessSpec]:
            if counts is None:
                return super().specs()
            module = "benchmarks.telemetry_counts"
            return [
                replace(spec, argv=(spec.argv[0], "-m", module, str(counts / spec.name), *spec.argv[2:]))
                for spec in super().specs()
            ]

    async with rig(directory, COUNTER, env=env, telemetry=telemetry, kind=Counted) as gym:
        await gym.start()
        await gym.hold_tokens(HELD_AFTER, turn=1)
        tasks = [counting(f"rollout-{number}", turns=2) for number in range(ROLLOUTS)]
        gym.send(tasks)
        for task in tasks:
            await gym.held_tokens(task.rollout_id)
        yield gym
        await gym.leave()
        await gym.servers.stop(grace=20)


async def cycle(gym: Rig) -> tuple[float, float]:
    """One checkpoint: its seconds, and its pause in ms."""
    async with gym.coordinator() as coordinator:
        began = time.perf_counter()
        async with coordinator.checkpoint(deadline=60) as checkpoint:
            await checkpoint.prepare(ready_within=30)
            await gym.commit(checkpoint, released=True)
        seconds = time.perf_counter() - began
    result = checkpoint.result
    if result is None or result.records < ROLLOUTS or result.resume_pending:
        raise WrongResult(f"a cycle wrote {result.records if result else 0} records of {ROLLOUTS} rollouts")
    return seconds, result.timing.pause_ms


async def turns(directory: Path, endpoint: str, rounds: int, rng: random.Random, tell: Tell) -> Cycles:
    """Cycles of both sides by turns, and counted ones of a third deployment."""
    from tests.telemetry.exporting import exporting

    found = Cycles()
    with exporting(COORDINATOR, endpoint) as exported:
        async with AsyncExitStack() as stack:
            off = await stack.enter_async_context(running(directory / "off", environment("none"), None))
            on = await stack.enter_async_context(
                running(directory / "on", environment("default,checkpoint", endpoint), exported.telemetry)
            )
            sides = {OFF_SIDE: off, ON_SIDE: on}
            for number in range(rounds + 1):
                for side in rng.sample(sorted(sides), 2):
                    tell(f"cycle {number} of {rounds}: {side}")
                    seconds, pause = await cycle(sides[side])
                    if number:
                        found.seconds[side].append(seconds)
                        found.pauses[side].append(pause)
        tell("a counted cycle")
        found.counts = await counted(directory, environment("default,checkpoint", endpoint), exported.telemetry)
    return found


async def counted(directory: Path, env: Mapping[str, str], telemetry: Telemetry) -> dict[str, dict[str, float]]:
    """Visits of each site by process: in the second checkpoint of a deployment, from its beginning to its end."""
    kept = directory / "counts"
    kept.mkdir()
    async with running(directory / "counted", env, telemetry, kept) as gym:
        here: telemetry_counts.Visits = []
        with telemetry_counts.counting(here.append):
            await cycle(gym)
            began = time.time_ns()
            await cycle(gym)
            ended = time.time_ns()
    by_process = {COORDINATOR: within(here, began, ended)}
    by_process |= {file.name: within(telemetry_counts.read(file), began, ended) for file in sorted(kept.iterdir())}
    if len(by_process) < 3 or not all(sum(counts.values()) for counts in by_process.values()):
        raise WrongResult(f"a process counted nothing: {by_process}")
    return {name: dict(counts) for name, counts in by_process.items()}


def environment(groups: str, endpoint: str = "") -> Mapping[str, str]:
    """Of server processes: what a user would set, with the SDK's own intervals."""
    exported = {"GYM_CKPT_TELEMETRY": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} if endpoint else {}
    return {"GYM_CKPT_SPAN_GROUPS": groups, **exported}


# ---- the report ----------------------------------------------------------------------------------------------


def sites_group(found: telemetry_sites.Found) -> Group:
    """A row per site and mode."""
    rows = [
        Row(name=f"{site}, {mode}", unit="ns", samples=tuple(samples))
        for (site, mode), samples in sorted(found.samples.items())
    ]
    return Group(name="telemetry-sites", title="One site in a tight loop", rows=tuple(rows), notes=(_SITES,))


def cost_group(sites: Mapping[tuple[str, str], Row], cycles: Cycles) -> Group:
    """A row per process, and the gates."""
    whole = Row(name="", samples=tuple(cycles.seconds[OFF_SIDE])).median * 1e9
    rows, sums = [], dict.fromkeys((OFF, READER, EXPORTED, LATER), 0.0)
    for process, counts in cycles.counts.items():
        cost = {mode: sum(n * sites[site, mode].median for site, n in counts.items()) for mode in sums}
        for mode in sums:
            sums[mode] += cost[mode]
        facts: dict[str, float | str] = {
            **{site: float(counts.get(site, 0)) for site in telemetry_sites.SITES},
            "with a reader us": cost[READER] / 1000,
            "exported us": cost[EXPORTED] / 1000,
            "later us": cost[LATER] / 1000,
            "share off %": 100 * cost[OFF] / whole,
            "share on %": 100 * cost[EXPORTED] / whole,
        }
        rows.append(Row(name=process, unit="us", samples=(cost[OFF] / 1000,), facts=facts))
    costliest = max(float(row.facts["share on %"]) for row in rows)
    gates = tuple(
        Gate(name=f"telemetry of a cycle, {name}", value=share, limit=limit, unit="%", at_most=True)
        for name, share, limit in (
            ("nothing set up, all processes", 100 * sums[OFF] / whole, LIMIT_OFF),
            ("spans and metrics exported, the costliest process", costliest, LIMIT_ON),
        )
    )
    notes = (
        f"spans off, metrics read: {100 * sums[READER] / whole:.2f} %; not gated",
        f"exporting them after the cycle: {100 * sums[LATER] / whole:.2f} %; not gated",
        f"spans and metrics exported, all processes: {100 * sums[EXPORTED] / whole:.2f} %; not gated",
        _COST,
    )
    title = "Telemetry's share of a cycle, by process"
    return Group(name="telemetry-cost", title=title, rows=tuple(rows), gates=gates, notes=notes)


def cycles_group(cycles: Cycles) -> Group:
    """Whole cycles, both sides."""
    rows = [Row(name=f"cycle, {side}", samples=tuple(taken)) for side, taken in cycles.seconds.items()]
    rows += [Row(name=f"pause, {side}", unit="ms", samples=tuple(taken)) for side, taken in cycles.pauses.items()]
    ratio = f"exported / nothing set up, medians: {rows[1].median / rows[0].median:.3f}"
    title = f"Whole cycles, {ROLLOUTS} rollouts in flight, four servers and an inference worker"
    return Group(name="telemetry-cycles", title=title, rows=tuple(rows), notes=(ratio, _CYCLE))


def measure(given: argparse.Namespace, directory: Path, rng: random.Random, tell: Tell) -> list[Group]:
    """Everything."""
    samples, times, rounds = (1, 200, 2) if given.smoke else (SAMPLES, TIMES, given.rounds)
    with telemetry_sites.collector() as endpoint:
        tell("tight loops")
        found = telemetry_sites.measure(endpoint, samples, times)
        cycles = asyncio.run(turns(directory, endpoint, rounds, rng, tell))
    sites = {key: Row(name="", samples=tuple(taken)) for key, taken in found.samples.items()}
    return [sites_group(found), cost_group(sites, cycles), cycles_group(cycles)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = options.parser("Measure what telemetry costs a checkpoint.")
    given = parser.parse_args(arguments)
    return options.run(given, lambda directory, rng, tell: measure(given, directory, rng, tell))


if __name__ == "__main__":
    sys.exit(main())
