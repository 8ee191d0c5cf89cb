"""The same commit through the control plane and gRPC, against the store called directly with the same records.

A real gRPC server and the whole path: request, fences, path checks, the owner's export, the write in a thread, reply.
Server and client share this process, as they share a machine in the figures of the store: the sessions, the heap and
the page cache are then the same for both sides of the comparison.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import disk
from benchmarks.figures import Gate, Group, timed_row
from benchmarks.loads import IDENTITY, Load, check_part
from benchmarks.office import Office
from benchmarks.rounds import Case, Tell, take
from gym_ckpt_grpc.participants.records import ResourcesRecord
from gym_ckpt_grpc.storage import CheckpointLocation, LocalFiles, Record, write_part
from gym_ckpt_grpc.testing import ParticipantClient, serve

REMOTE_GATE = 1.15
NOTE = (
    "A Commit is timed at its client, from the request to the reply; Prepare and Resume are outside of it. `write_part "
    "while encoding` is what a commit of the store alone does; the control plane captures first, so that what is "
    "written is of one moment."
)
_PATIENCE = 300.0  # seconds per call and lease: nothing here is about deadlines


class Remote:
    """Cases of one served office. Everything it writes is below `root`."""

    def __init__(self, load: Load, root: Path, runner: asyncio.Runner, client: ParticipantClient) -> None:
        self._load = load
        self._root = root
        self._runner = runner
        self._client = client
        self._numbers = count()
        self._id = ""
        self._records: list[Record] = []

    def cases(self) -> list[Case]:
        """Each call beside what the store does for it."""
        return [
            self._called("Commit RPC of captured records", captured=True),
            self._direct("write_part of the same records", before=self._encode, records=lambda: self._records),
            self._called("Commit RPC with its capture", captured=False),
            self._direct("encode, then write_part", records=lambda: list(self._encoded())),
            self._direct("write_part while encoding", records=self._encoded),
        ]

    def _encoded(self) -> Any:
        """The records that the owner exports, made as the owner makes them."""
        sessions = self._load.sessions.items()
        return (ResourcesRecord(self._load.episodes[key], key, state).to_record() for key, state in sessions)

    def _encode(self) -> None:
        self._records = list(self._encoded())

    def _called(self, name: str, *, captured: bool) -> Case:
        async def prepare() -> None:
            self._id = f"r{next(self._numbers)}"
            await self._client.prepare(self._id, ttl=_PATIENCE)
            if captured:
                await self._client.capture(self._id, timeout=_PATIENCE)

        async def after() -> None:
            await self._client.resume(self._id, timeout=_PATIENCE)

        return Case(
            name,
            lambda: self._run(self._client.commit(self._id, timeout=_PATIENCE)),
            before=lambda: self._run(prepare()),
            check=self._check,
            after=lambda: self._clean(lambda: self._run(after())),
        )

    def _direct(self, name: str, *, records: Callable[[], Any], before: Callable[[], None] | None = None) -> Case:
        def run() -> None:
            self._id = f"d{next(self._numbers)}"
            write_part(LocalFiles(), self._location(), IDENTITY, checkpoint_id=self._id, records=records())

        return Case(name, run, before=before or (lambda: None), check=self._check, after=self._clean)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def _location(self) -> CheckpointLocation:
        return CheckpointLocation(str(self._root), self._id)

    def _check(self, _: Any) -> None:
        check_part(self._location(), self._load.seals)

    def _clean(self, first: Callable[[], Any] = lambda: None) -> None:
        first()
        self._records = []
        disk.remove(Path(self._location().directory))


def measure_remote(load: Load, root: Path, rounds: int, rng: random.Random, tell: Tell) -> Group:
    """The group of a load's commits through gRPC."""
    (root / "checkpoints").mkdir(parents=True)
    office = Office(load.sessions)
    with asyncio.Runner() as runner:
        serving = serve(office.owner, service=IDENTITY.service, instance=IDENTITY.instance, roots=[root])
        served = runner.run(serving.__aenter__())
        try:
            cases = Remote(load, root, runner, served.client).cases()
            taken = take(cases, rounds, rng, tell=lambda text: tell(f"gRPC, {text}"))
        finally:
            runner.run(serving.__aexit__(None, None, None))
    rows = {name: timed_row(name, took) for name, took in taken.items()}
    pairs = [
        ("Commit RPC of captured records", "write_part of the same records"),
        ("Commit RPC with its capture", "encode, then write_part"),
    ]
    gates, shown = [], dict(rows)
    for called, direct in pairs:
        value = rows[called].median / rows[direct].median
        shown[called] = timed_row(called, taken[called], {"x store": value})
        gates.append(Gate(name=f"{called} against {direct}", value=value, limit=REMOTE_GATE, at_most=True))
    title = f"Through the control plane and gRPC: {len(load.sessions):,} {load.name}"
    return Group(name="remote", title=title, rows=tuple(shown.values()), gates=tuple(gates), notes=(NOTE,))
