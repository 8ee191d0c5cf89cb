"""The coordinator's metrics: each thing once, whatever is repeated; and the one code of a failure of many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import (
    CaptureFailed,
    CommitFailed,
    Outcome,
    PublishFailed,
    RestoreFailed,
    RetireFailed,
)
from gym_ckpt_grpc.coordinator.codes import outcome_of_all, outcome_of_failure
from gym_ckpt_grpc.coordinator.retiring import RetireResult
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    ExportFailed,
    OutOfTime,
    PublishUnknown,
    StaleController,
    StateUnwritable,
    UsageError,
    WorkerUnavailable,
)
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.storage import LocalFiles
from gym_ckpt_grpc.telemetry import catalogue
from tests.coordinator.fleet_of_nodes import Nodes, episodes
from tests.coordinator.spans import ended, name, take
from tests.telemetry.kept import Kept

# ---- what is counted


@pytest.mark.behaviour("C299", "C307", "C309")
async def test_each_operation_is_counted_once_whatever_is_repeated(nodes: Nodes) -> None:
    """Case 64: three publications with one id are one, and two replays. With every span group off."""
    kept = Kept("none")
    in_flight = nodes.add(*episodes(3))
    nodes["env"].owner.restarts.add(in_flight[0])
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued(in_flight))
        numbers = {await checkpoint.publish() for _ in range(3)}
    assert (len(numbers), len(kept.spans)) == (1, 0)
    done = {"participant_kind": "coordinator", "outcome": "ok"}
    for operation in ("prepare", "capture", "commit", "publish", "resume"):
        assert kept.value(catalogue.OPERATION_DURATION, operation=operation, **done) == 1, operation
    assert kept.value(catalogue.STEP_DURATION) == kept.value(catalogue.STEP_DURATION, step="publish", **done) == 1
    assert kept.value(catalogue.EVENTS_TOTAL, event="replayed", operation="publish") == 2
    fates = {labels["fate"]: value for labels, value in kept.points(catalogue.WORK_TOTAL)}
    assert fates == {"protected": 2}


async def test_restored_work_is_counted_apart(nodes: Nodes, kept: Kept) -> None:
    """Case 148: what a restore continues is not protected a second time; what it lost starts over then."""
    in_flight = nodes.add(*episodes(3))
    nodes["env"].owner.restarts.add(in_flight[0])
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued(in_flight))
        await checkpoint.publish()
    for node in nodes:
        await node.restart()
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator, coordinator.restoring():
        assert kept.points(catalogue.WORK_TOTAL) == []
    fates = {labels["fate"]: value for labels, value in kept.points(catalogue.WORK_TOTAL)}
    assert fates == {"continued": 2, "restarted": 1}
    done = {"participant_kind": "coordinator", "outcome": "ok"}
    for operation in ("restore", "resume"):
        assert kept.value(catalogue.OPERATION_DURATION, operation=operation, **done) == 1


class NoSequence(LocalFiles):
    """Refuses to give a name in the sequence, as long as it is told to."""

    broken = True

    def publish(self, temporary: str, path: str) -> None:
        if self.broken and "/sequence/" in path and path.endswith("2"):
            raise StateUnwritable(f"{path!r} cannot be written")
        super().publish(temporary, path)


class UnsyncedSequence(LocalFiles):
    """Cannot sync a name in the sequence, as long as it is told to."""

    broken = False

    def sync_dir(self, path: str) -> None:
        if self.broken and path.endswith("sequence"):
            raise StateUnwritable("the sync failed")
        super().sync_dir(path)


async def test_a_publication_that_fails_is_a_step_with_its_code(nodes: Nodes, kept: Kept) -> None:
    in_flight, files = nodes.add(*episodes(1)), NoSequence()
    options: dict[str, Any] = {"telemetry": kept.telemetry, "files": files}
    async with nodes.coordinator(**options) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        with pytest.raises((PublishFailed, PublishUnknown)):
            await checkpoint.publish()
        files.broken = False
        await checkpoint.publish()
    first, second = (ended(span) for span in kept.of(name("publish")))
    assert (first in ("STATE_UNWRITABLE", "PUBLISH_UNKNOWN"), second) == (True, "ok")
    points = {labels["outcome"]: value for labels, value in kept.points(catalogue.STEP_DURATION)}
    assert points == {first: 1, "ok": 1}
    assert kept.value(catalogue.WORK_TOTAL, fate="protected") == 1


@pytest.mark.parametrize("again", [False, True])
async def test_a_publication_that_the_exit_finds_protects_once(nodes: Nodes, kept: Kept, again: bool) -> None:
    """It was named, and only its call did not hear so; be it the first one, or a repetition."""
    in_flight, files = nodes.add(*episodes(2)), UnsyncedSequence()
    options: dict[str, Any] = {"telemetry": kept.telemetry, "files": files}
    async with nodes.coordinator(**options) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight)
        if again:
            await checkpoint.publish()
        files.broken = True
        with pytest.raises(PublishUnknown):
            await checkpoint.publish()
        files.broken = False
    assert checkpoint.result is not None
    assert checkpoint.result.sequence_number > 0
    assert kept.value(catalogue.WORK_TOTAL, fate="protected") == 2


@pytest.mark.behaviour("C310")
async def test_no_label_has_an_id(nodes: Nodes, kept: Kept) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(telemetry=kept.telemetry) as coordinator:
        checkpoint = await take(coordinator, in_flight)
        await coordinator.retire(in_flight)
    for instrument in kept.names():
        for labels, _ in kept.points(instrument):
            for value in labels.values():
                assert checkpoint.id not in str(value)
                assert in_flight[0].rollout_id not in str(value).split("/")


# ---- the code of a failure of many


def outcome(kind: ParticipantKind, error: ControlError | None, transport: str = "") -> Outcome[Any]:
    return Outcome("Commit", ParticipantIdentity(kind, "s", "0"), None, error, transport)


ENV, RES = ParticipantKind.ENVIRONMENT, ParticipantKind.RESOURCES
SILENT = outcome(ENV, WorkerUnavailable("gone"), "UNAVAILABLE")
LATE = outcome(ENV, OutOfTime("late"))
FULL = outcome(RES, StateUnwritable("full"))
STALE = outcome(RES, StaleController("replaced"))
EXPORT = outcome(ParticipantKind.AGENT, ExportFailed("hook"))


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([], "ok"),
        ([outcome(ENV, None)], "ok"),
        ([outcome(ENV, None), SILENT], "WORKER_UNAVAILABLE"),
        ([SILENT, FULL], "STATE_UNWRITABLE"),
        ([LATE, FULL], "STATE_UNWRITABLE"),
        ([LATE, SILENT], "DEADLINE_EXCEEDED"),
        ([FULL, EXPORT], "EXPORT_FAILED"),
        ([EXPORT, FULL, STALE], "STALE_CONTROLLER"),
    ],
)
def test_the_most_telling_failure(outcomes: list[Outcome[Any]], code: str) -> None:
    """Being replaced explains all; what a participant says itself goes before silence; then the order of listing."""
    assert outcome_of_all(outcomes) == code
    if code != "ok":
        assert outcome_of_failure(CommitFailed("failed", outcomes)) == code


def test_failures_without_a_failed_call_have_the_code_of_their_kind() -> None:
    assert outcome_of_failure(CommitFailed("counts differ")) == "EXPORT_FAILED"
    assert outcome_of_failure(CaptureFailed("x")) == "EXPORT_FAILED"
    assert outcome_of_failure(RestoreFailed("x")) == "INSTALL_FAILED"
    assert outcome_of_failure(RetireFailed("x", RetireResult())) == "RETIRE_INCOMPLETE"
    assert outcome_of_failure(UsageError("x")) == "INVALID_ARGUMENT"
    assert outcome_of_failure(asyncio.CancelledError()) == "CANCELLED"
    assert outcome_of_failure(KeyError("x")) == "INTERNAL"
    assert outcome_of_failure(None) == "ok"
    failed = CommitFailed("the intent was not written")
    failed.__cause__ = StateUnwritable("full")
    assert outcome_of_failure(failed) == "STATE_UNWRITABLE"
