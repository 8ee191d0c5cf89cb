"""The main job, end to end: checkpoint in flight, SIGKILL of every server, restart, restore, finish, compare.

Two deployments of the same tasks: one is crashed and restored, its twin is never killed. What was saved is read
from the inference worker's own log; whether anything differs, from what the environment replied in both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gym_ckpt_grpc.coordinator import CheckpointResult, CheckpointState, Coordinator, FleetReport, Timing
from gym_ckpt_grpc.minigym.access import access_as
from gym_ckpt_grpc.minigym.deployment import TICK, Deployment
from gym_ckpt_grpc.minigym.evidence import Evidence, judge, turns_begun
from gym_ckpt_grpc.minigym.partial_restore import restore_without
from gym_ckpt_grpc.minigym.supervisor import Supervisor
from gym_ckpt_grpc.minigym.tasks import Task, make_tasks
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.minigym.trainer import Result, Trainer
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry import exporting

IN_FLIGHT_SHARE = 0.75
"""Share of the rollouts that must be in flight at the checkpoint (48 of 64)."""
FINISHED_FIRST = 1
"""Rollouts to let finish before the checkpoint; more may until its cut, and enough must stay in flight."""
MANY = 16
"""Rollouts from which on some may finish first; of fewer, several would at once."""
AFTER_CHECKPOINT = 8
"""Further generation calls to let begin before the crash: work that is really lost and done again."""
POLL = 0.03
STEP_LIMIT = 120.0
"""Seconds for any one step of the demo."""
SETTLE_WITHIN = 5.0
"""Seconds for replies on the wire to arrive after the cut."""


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result. Rollout counts; tokens and turns from the worker's log; pause_ms: admission closed.

    cut_ms: of that, the wait for the safe cut. durable_ms, published_ms: from the first closing until every part was
    synced, and until the checkpoint was published, both while the fleet works on.

    continued: in flight at the checkpoint, and went on from it. lost: without a result at the end. different:
    whose transcript, tool results, final state or reward are not those of the twin. tokens_saved: of whole turns;
    tokens_kept: of `generations_continued` generations that the checkpoint cut in the middle.
    """

    rollouts: int
    finished_before: int
    in_flight: int
    continued: int
    restarted: int
    lost: int
    different: int
    tokens_saved: int
    tokens_kept: int
    tokens_redone: int
    turns_saved: int
    generations_continued: int
    pause_ms: float
    cut_ms: float
    durable_ms: float
    published_ms: float
    bytes: int

    @property
    def passed(self) -> bool:
        """Whether the promise was kept."""
        clean = self.lost == self.different == self.restarted == 0
        return clean and self.continued == self.in_flight > 0 and self.tokens_saved > 0


class DemoFailed(RuntimeError):
    """A step of the demo could not be done; says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """directory: new or empty. tick: seconds per token. leave_out: kind whose restore is forgotten on purpose.

    cuts: whether the checkpoint cuts generations that are running.
    """

    directory: Path
    rollouts: int = 64
    seed: int = 7
    tick: float = TICK
    leave_out: ParticipantKind | None = None
    cuts: bool = True


@dataclass(slots=True)
class Watcher:
    """What to tell while it runs. say: one line. count: (name of the phase, done, in all)."""

    say: Callable[[str], None] = lambda line: None
    count: Callable[[str, int, int], None] = lambda phase, done, total: None


@dataclass(frozen=True, slots=True)
class Cut:
    """What was true at the checkpoint: results delivered before it, rollouts in it, and how it went."""

    finished: Mapping[str, Result]
    in_flight: tuple[EpisodeId, ...]
    result: CheckpointResult


@dataclass(slots=True)
class Demo:
    """One run of the demo."""

    settings: DemoSettings
    watcher: Watcher = field(default_factory=Watcher)
    _all_begun: bool = False
    failures: dict[str, str] = field(default_factory=dict)
    """Rollouts whose second life ended without a result -> why."""

    async def run(self) -> DemoReport:
        """Do it all. Raises DemoFailed, coordinator errors and Unhealthy; leaves no process behind."""
        tasks = make_tasks(self.settings.rollouts, self.settings.seed)
        plan = self._plan("crashed")
        with exporting("demo"):
            async with Supervisor(plan.logs) as servers:
                cut = await self._first_life(servers, plan, tasks)
                await servers.crash()
                self.watcher.say("killed every server with SIGKILL")
                results = await self._second_life(servers, plan, tasks, cut)
        twin = await self._twin(tasks)
        rollouts = [episode.rollout_id for episode in cut.in_flight]
        evidence = await asyncio.to_thread(judge, plan.inference_log, rollouts, results)
        return _report(tasks, cut, {**cut.finished, **results}, twin, evidence)

    async def _first_life(self, servers: Supervisor, plan: Deployment, tasks: Sequence[Task]) -> Cut:
        self.watcher.say(f"starting {len(plan.servers)} servers in {plan.directory}")
        await servers.start(plan.specs(life=1))
        async with Trainer(plan.server("environment").url) as trainer:
            trainer.send(tasks)
            await self._until(servers, "turns", lambda: self._far_enough(plan, trainer, len(tasks)))
            cut = await self._checkpoint(plan, trainer)
            begun = _calls_begun(plan)
            await self._until(servers, "work after it", lambda: _calls_begun(plan) >= begun + AFTER_CHECKPOINT)
            return cut

    def _far_enough(self, plan: Deployment, trainer: Trainer, total: int) -> bool:
        """Every rollout in flight has a turn behind it, and some have finished if enough remain."""
        if not self._all_begun:  # it stays so: every rollout was sent at the start
            turns = turns_begun(plan.inference_log, life=1)
            self._all_begun = all(turns.get(rollout, 0) >= 1 for rollout in trainer.in_flight)
        self.watcher.count("first life", len(trainer.results), total)
        if trainer.failures:
            raise DemoFailed(f"rollouts failed before the checkpoint: {trainer.failures}")
        needed = max(1, int(total * IN_FLIGHT_SHARE))
        if len(trainer.in_flight) < needed:
            raise DemoFailed(f"only {len(trainer.in_flight)} rollouts are in flight, {needed} are needed")
        return self._all_begun and len(trainer.results) >= (FINISHED_FIRST if total >= MANY else 0)

    async def _checkpoint(self, plan: Deployment, trainer: Trainer) -> Cut:
        async with self._coordinator(plan) as coordinator:
            async with coordinator.checkpoint(deadline=STEP_LIMIT) as checkpoint:
                report = await checkpoint.prepare(ready_within=30.0)
                await _settle(trainer, report)
                scope = report.continued(trainer.in_flight.values())
                finished = dict(trainer.results)
                await checkpoint.commit(scope, reopen_when_captured=True)
                await checkpoint.publish()
            result = checkpoint.result
        assert result is not None, "the block has ended"
        if result.state is not CheckpointState.PUBLISHED or result.resume_pending:
            raise DemoFailed(f"the checkpoint ended as {result.state.name}: {'; '.join(result.notes)}")
        self.watcher.say(
            f"published {result.checkpoint_id}: {len(scope)} rollouts in flight, {len(finished)} finished before, "
            f"{result.records} records"
        )
        self.watcher.say(f"its moments, from the first closing on: {_moments(result.timing)}")
        return Cut(finished, tuple(scope), result)

    async def _second_life(
        self, servers: Supervisor, plan: Deployment, tasks: Sequence[Task], cut: Cut
    ) -> Mapping[str, Result]:
        """Results of the rollouts that were in flight. What the first life delivered later is lost with it."""
        await servers.start(plan.specs(life=2))
        self.watcher.say("restarted; restoring the newest checkpoint")
        attempts = {episode.rollout_id: episode.attempt for episode in await self._restore(plan)}
        async with Trainer(plan.server("environment").url) as trainer:
            trainer.send([task for task in tasks if task.rollout_id in attempts], attempts)
            await self._finish(servers, trainer, "second life", len(attempts))
            self.failures.update(trainer.failures)
            return trainer.results

    async def _restore(self, plan: Deployment) -> Sequence[EpisodeId]:
        if self.settings.leave_out is not None:
            return await restore_without(plan, self.settings.leave_out)
        async with (
            self._coordinator(plan) as coordinator,
            coordinator.restoring("latest", deadline=STEP_LIMIT) as restored,
        ):
            return restored.continued

    async def _twin(self, tasks: Sequence[Task]) -> Mapping[str, Result]:
        plan = self._plan("twin")
        self.watcher.say("running the same rollouts once more, never killed")
        async with Supervisor(plan.logs) as servers:
            await servers.start(plan.specs(life=1))
            async with Trainer(plan.server("environment").url) as trainer:
                trainer.send(tasks)
                await self._finish(servers, trainer, "twin", len(tasks))
                if trainer.failures:
                    raise DemoFailed(f"rollouts of the twin failed: {trainer.failures}")
                return trainer.results

    def _plan(self, name: str) -> Deployment:
        topology = Topology(cuts=self.settings.cuts)
        return Deployment.create(self.settings.directory / name, tick=self.settings.tick, topology=topology)

    def _coordinator(self, plan: Deployment) -> Coordinator:
        access = access_as("controller", plan)
        return Coordinator(plan.fleet(), root=plan.root.as_uri(), controller_id="demo", run_id="demo", **access)

    async def _finish(self, servers: Supervisor, trainer: Trainer, phase: str, total: int) -> None:
        def done() -> bool:
            self.watcher.count(phase, len(trainer.results), total)
            return not trainer.in_flight

        await self._until(servers, f"the {phase} to finish", done)
        await trainer.finish()

    async def _until(self, servers: Supervisor, what: str, reached: Callable[[], bool]) -> None:
        """Wait for a condition, as long as every server lives and STEP_LIMIT allows."""
        ends = time.monotonic() + STEP_LIMIT
        exit_watch = asyncio.create_task(servers.first_exit(), name="watch for exits")
        try:
            while not reached():
                if exit_watch.done():
                    raise DemoFailed(f"a server ended while waiting for {what}: {exit_watch.result()}")
                if time.monotonic() > ends:
                    raise DemoFailed(f"waited {STEP_LIMIT:.0f} s for {what}")
                await asyncio.sleep(POLL)
        finally:
            exit_watch.cancel()
            await asyncio.gather(exit_watch, return_exceptions=True)


async def _settle(trainer: Trainer, report: FleetReport) -> None:
    """Let replies that were on the wire at the cut arrive: what the environment no longer holds has a result."""
    held = next(r.counts["episodes"] for name, r in report.participants.items() if name.startswith("environment/"))
    ends = time.monotonic() + SETTLE_WITHIN
    while len(trainer.in_flight) > held and time.monotonic() < ends:  # noqa: ASYNC110 - any of many may arrive
        await asyncio.sleep(POLL)


def _moments(timing: Timing) -> str:
    moments = {
        "prepared": timing.prepared_after,
        "released": timing.released_after,
        "durable": timing.durable_after,
        "published": timing.published_after,
    }
    return ", ".join(f"{name} after {1000 * (seconds or 0.0):.0f} ms" for name, seconds in moments.items())


def _calls_begun(plan: Deployment) -> int:
    return plan.inference_log.read_bytes().count(b'"event":"start"')


def _report(
    tasks: Sequence[Task],
    cut: Cut,
    results: Mapping[str, Result],
    twin: Mapping[str, Result],
    evidence: Evidence,
) -> DemoReport:
    names = [task.rollout_id for task in tasks]
    timing = cut.result.timing
    return DemoReport(
        rollouts=len(names),
        finished_before=len(cut.finished),
        in_flight=len(cut.in_flight),
        continued=len(evidence.continued),
        restarted=len(evidence.restarted),
        lost=sum(name not in results for name in names),
        different=sum(name in results and results[name] != twin[name] for name in names),
        tokens_saved=evidence.tokens_saved,
        tokens_kept=evidence.tokens_kept,
        tokens_redone=evidence.tokens_redone,
        turns_saved=evidence.turns_saved,
        generations_continued=evidence.calls_continued,
        pause_ms=round(timing.pause_ms, 1),
        cut_ms=round(timing.cut_ms, 1),
        durable_ms=round(1000 * (timing.durable_after or 0.0), 1),
        published_ms=round(1000 * (timing.published_after or 0.0), 1),
        bytes=cut.result.bytes,
    )
