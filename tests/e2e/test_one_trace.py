"""One checkpoint is one trace over every process, whatever goes wrong in it. Real processes, real OTLP.

Field case 149. What kills no process is played first, one scene after the other in one deployment, which has ended
when the tests look at it. Failures draw what came; `-s` shows all of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import open_channel, wire
from gym_ckpt_grpc.coordinator import CommitFailed, NotPrepared
from gym_ckpt_grpc.coordinator.served import CoordinatorServer
from gym_ckpt_grpc.protocol.errors import GymCkptError
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import SpanType
from gymckpt.v1 import coordinator_pb2 as pb
from gymckpt.v1 import coordinator_pb2_grpc
from tests.e2e.plays import counting
from tests.e2e.processes import run
from tests.e2e.rig import Rig, until
from tests.e2e.traced import (
    GENERATION_CALL,
    INFERENCE,
    PARTICIPANT_CALL,
    PARTICIPANTS,
    TRAINER,
    all_ended,
    checkpoints,
    in_order,
    others_are_aside,
    the_checkpoint,
    traced,
)
from tests.telemetry.exporting import exporting, server_env
from tests.telemetry.otlp_receiver import Collector
from tests.telemetry.traces import Seen, Trace, name_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FLEET_SPANS = {
    "Prepare": catalogue.COORDINATE_PREPARE,
    "Capture": catalogue.COORDINATE_CAPTURE,
    "Commit": catalogue.COORDINATE_COMMIT,
    "Resume": catalogue.COORDINATE_RESUME,
}
STEPS = {"Prepare": catalogue.WAIT_READY, "Capture": catalogue.EXPORT, "Commit": catalogue.WRITE, "Resume": None}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made
        print(made.drawn())


async def two_in_flight(gym: Rig, scene: str = "") -> None:
    """Two rollouts that stand in their second call."""
    for name in ("a", "b"):
        await gym.held_at_call(counting(f"{scene}{name}"), turn=1)


@dataclass
class Played:
    """A deployment that has ended. ids: of each scene's checkpoint."""

    collector: Collector
    ids: dict[str, str] = field(default_factory=dict)

    def whole(self, scene: str) -> Trace:
        """The trace of a scene's one checkpoint: one tree, everything in it ended."""
        roots = [(trace, trace.of(catalogue.COORDINATE_CHECKPOINT)) for trace in checkpoints(self.collector)]
        mine = [trace for trace, spans in roots if any(span.of(at.ID) == self.ids[scene] for span in spans)]
        assert len(mine) == 1, f"{len(mine)} traces of one checkpoint:\n{self.collector.drawn()}"
        mine[0].whole()
        in_order(mine[0])
        return mine[0]

    def of_the_trainer(self, scene: str) -> Trace:
        """The same where this process is the root of it."""
        trace = self.whole(scene)
        assert (trace.root.name, name_of(trace.root.process)) == (catalogue.COORDINATE_CHECKPOINT.name, TRAINER)
        return trace


Scene = Callable[[Rig, Collector, str], Awaitable[str]]
"""Plays with a deployment whose rollouts have all ended, and leaves it so; gives the checkpoint's id."""
SCENES: list[Scene] = []


def scene(play: Scene) -> Scene:
    """One of the scenes, known by its name."""
    SCENES.append(play)
    return play


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with Collector() as collector:
        done = Played(collector)

        async def play() -> None:
            async with traced(tmp_path_factory.mktemp("played"), collector) as gym:
                for each in SCENES:
                    name = each.__name__
                    done.ids[name] = await each(gym, collector, f"{name}-")
                    await gym.release_tokens()
                    await gym.finish()

        asyncio.run(play())
        yield done
        print(collector.drawn())


def test_everything_is_in_its_trace_and_ended(played: Played) -> None:
    """Nothing of any scene is in a trace of its own, and no process ended with a span that had not."""
    traces = checkpoints(played.collector)
    assert len(traces) == len(SCENES) == len(set(played.ids.values()))
    others_are_aside(played.collector, *traces)
    all_ended(played.collector)
    assert TRAINER in {name_of(process) for process in played.collector.live()}


def served(trace: Trace, service: str, operation: str) -> Seen:
    """The participant's span of an operation: below its server's span, below the coordinator's client span."""
    span = trace.only(catalogue.OPERATIONS[operation.lower()], process=service)
    call = PARTICIPANT_CALL + operation
    above = list(trace.above(span))
    assert [(each.name, each.kind, name_of(each.process)) for each in above[:2]] == [
        (call, "server", service),
        (call, "client", TRAINER),
    ]
    names = [each.name for each in above[2:]]
    expected = [FLEET_SPANS[operation].name, catalogue.COORDINATE_CHECKPOINT.name]
    if operation == "Prepare":
        expected.insert(0, catalogue.PREPARE_STAGES[PARTICIPANTS[service]].name)
    assert names == expected
    return span


def below(trace: Trace, span: Seen, step: SpanType) -> list[Seen]:
    """The spans of a step that are children of this one."""
    return [child for child in trace.children(span) if child.name == step.name]


# ---- a checkpoint that goes well


@scene
async def a_checkpoint(gym: Rig, collector: Collector, name: str) -> str:
    await two_in_flight(gym, name)
    return (await gym.checkpoint()).id


@pytest.mark.behaviour("C297", "C298", "C303")
def test_a_checkpoint(played: Played) -> None:
    """From the trainer to the inference worker: each operation of each participant below the fleet's, which are below
    the one root; each step below its operation."""
    trace, id = played.of_the_trainer("a_checkpoint"), played.ids["a_checkpoint"]
    root = trace.root
    assert (root.of(at.ID), root.of(at.RESULT), root.outcome) == (id, "published", "ok")
    assert trace.processes == {TRAINER, *PARTICIPANTS, INFERENCE}
    assert {span.status for span in trace.spans} == {"unset"}

    stages = trace.children(trace.only(catalogue.COORDINATE_PREPARE))
    assert [stage.name for stage in stages if stage.name.startswith("gym.")] == [
        span.name for span in catalogue.PREPARE_STAGES.values()
    ]
    for service, kind in PARTICIPANTS.items():
        for operation, step in STEPS.items():
            span = served(trace, service, operation)
            assert (span.of(at.ID), span.of(at.PARTICIPANT_KIND), span.of(at.SERVICE)) == (id, kind, service)
            assert step is None or len(below(trace, span, step)) == 1
        [write] = below(trace, served(trace, service, "Commit"), catalogue.WRITE)
        size = write.of(at.BYTES)
        assert isinstance(size, int)
        assert size > 0

    cuts = below(trace, served(trace, "policy_model", "Prepare"), catalogue.GENERATION_CUT)
    assert cuts
    assert sum(int(str(cut.of(at.CALLS_CUT) or 0)) for cut in cuts) == 2
    for cut in cuts:
        [asked] = [child for child in trace.children(cut) if child.name == GENERATION_CALL + "CutGenerations"]
        [answered] = trace.children(asked)
        assert (asked.kind, answered.kind, name_of(answered.process)) == ("client", "server", INFERENCE)


@scene
async def released(gym: Rig, collector: Collector, name: str) -> str:
    await two_in_flight(gym, name)
    async with gym.prepared() as checkpoint:
        await gym.commit(checkpoint, released=True)
    return checkpoint.id


@pytest.mark.behaviour("C297")
def test_a_checkpoint_released_before_it_is_durable(played: Played) -> None:
    """The writes run while everybody works on: they are below their Commit, and end after the fleet was opened."""
    trace = played.of_the_trainer("released")
    for service in PARTICIPANTS:
        [write] = below(trace, served(trace, service, "Commit"), catalogue.WRITE)
        first = min(span.ended for span in trace.of(catalogue.RESUME, process=service))
        assert write.ended > first
    assert trace.root.of(at.RESULT) == "published"


# ---- what goes wrong


@scene
async def stands_still(gym: Rig, collector: Collector, name: str) -> str:
    await two_in_flight(gym, name)
    pid = gym.servers.pids["counter"]
    await gym.control(INFERENCE, "cuts", mode="hang")  # the stage before waits until the counter stands
    async with gym.coordinator() as coordinator, coordinator.checkpoint(deadline=60) as checkpoint:
        preparing = asyncio.create_task(checkpoint.prepare(ready_within=3.0))
        await gym.until("policy_model", lambda status: status.active_checkpoint_id != "")
        os.killpg(pid, signal.SIGSTOP)
        try:
            await gym.release_tokens()
            with pytest.raises(GymCkptError):
                await preparing
        finally:
            os.killpg(pid, signal.SIGCONT)
    await gym.until("counter", lambda status: status.active_checkpoint_id == "")
    return checkpoint.id


def test_a_participant_that_stands_still(played: Played) -> None:
    """Its Prepare runs out of time, on both sides in one trace: what it does of it later belongs there too."""
    trace = played.of_the_trainer("stands_still")
    fleet = trace.only(catalogue.COORDINATE_PREPARE)
    assert fleet.outcome != "ok"
    assert fleet.of(at.STOPPED_AT) == "resources"
    assert trace.root.of(at.RESULT) in ("error", "not_ready")


async def cut_off(gym: Rig, name: str, limit: float, *, cancelled: bool) -> str:
    """A Commit during which the counter stands still, cancelled or out of time."""
    await two_in_flight(gym, name)
    pid = gym.servers.pids["counter"]
    async with gym.coordinator() as coordinator, coordinator.checkpoint(deadline=limit) as checkpoint:
        await checkpoint.prepare(ready_within=4.0)
        scope = checkpoint.report.continued(gym.in_flight)
        await checkpoint.capture(scope)
        os.killpg(pid, signal.SIGSTOP)
        try:
            writing = asyncio.create_task(checkpoint.commit(scope))
            if cancelled:
                parts = gym.plan.root / "checkpoints" / checkpoint.id
                await until(lambda: len(list(parts.rglob("manifest.json"))) == len(PARTICIPANTS) - 1)
                writing.cancel()
            with pytest.raises((asyncio.CancelledError, CommitFailed)):
                await writing
        finally:
            os.killpg(pid, signal.SIGCONT)
    for service in PARTICIPANTS:
        await gym.until(service, lambda status: status.active_checkpoint_id == "")
    return checkpoint.id


@scene
async def cut_off_by_a_cancellation(gym: Rig, collector: Collector, name: str) -> str:
    return await cut_off(gym, name, 60.0, cancelled=True)


@scene
async def cut_off_by_its_deadline(gym: Rig, collector: Collector, name: str) -> str:
    return await cut_off(gym, name, 5.0, cancelled=False)


@pytest.mark.parametrize("ended_by", ["cut_off_by_a_cancellation", "cut_off_by_its_deadline"])
def test_a_commit_that_is_cut_off(played: Played, ended_by: str) -> None:
    """The participant stands still in the middle of it; its part ends later, in the same trace."""
    trace = played.of_the_trainer(ended_by)
    fleet = trace.only(catalogue.COORDINATE_COMMIT)
    assert (fleet.status, fleet.outcome == "ok") == ("error", False)
    assert (trace.root.of(at.RESULT), trace.root.status) == ("error", "error")


@scene
async def not_ready(gym: Rig, collector: Collector, name: str) -> str:
    await gym.hold("counter", "/increment")
    gym.send([counting(f"{name}a")])
    await gym.held("counter", "/increment")
    async with gym.coordinator() as coordinator, coordinator.checkpoint(deadline=60) as checkpoint:
        with pytest.raises(NotPrepared):
            await checkpoint.prepare(ready_within=1.0)
    await gym.release("counter", "/increment")
    return checkpoint.id


@pytest.mark.behaviour("C306")
def test_a_prepare_that_is_not_ready(played: Played) -> None:
    """Neither ok nor an error, at the participant, in its stage, in the fleet's operation and at the root."""
    trace = played.of_the_trainer("not_ready")
    fleet = trace.only(catalogue.COORDINATE_PREPARE)
    stopped = str(fleet.of(at.STOPPED_AT))
    [service] = [name for name, kind in PARTICIPANTS.items() if kind == stopped]
    stage, mine = trace.only(catalogue.PREPARE_STAGES[stopped]), trace.only(catalogue.PREPARE, process=service)
    assert {span.outcome for span in (fleet, stage, mine, trace.root)} == {"not_ready"}
    assert {span.status for span in (fleet, stage, mine, trace.root)} == {"unset"}
    assert int(str(mine.of(at.BLOCKERS))) >= 1


def lost_with(trace: Trace, service: str) -> None:
    """The rule for a process that is killed: what it had not exported is missing, and nothing else.

    Its own spans may have lost their parents, and so may what others did for it: the calls that it made and they
    served. Everything else has its place in the tree.
    """
    assert len(trace.roots) == 1, trace.drawn()
    for orphan in trace.orphans:
        own, asked = name_of(orphan.process) == service, orphan.kind == "server"
        assert own or (asked and orphan.name.startswith(GENERATION_CALL)), f"{orphan}\n{trace.drawn()}"


@pytest.mark.parametrize("service", ["counter", "policy_model"])
async def test_a_server_that_crashes(
    tmp_path: Path, collector: Collector, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the cut and the commit. The coordinator's call says so; every other span is where it belongs."""
    monkeypatch.setattr("gym_ckpt_grpc.coordinator.coordinator.LEAVE_PATIENCE", 1.0)  # nobody will answer
    async with traced(tmp_path, collector) as gym:
        await two_in_flight(gym)
        async with gym.coordinator() as coordinator, coordinator.checkpoint(deadline=5) as checkpoint:
            await checkpoint.prepare(ready_within=3)
            await gym.servers.kill(service)
            with pytest.raises(GymCkptError):
                await gym.commit(checkpoint)
        await gym.leave()
    trace = the_checkpoint(collector)
    lost_with(trace, service)
    others_are_aside(collector, trace)
    failed = [span for span in trace.spans if span.kind == "client" and span.status == "error"]
    assert failed
    assert {name_of(span.process) for span in failed} == {TRAINER}
    assert trace.root.status == "error"
    all_ended(collector, service)


# ---- a restore


@pytest.mark.behaviour("C297")
async def test_a_restore_is_a_trace_of_its_own_with_a_link(tmp_path: Path, collector: Collector) -> None:
    """It links to the checkpoint's root, over the death of every process."""
    async with traced(tmp_path, collector) as gym:
        await two_in_flight(gym)
        checkpoint = await gym.checkpoint()
        collector.until(lambda c: bool(checkpoints(c)) and checkpoints(c)[0].orphans == [])
        await gym.crash()
        await gym.restore()
        await gym.finish()
    taken = the_checkpoint(collector)
    [restored] = [trace for trace in collector.traces() if trace.of(catalogue.COORDINATE_RESTORING)]
    restored.whole()
    in_order(restored)
    others_are_aside(collector, taken, restored)
    assert restored.trace_id != taken.trace_id
    root = restored.root
    assert (root.name, root.of(at.SOURCE)) == (catalogue.COORDINATE_RESTORING.name, checkpoint.id)
    assert root.links == ((taken.trace_id, taken.root.span_id),)
    for service in PARTICIPANTS:
        span = restored.only(catalogue.RESTORE, process=service)
        assert [len(below(restored, span, step)) for step in (catalogue.READ, catalogue.INSTALL)] == [1, 1]
        names = [each.name for each in restored.above(span)]
        assert names == [
            *[PARTICIPANT_CALL + "Restore"] * 2,
            catalogue.COORDINATE_RESTORE.name,
            catalogue.COORDINATE_RESTORING.name,
        ]


# ---- other ways to take one


CLIENT = "client"
STEP_OF_TRAINING = SpanType("step of training", "a trainer", "what a trainer's own set-up would make")
COORDINATOR_CALL = "gymckpt.v1.CoordinatorService/"


@scene
async def by_the_service(gym: Rig, collector: Collector, name: str) -> str:
    await two_in_flight(gym, name)
    with exporting(CLIENT, collector.endpoint) as client:
        async with (
            gym.coordinator() as coordinator,
            CoordinatorServer(coordinator) as server,
            open_channel(server.address, telemetry=client.telemetry) as channel,
        ):
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            with client.telemetry.span(STEP_OF_TRAINING):
                await stub.PrepareCheckpoint(pb.PrepareCheckpointRequest(checkpoint_id="ck"), timeout=60)
                scope = wire.episode_list(gym.in_flight)
                await stub.CommitCheckpoint(pb.CommitCheckpointRequest(checkpoint_id="ck", scope=scope), timeout=60)
                await stub.PublishCheckpoint(pb.PublishCheckpointRequest(checkpoint_id="ck"), timeout=60)
                await stub.ResumeCheckpoint(pb.ResumeCheckpointRequest(checkpoint_id="ck"), timeout=60)
    return "ck"


def test_a_trainer_of_the_service_has_it_in_its_own_trace(played: Played) -> None:
    """Its own span is the root, over as many calls as it makes; the coordinator's and everybody's are below."""
    trace = played.whole("by_the_service")
    assert (trace.root.name, trace.root.process.partition(":")[0]) == (STEP_OF_TRAINING.name, CLIENT)
    for operation in ("Prepare", "Commit", "Publish", "Resume"):
        call = COORDINATOR_CALL + operation + "Checkpoint"
        asked, answered = trace.only(call, kind="client"), trace.only(call, kind="server")
        assert trace.parent(asked) == trace.root
        assert trace.parent(answered) == asked
    for service in PARTICIPANTS:
        span = trace.only(catalogue.COMMIT, process=service)
        assert span.of(at.ID) == "ck"
        assert trace.root in trace.above(span)


@scene
async def by_an_operator(gym: Rig, collector: Collector, name: str) -> str:
    await two_in_flight(gym, name)
    directory = gym.plan.root.parent
    in_flight = directory / "in-flight"
    in_flight.write_text("".join(f"{episode.capture_key}\n" for episode in gym.in_flight))
    env = {
        **server_env(collector.endpoint),
        "GYM_CKPT_TOKEN_FILE": str(gym.plan.token_file("controller")),
        "GYM_CKPT_FLEET": str(gym.plan.fleet_file),
    }
    session = ("--session", str(directory / "session"))
    before = set(os.listdir(gym.plan.root / "checkpoints"))
    for command in (
        ("prepare", *session, "--root", str(gym.plan.root)),
        ("commit", *session, "--episodes", str(in_flight)),
        ("publish", *session),
        ("resume", *session),
    ):
        ended = await asyncio.to_thread(run, *command, **env)
        assert ended.returncode == 0, ended.stderr
    [taken] = set(os.listdir(gym.plan.root / "checkpoints")) - before
    return taken


def test_an_operator_with_a_process_per_step(played: Played) -> None:
    """The session's file carries the trace from one command to the next."""
    trace = played.whole("by_an_operator")
    operators = {span.process for span in trace.spans if name_of(span.process) == "gym-ckpt"}
    assert len(operators) == 4, trace.drawn()
    assert name_of(trace.root.process) == "gym-ckpt"
    assert trace.processes == {"gym-ckpt", *PARTICIPANTS, INFERENCE}
    for service in PARTICIPANTS:
        for operation in (catalogue.PREPARE, catalogue.CAPTURE, catalogue.COMMIT, catalogue.RESUME):
            assert trace.only(operation, process=service).outcome == "ok"
