"""A minigym of real processes in the hands of a scenario.

async with rig(tmp_path, Topology(controls=True)) as gym:
    await gym.start()
    gym.send(tasks)
    await gym.held("counter", "/increment")     # a named moment, awaited: nothing sleeps
    await gym.checkpoint()
    await gym.crash()                           # SIGKILL of every process group
    await gym.restore()                         # a new life; sends what the checkpoint continues
    results = await gym.finish()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.coordinator import CheckpointState, Coordinator
from gym_ckpt_grpc.coordinator.restoration import Restoration
from gym_ckpt_grpc.coordinator.transaction import Checkpoint
from gym_ckpt_grpc.minigym.access import access_as
from gym_ckpt_grpc.minigym.deployment import Deployment
from gym_ckpt_grpc.minigym.inference_log import Call, calls_of, read_rows
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.supervisor import Supervisor
from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.minigym.trainer import Result, Trainer
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record, read_part, verify_checkpoint
from gym_ckpt_grpc.telemetry import Telemetry
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc

T = TypeVar("T")
LIMIT = 30.0
"""Seconds for any one wait of a scenario; far above what it takes on a busy machine."""
HELD_AFTER = 5
"""Tokens after which scenarios hold a generation; every reply is longer."""
COUNTER = Topology(resources=("counter",), controls=True)
"""What most scenarios need."""
POLL = 0.02
"""Seconds between two questions for a condition that nothing announces."""
TICK = 0.001
"""Seconds per token, where a scenario does not need a generation to last."""


@dataclass
class Rig:
    """One deployment over its lives, which are counted from 1. tasks: all that were sent, by rollout.

    env: added to that of every server. telemetry: of the coordinators here; the process's own if None.
    """

    plan: Deployment
    servers: Supervisor
    http: aiohttp.ClientSession
    life: int = 0
    tasks: dict[str, Task] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    telemetry: Telemetry | None = None
    _trainer: Trainer | None = None

    # ---- lives

    async def start(self) -> None:
        """Start every server, in a life of its own, and a trainer."""
        self.life += 1
        await self.servers.start(self.specs(), within=LIMIT)
        self._trainer = await Trainer(self.plan.server("environment").url).__aenter__()

    def specs(self) -> list[ProcessSpec]:
        """How the servers of this life are started."""
        return [replace(spec, env={**spec.env, **self.env}) for spec in self.plan.specs(life=self.life)]

    async def crash(self) -> None:
        """SIGKILL of every process group; the trainer is gone as well."""
        await self.servers.crash()
        await self.leave()

    async def leave(self) -> None:
        """End the trainer: nothing of this life is awaited any more."""
        if self._trainer is not None:
            await self._trainer.__aexit__(None, None, None)
            self._trainer = None

    # ---- rollouts

    @property
    def trainer(self) -> Trainer:
        """The trainer of this life."""
        assert self._trainer is not None, "not started"
        return self._trainer

    @property
    def in_flight(self) -> list[EpisodeId]:
        """What the trainer has sent and not heard of."""
        return list(self.trainer.in_flight.values())

    def send(self, tasks: Iterable[Task], attempts: Mapping[str, int] | None = None) -> None:
        """Start rollouts, at attempt 0 unless given."""
        chosen = list(tasks)
        self.tasks.update((task.rollout_id, task) for task in chosen)
        self.trainer.send(chosen, attempts)

    async def ended(self) -> None:
        """Wait until every rollout sent in this life has ended, one way or another."""
        async with asyncio.timeout(LIMIT):
            await self.trainer.finish()

    async def finish(self) -> dict[str, Result]:
        """Wait until every rollout of this life ended; its results. Fails if a rollout failed."""
        await self.ended()
        assert self.trainer.failures == {}
        return self.trainer.results

    # ---- checkpoints

    def coordinator(self) -> Coordinator:
        """A controller of this fleet, to be entered."""
        access = access_as("controller", self.plan)
        return Coordinator(
            self.plan.fleet(), root=self.plan.root.as_uri(), controller_id="e2e", telemetry=self.telemetry, **access
        )

    @asynccontextmanager
    async def prepared(self, *, ready_within: float = LIMIT) -> AsyncIterator[Checkpoint]:
        """A checkpoint at its cut: every server closed, and open again when the block ends."""
        async with self.coordinator() as coordinator, coordinator.checkpoint(deadline=2 * LIMIT) as checkpoint:
            await checkpoint.prepare(ready_within=ready_within)
            yield checkpoint

    async def prepare_while(
        self, checkpoint: Checkpoint, meanwhile: Callable[[], Awaitable[Any]], *, server: str = "environment"
    ) -> None:
        """Prepare, and do something once that server has closed."""
        preparing = asyncio.create_task(checkpoint.prepare(ready_within=LIMIT / 2))
        try:
            await self.until(server, lambda status: status.active_checkpoint_id != "")
            await meanwhile()
            await preparing
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def commit(
        self,
        checkpoint: Checkpoint,
        scope: Sequence[EpisodeId] | None = None,
        *,
        incremental: bool = False,
        released: bool = False,
    ) -> None:
        """Commit a prepared checkpoint of these rollouts (what is in flight), and publish it.

        released: every server goes on while it is written.
        """
        await checkpoint.commit(
            checkpoint.report.continued(self.in_flight if scope is None else scope),
            incremental=incremental,
            reopen_when_captured=released,
        )
        await checkpoint.publish()

    async def settled(self) -> None:
        """Wait, at a cut, for replies on the wire: what the environment neither runs nor holds has a result."""
        counts = (await self.status("environment")).report.counts
        await until(lambda: len(self.trainer.in_flight) <= counts["episodes"] + counts["waiting"])

    async def checkpoint(self, scope: Sequence[EpisodeId] | None = None) -> Checkpoint:
        """Take one and publish it; open again and intact on disk."""
        async with self.prepared() as checkpoint:
            await self.commit(checkpoint, scope)
        result = checkpoint.result
        assert result is not None
        assert (result.state, result.resume_pending) == (CheckpointState.PUBLISHED, ()), result.notes
        return checkpoint

    async def installed(self) -> Restoration:
        """A new life with the newest checkpoint installed and open; nothing is sent yet."""
        await self.start()
        return await self.restore_here()

    async def restore_here(self) -> Restoration:
        """Install the newest checkpoint into the servers that run; nothing is sent yet."""
        async with self.coordinator() as coordinator, coordinator.restoring(deadline=2 * LIMIT) as restored:
            pass
        return restored

    async def restore(self) -> Restoration:
        """A new life that goes on with what the newest checkpoint continues."""
        restored = await self.installed()
        self.send_continued(restored)
        return restored

    def send_continued(self, restored: Restoration) -> None:
        """Send each continued rollout at its installed attempt."""
        attempts = {episode.rollout_id: episode.attempt for episode in restored.continued}
        self.send([self.tasks[rollout] for rollout in attempts], attempts)

    async def retire(self, episodes: Iterable[EpisodeId]) -> None:
        """Retire attempts everywhere, by a controller of its own."""
        async with self.coordinator() as coordinator:
            await coordinator.retire(episodes)

    def faults(self, checkpoint_id: str) -> list[str]:
        """What is wrong with a checkpoint on disk."""
        found = verify_checkpoint(self.coordinator().root, checkpoint_id)
        return [str(finding) for finding in found if finding.is_fault]

    # ---- the servers' test controls

    async def control(self, server: str, action: str, *, method: str = "POST", **fields: Any) -> dict[str, Any]:
        """One request to `/control/<action>` of a server; fails if it is not answered with 200."""
        url = f"{self.plan.server(server).url}/control/{action}"
        asking = self.http.get(url, params=fields) if method == "GET" else self.http.post(url, json=fields)
        async with asking as answer:
            text = await answer.text()
            assert answer.status == 200, f"{server} {action} {fields}: {answer.status} {text}"
            body: dict[str, Any] = await answer.json(content_type=None) or {}
            return body

    async def hold(self, server: str, path: str, *, outside: bool = False) -> None:
        """Hold requests of a route: inside the server's gate, or outside, where they are on their way."""
        await self.control(server, "hold", path=path, outside=outside)

    async def held(self, server: str, path: str, count: int = 1) -> None:
        """Wait until so many are held."""
        await self.control(server, "held", method="GET", path=path, count=count, within=LIMIT)

    async def release(self, server: str, path: str) -> None:
        """Let them go, and hold no more."""
        await self.control(server, "release", path=path)

    async def seen(self, server: str, path: str) -> int:
        """How many requests of a route reached the application in this life, held ones included."""
        return int((await self.control(server, "seen", method="GET", path=path))["seen"])

    async def hold_tokens(self, after: int, *, worker: str = "inference", **which: Any) -> int:
        """Hold generations after so many tokens; which: rollout_id, attempt, turn. The hold's number."""
        return int((await self.control(worker, "hold", after=after, **which))["id"])

    async def held_tokens(self, rollout_id: str, count: int = 1, *, worker: str = "inference") -> None:
        """Wait until so many generations of a rollout stand at a hold."""
        asked = {"rollout_id": rollout_id, "count": count, "within": LIMIT}
        await self.control(worker, "held", method="GET", **asked)

    async def release_tokens(self, number: int | None = None, *, worker: str = "inference") -> None:
        """Release one hold of generations, or all and the hung cuts."""
        which: dict[str, Any] = {} if number is None else {"id": number}
        await self.control(worker, "release", **which)

    async def listed(self, worker: str = "inference") -> list[dict[str, Any]]:
        """An inference worker's own list of its calls in this life, in the order they began."""
        calls: list[dict[str, Any]] = (await self.control(worker, "calls", method="GET"))["calls"]
        return calls

    async def spread(self, tasks: Sequence[Task], workers: Sequence[str]) -> dict[str, set[str]]:
        """Wait until a call of every rollout stands at a hold; which rollouts each worker serves."""

        async def served() -> dict[str, set[str]]:
            lists = [await self.listed(worker) for worker in workers]
            held = [{call["rollout_id"] for call in calls if call["held"]} for calls in lists]
            return dict(zip(workers, held, strict=True))

        return await eventually(served, lambda found: sum(map(len, found.values())) == len(tasks))

    async def ask(self, rollout: str, attempt: int, prompt: str) -> dict[str, Any]:
        """One call of the policy by a waiting caller of that attempt, as a sub-agent makes it."""
        path = f"/rollout/{EpisodeId(rollout, attempt).capture_key}/v1/chat/completions"
        body = {"model": "minigym", "messages": [{"role": "user", "content": prompt}], "tools": [], "seed": 1}
        url = self.plan.server("policy_model").url + path
        async with self.http.post(url, json=body, headers={"x-gymckpt-waiting": "1"}) as answer:
            assert answer.status == 200, await answer.text()
            reply: dict[str, Any] = await answer.json(content_type=None)
            return reply

    async def held_at_call(self, task: Task, turn: int, *, after: int = HELD_AFTER) -> None:
        """Send a rollout and wait until this call of it stands after so many tokens."""
        await self.hold_tokens(after, rollout_id=task.rollout_id, turn=turn)
        self.send([task])
        await self.held_tokens(task.rollout_id)

    # ---- what participants say

    @asynccontextmanager
    async def stub(self, server: str) -> AsyncIterator[participant_pb2_grpc.ParticipantServiceAsyncStub]:
        """A participant's control plane."""
        access = access_as("controller", self.plan)
        address = self.plan.server(server).control_address
        async with open_channel(address, telemetry=self.telemetry, **access) as channel:
            yield participant_pb2_grpc.ParticipantServiceStub(channel)

    async def status(self, server: str) -> pb.ParticipantStatus:
        """Where a participant stands."""
        async with self.stub(server) as stub:
            return (await stub.GetStatus(pb.GetStatusRequest(), timeout=LIMIT)).status

    async def until(self, server: str, reached: Callable[[pb.ParticipantStatus], bool]) -> pb.ParticipantStatus:
        """Ask a participant again and again, briefly apart, until its status is as wanted."""
        async with self.stub(server) as stub:

            async def ask() -> pb.ParticipantStatus:
                return (await stub.GetStatus(pb.GetStatusRequest(), timeout=LIMIT)).status

            return await eventually(ask, reached)

    async def counted(self, server: str, name: str, count: int) -> None:
        """Wait until a count of a participant's report is this."""
        await self.until(server, lambda status: status.report.counts[name] == count)

    async def statuses(self) -> dict[str, pb.ParticipantStatus]:
        """Of every participant, by server name."""
        names = [server.name for server in self.plan.servers if server.kind]
        return dict(zip(names, await asyncio.gather(*(self.status(name) for name in names)), strict=True))

    # ---- evidence

    def calls(self, rollout: str | None = None, *, life: int | None = None) -> list[Call]:
        """Generation calls by the inference workers' own log, in the order they began."""
        found = calls_of(read_rows(self.plan.inference_log))
        return [call for call in found if rollout in (None, call.rollout_id) and life in (None, call.life)]

    def lineage(self, episode: EpisodeId) -> list[str]:
        """The calls in the manifest of an attempt, in order; fails if it lists a failure. Raises StaleAttempt."""
        manifest = CaptureLedger(self.plan.ledger).manifest(episode)
        assert manifest["failures"] == []
        return [call["call_id"] for call in manifest["calls"]]

    def records(self, server: str, checkpoint_id: str) -> dict[str, Record]:
        """What a participant wrote into a checkpoint, by capture key."""
        root, plan = self.coordinator().root, self.plan.server(server)
        assert plan.participant_kind is not None
        place = (plan.participant_kind, plan.name, "0")
        found = read_part(root.files, root.location(checkpoint_id), place, checkpoint_id=checkpoint_id)
        return {record.episode.capture_key: record for record in found.records}

    def boundary(self, rollout: str, checkpoint_id: str) -> Any:
        """The step at which the environment's record of a rollout goes on; None for its input."""
        [record] = [r for r in self.records("environment", checkpoint_id).values() if r.episode.rollout_id == rollout]
        return record.decode("boundary")["next"] if "boundary" in record.payloads else None


async def eventually(ask: Callable[[], Awaitable[T]], good: Callable[[T], bool]) -> T:
    """Ask again and again, briefly apart, until the answer is good: for what nothing announces here."""
    async with asyncio.timeout(LIMIT):
        while not good(answer := await ask()):  # noqa: ASYNC110 - the answer is another process's
            await asyncio.sleep(POLL)
    return answer


async def until(reached: Callable[[], bool]) -> None:
    """Look again and again, briefly apart, until it is so."""

    async def look() -> bool:
        return reached()

    await eventually(look, bool)


def places(status: pb.ParticipantStatus) -> set[str]:
    """Steps and routes that a participant's blockers are in."""
    return {blocker.place for blocker in status.report.blockers}


@asynccontextmanager
async def rig(
    directory: Path,
    topology: Topology | None = None,
    *,
    tick: float = TICK,
    env: Mapping[str, str] | None = None,
    telemetry: Telemetry | None = None,
    kind: type[Rig] = Rig,
) -> AsyncIterator[Rig]:
    """A deployment in a new directory; every process is gone when the block ends. env, telemetry: see Rig."""
    plan = Deployment.create(directory / "gym", tick=tick, topology=topology or Topology(controls=True))
    timeout = aiohttp.ClientTimeout(total=LIMIT + 5)
    async with aiohttp.ClientSession(timeout=timeout) as http, Supervisor(plan.logs) as servers:
        gym = kind(plan, servers, http, env=env or {}, telemetry=telemetry)
        try:
            yield gym
        finally:
            await servers.crash()
            await gym.leave()
