"""Running a seed, and shrinking a failing one to the shortest list of operations that still fails."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.random.checks import check_lists
from tests.random.generator import Generator
from tests.random.ops import Op
from tests.random.restores import check_restores
from tests.random.virtual_time import run
from tests.random.world import World

STEPS = 40
SHRINK_RUNS = 300


@dataclass
class Outcome:
    """How a sequence went. error: what failed, after the last of `ops`."""

    ops: list[Op] = field(default_factory=list)
    error: BaseException | None = None
    calls: int = 0
    refusals: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    manifests: int = 0


async def _play(world: World, outcome: Outcome, choose: Callable[[], Op | None]) -> None:
    await world.begin()
    try:
        while (step := choose()) is not None:
            outcome.ops.append(step)
            await world.do(step)
            await check_lists(world)
        await world.drain()
        await check_restores(world)
    except Exception as error:
        outcome.error = error
    finally:
        outcome.calls, outcome.refusals, outcome.answers = world.calls, world.refusals, world.answers
        outcome.manifests = len(world.manifests)
        world.calm()
        for call in world.pending:
            call.task.cancel()
        await world.node.stop()


def _run(kind: str, root: Path, served: bool, chooser: Callable[[World], Callable[[], Op | None]]) -> Outcome:
    outcome = Outcome()
    directory = Path(tempfile.mkdtemp(dir=root))

    async def play() -> None:
        world = World(kind, directory, served=served)
        await _play(world, outcome, chooser(world))

    try:
        run(play, virtual=not served)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


def run_seed(seed: int, kind: str, root: Path, *, served: bool = False, steps: int = STEPS) -> Outcome:
    """Run the sequence of a seed."""

    def chooser(world: World) -> Callable[[], Op | None]:
        generator, left = Generator(seed, world), iter(range(steps))
        return lambda: None if next(left, None) is None else generator.next()

    return _run(kind, root, served, chooser)


def run_ops(ops: Sequence[Op], kind: str, root: Path, *, served: bool = False) -> Outcome:
    """Run a list of operations."""

    def chooser(world: World) -> Callable[[], Op | None]:
        rest = iter(ops)
        return lambda: next(rest, None)

    return _run(kind, root, served, chooser)


def shrink(ops: Sequence[Op], fails: Callable[[Sequence[Op]], bool]) -> list[Op]:
    """Delta debugging: leave out ever smaller pieces while the rest still fails."""
    left, size, runs = list(ops), max(1, len(ops) // 2), 0
    while size and runs < SHRINK_RUNS:
        at, smaller = 0, False
        while at < len(left) and runs < SHRINK_RUNS:
            runs += 1
            without = left[:at] + left[at + size :]
            if fails(without):
                left, smaller = without, True
            else:
                at += size
        if not (smaller and size == 1):
            size //= 2
    return left


def explain(seed: int, kind: str, outcome: Outcome, shortest: Sequence[Op], error: BaseException | None) -> str:
    """What a failing seed prints: how to run it again, and the shortest list that fails."""
    listed = "\n".join(f"    {step!r}," for step in shortest)
    return (
        f"seed {seed} of {kind} fails after {len(outcome.ops)} operations: {outcome.error!r}\n"
        f"{len(shortest)} of them fail with {error!r}:\n{listed}"
    )
