"""How long generation stands still: one office server in a process of its own, over gRPC, on a real disk.

python -m benchmarks.pause [--checkpoints N] [--others N] [--sizes MB,MB] [--json [FILE]] [--gate]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import disk, holding, options
from benchmarks.figures import Gate, Group, Row
from benchmarks.loads import IDENTITY, check_part, episode_of
from benchmarks.rounds import Tell, WrongResult
from benchmarks.served import ServedOffice, office_process
from benchmarks.sessions import SESSION_SIZE, session_id
from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.coordinator import Checkpoint, CheckpointState, Coordinator, Fleet, Server
from gym_ckpt_grpc.protocol.errors import CheckpointConflict
from gym_ckpt_grpc.storage import CheckpointLocation
from gym_ckpt_grpc.testing import ParticipantClient

LONGEST, MORE, TIMES = 250.0, 100.0, 2.0
"""ms that a pause may take at any size; ms or times that it may take more at the largest than at the smallest."""
SIZES = (10, 100, 1000)
CHANGING = 0.02
"""Share of the sessions that change per second."""
MB = 1e6
_KEPT = 2  # checkpoints on the disk
_WITHIN = 300.0  # seconds for one checkpoint, and for the first background pass
_PAUSE = (
    "Pause beyond the wait for the safe cut: from the moment at which every participant was at its cut to the reply of "
    "the last Resume, by the coordinator's clock. The wait, and the time to durable, are medians."
)
_TRAFFIC = (
    "{share:.0%} of the sessions of {size:g} KB change per second, and a request that only reads comes every 5 ms; the "
    "longest request is the slowest of either kind, while it is held and while the write runs."
)
_HOLDING = "Held until synced, baseline 2, has our writer: from the cut to the last byte synced (holding.py)."


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to take checkpoints. gated: its figures are promised."""

    name: str
    revisions: bool = False
    incremental: bool = False
    holds: bool = False
    gated: bool = False


VARIANTS = (
    Variant("with revisions", revisions=True, gated=True),
    Variant("with revisions, incremental", revisions=True, incremental=True),
    Variant("without revisions"),
    Variant("held until synced", holds=True),
)


@dataclass(slots=True)
class Found:
    """What the checkpoints of one variant at one size showed. All ms, but disk: MB/s; written: MB per checkpoint."""

    pauses: list[float] = field(default_factory=list)
    cuts: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one block does: so many checkpoints of `sessions` sessions, `interval` seconds apart."""

    variant: Variant
    megabytes: float
    sessions: int
    size: int
    checkpoints: int
    interval: float
    share: float
    seed: int


async def run_block(plan: Plan, root: Path, found: Found) -> None:
    """A server, its traffic, its checkpoints; then a last one of a still server, compared with what it holds."""
    episodes = [episode_of(session_id(number)) for number in range(plan.sessions)]
    async with office_process(
        root,
        count=plan.sessions,
        size=plan.size,
        seed=plan.seed,
        share=plan.share,
        revisions=plan.variant.revisions,
    ) as office:
        if plan.variant.revisions:
            await _first_pass(office, plan.sessions)
        server = Server(
            service=IDENTITY.service, kind=IDENTITY.kind, address=office.address, instance=IDENTITY.instance
        )
        fleet = Fleet([server], require_kinds=())
        async with Coordinator(
            fleet, root=str(root), controller_id="benchmark", incremental=plan.variant.incremental
        ) as coordinator:
            kept: list[str] = []
            await office.ask("start")
            first = 1 if plan.variant.incremental else 0  # a chain begins with a full one, which is not counted
            for number in range(first + plan.checkpoints):
                await office.ask("")
                checkpoint = await _checkpoint(coordinator, episodes, plan.variant)
                await asyncio.sleep(plan.interval)
                reply = await office.ask("")
                if number >= first:
                    _keep(found, checkpoint, reply["longest"], plan.variant)
                kept.append(checkpoint.id)
                await _prune(coordinator, kept)
            await office.ask("stop")
            last = await _checkpoint(coordinator, episodes, plan.variant)
            seals = {key: bytes.fromhex(text) for key, text in (await office.ask("seals"))["seals"].items()}
        await asyncio.to_thread(_compare, root, last.id, seals)
        found.disk.append(await asyncio.to_thread(_disk_rate, root))


async def _first_pass(office: ServedOffice, sessions: int) -> None:
    """Wait for the background pass over all sessions, which a server makes once after its start."""
    async with open_channel(office.address) as channel:
        client = ParticipantClient(channel)
        async with asyncio.timeout(_WITHIN):
            while await _passed(client) < sessions:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.1)


async def _passed(client: ParticipantClient) -> int:
    return int((await client.status()).extra["precopied_sessions"])


async def _checkpoint(coordinator: Coordinator, episodes: Sequence[object], variant: Variant) -> Checkpoint:
    """One published checkpoint of everything. Raises WrongResult if anything is missing in it."""
    async with coordinator.checkpoint(deadline=_WITHIN) as checkpoint:
        report = await checkpoint.prepare(ready_within=_WITHIN / 10)
        scope = report.continued(episodes)  # type: ignore[arg-type]
        if variant.holds:
            await holding.hold_until_synced(checkpoint, scope)
        else:
            await checkpoint.commit(scope, reopen_when_captured=True)
        await checkpoint.publish()
    result = checkpoint.result
    assert result is not None
    if result.state is not CheckpointState.PUBLISHED or result.records != len(episodes):
        raise WrongResult(f"{result.checkpoint_id} ended {result.state.name} with {result.records} records")
    return checkpoint


def _keep(found: Found, checkpoint: Checkpoint, longest: float, variant: Variant) -> None:
    timing, result = checkpoint.timing, checkpoint.result
    assert result is not None
    assert timing.durable_after is not None
    found.pauses.append(holding.held_ms(checkpoint) if variant.holds else timing.beyond_cut_ms)
    found.cuts.append(timing.cut_ms)
    found.durable.append(1000 * timing.durable_after)
    found.written.append(result.bytes / MB)
    found.requests.append(1000 * longest)


async def _prune(coordinator: Coordinator, kept: list[str]) -> None:
    """Keep the disk bounded: what nothing holds goes, outside of every pause."""
    for checkpoint_id in kept[:-_KEPT]:
        with suppress(CheckpointConflict):  # one that a later incremental one refers to
            await coordinator.delete(checkpoint_id)
            kept.remove(checkpoint_id)


def _compare(root: Path, checkpoint_id: str, seals: dict[str, bytes]) -> None:
    check_part(CheckpointLocation(str(root), checkpoint_id), seals)


def _disk_rate(root: Path) -> float:
    """MB/s of plain sequential writes and one fsync, of the largest records file."""
    files = [path for path in root.rglob("records-*") if path.is_file()]
    source, target = max(files, key=lambda path: path.stat().st_size), root / "disk"
    begun = time.perf_counter()
    disk.write_plainly(source, target)
    rate = source.stat().st_size / MB / (time.perf_counter() - begun)
    disk.remove(target)
    return rate


def _plans(given: argparse.Namespace) -> list[Plan]:
    """Each variant at each size, in blocks, so that no variant has one stretch of time for itself."""
    plans = []
    for megabytes in given.sizes:
        for variant in VARIANTS:
            total = given.checkpoints if variant.gated else given.others
            for block in range(blocks := min(given.blocks, total)):
                plans.append(
                    Plan(
                        variant=variant,
                        megabytes=megabytes,
                        sessions=max(2, round(megabytes * MB / given.session_size)),
                        size=given.session_size,
                        checkpoints=total // blocks + (block < total % blocks),
                        interval=given.interval,
                        share=CHANGING,
                        seed=given.seed + block,
                    )
                )
    return plans


def measure(given: argparse.Namespace, directory: Path, rng: random.Random, tell: Tell) -> list[Group]:
    """The group of the pause."""
    if given.smoke:
        given.sizes, given.session_size = [0.4, 1], 20_000
        given.checkpoints, given.others, given.blocks, given.interval = 3, 2, 1, 0.05
    plans = _plans(given)
    rng.shuffle(plans)
    found: dict[tuple[float, str], Found] = {}
    for number, plan in enumerate(plans, 1):
        tell(f"pause, block {number} of {len(plans)}: {plan.megabytes:g} MB {plan.variant.name}, {plan.checkpoints}")
        root = directory / f"pause-{number}"
        root.mkdir()
        asyncio.run(run_block(plan, root, found.setdefault((plan.megabytes, plan.variant.name), Found())))
        disk.remove(root)
    return [_group(given, found)]


def _group(given: argparse.Namespace, found: dict[tuple[float, str], Found]) -> Group:
    rows = []
    for megabytes in given.sizes:
        for variant in VARIANTS:
            each = found[megabytes, variant.name]
            facts: dict[str, float | str] = {
                "wait for the cut": _ms(each.cuts),
                "durable after": _ms(each.durable),
                "longest request": f"{max(each.requests):.0f} ms",
                "MB written": statistics.median(each.written),
                "disk MB/s": statistics.median(each.disk),
            }
            rows.append(
                Row(name=f"{megabytes:g} MB {variant.name}", unit="ms", samples=tuple(each.pauses), facts=facts)
            )
    notes = (_PAUSE, _TRAFFIC.format(share=CHANGING, size=given.session_size / 1000), _HOLDING)
    title = "Pause of one server over gRPC, beyond the wait for the safe cut"
    return Group(name="pause", title=title, rows=tuple(rows), gates=_gates(given.sizes, rows), notes=notes)


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ms"


def _gates(sizes: Sequence[float], rows: Sequence[Row]) -> tuple[Gate, ...]:
    gated = next(variant for variant in VARIANTS if variant.gated)
    by_size = {size: next(row for row in rows if row.name == f"{size:g} MB {gated.name}") for size in sizes}
    gates = [
        Gate(name=f"longest pause at {size:g} MB", value=max(row.samples), limit=LONGEST, unit="ms", at_most=True)
        for size, row in by_size.items()
    ]
    least, most = by_size[min(sizes)].median, by_size[max(sizes)].median
    if len(sizes) > 1:
        name = f"pause at {max(sizes):g} MB against {min(sizes):g} MB, medians"
        limit = max(TIMES * least, least + MORE)
        gates.append(Gate(name=name, value=most, limit=limit, unit="ms", at_most=True))
    return tuple(gates)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the pause's benchmark."""
    parser.add_argument("--checkpoints", type=int, default=50, help="with revisions, per size, default %(default)s")
    parser.add_argument("--others", type=int, default=10, help="of every other variant, default %(default)s")
    parser.add_argument("--sizes", type=_sizes, default=list(SIZES), help="of the state in MB, default 10,100,1000")
    parser.add_argument("--session-size", type=int, default=SESSION_SIZE, help="bytes as JSON, default %(default)s")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between checkpoints, default %(default)s")
    parser.add_argument("--blocks", type=int, default=2, help="per variant and size, default %(default)s")


def _sizes(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the pause; the exit code."""
    parser = options.parser("Measure the pause of a served fleet.")
    add_options(parser)
    given = parser.parse_args(arguments)
    return options.run(given, lambda directory, rng, tell: measure(given, directory, rng, tell))


if __name__ == "__main__":
    sys.exit(main())
