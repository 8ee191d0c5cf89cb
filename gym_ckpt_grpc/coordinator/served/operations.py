"""The steps of a checkpoint, each as the method of the same meaning does it, with its reply."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator.errors import FleetError, NotPrepared
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.coordinator.restoration import Restoration
from gym_ckpt_grpc.coordinator.result import CheckpointState
from gym_ckpt_grpc.coordinator.served import wire as served
from gym_ckpt_grpc.coordinator.served.failures import REFUSALS_OF_READING, control_error, outcomes_of
from gym_ckpt_grpc.coordinator.session_state import Step
from gym_ckpt_grpc.coordinator.transaction import Checkpoint
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    InvalidArgument,
    InvalidPhase,
    StaleController,
    UsageError,
    Violation,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Payload, raw
from gymckpt.v1 import coordinator_pb2 as pb

STATES = {
    Step.NEW: CheckpointState.PREPARING,
    Step.PREPARING: CheckpointState.PREPARING,
    Step.PREPARED: CheckpointState.PREPARED,
    Step.CAPTURED: CheckpointState.PREPARED,
    Step.RELEASED: CheckpointState.RELEASED,
    Step.COMMITTED: CheckpointState.COMMITTED,
    Step.PUBLISHED: CheckpointState.PUBLISHED,
}
"""Where an open checkpoint stands, as the contract names it."""


class Failure:
    """How an operation over participants failed. error: None where it did not. outcomes: where looking failed."""

    def __init__(self) -> None:
        self.error: ControlError | None = None
        self.outcomes: Sequence[Outcome[Any]] | None = None
        self.not_prepared = False

    async def of(self, work: Awaitable[Any]) -> None:
        """Do it; a failure on participants is kept. Raises what refuses the call itself."""
        try:
            await work
        except NotPrepared as failure:
            self.error, self.outcomes, self.not_prepared = control_error(failure), failure.outcomes, True
        except FleetError as failure:
            self.error, self.outcomes = control_error(failure), outcomes_of(failure)
        except UsageError as failure:
            raise InvalidPhase(str(failure)) from failure
        except (StaleController, *REFUSALS_OF_READING):
            raise
        except ControlError as failure:
            self.error = failure


def state_of(checkpoint: Checkpoint) -> CheckpointState:
    """Where it stands; ABORTED for one that was ended."""
    return STATES.get(checkpoint.step, CheckpointState.ABORTED)


def heard(checkpoint: Checkpoint, *operations: str) -> list[Outcome[Any]]:
    """The outcomes of these operations, the last one of each participant."""
    return [outcome for operation in operations for outcome in checkpoint.outcomes.get(operation, ())]


def trainer_payload(data: bytes) -> Payload | None:
    """The trainer's own block, kept as it is."""
    return raw(data, served.TYPE_OF_BYTES) if data else None


def chosen(request: pb.CommitCheckpointRequest | pb.RunCheckpointRequest) -> bool | None:
    """Whether it is to be incremental; None: as the service is configured."""
    return request.incremental if request.HasField("incremental") else None


async def prepare(checkpoint: Checkpoint, ready_within: float) -> tuple[pb.PrepareCheckpointResponse, bool]:
    """Not ready in time is no error: it is a reply with blockers."""
    failure = Failure()
    if checkpoint.step in (Step.NEW, Step.PREPARING):
        await failure.of(checkpoint.prepare(ready_within=ready_within))
    outcomes = heard(checkpoint, "Prepare") or list(failure.outcomes or ())
    restarts = checkpoint.report.restarts
    reply = pb.PrepareCheckpointResponse(
        checkpoint_id=checkpoint.id,
        state=served.state_to(state_of(checkpoint)),
        outcomes=served.outcomes_to(outcomes),
        error=None if failure.not_prepared else served.error_of(failure.error),
        restarts=served.listed(restarts),
        restart_count=len(restarts),
    )
    return reply, failure.error is None


async def commit(
    checkpoint: Checkpoint, scope: Sequence[EpisodeId], request: pb.CommitCheckpointRequest
) -> tuple[pb.CommitCheckpointResponse, bool]:
    """What restarts is taken out of the scope: a client's lists of restarts may be cut."""
    failure = Failure()
    if checkpoint.step in (Step.NEW, Step.PREPARING):
        raise InvalidPhase(f"{checkpoint.id} is not prepared", active_checkpoint_id=checkpoint.id)
    await failure.of(
        checkpoint.commit(
            checkpoint.report.continued(scope),
            trainer=trainer_payload(request.trainer_state),
            stop=request.stop,
            reopen_when_captured=request.reopen_when_captured,
            incremental=chosen(request),
        )
    )
    restarts = [episode for episode in scope if episode in checkpoint.restarts]
    reply = pb.CommitCheckpointResponse(
        checkpoint_id=checkpoint.id,
        state=served.state_to(state_of(checkpoint)),
        outcomes=served.outcomes_to(heard(checkpoint, "Capture", "Commit")),
        error=served.error_of(failure.error),
        restarts=served.listed(restarts),
        restart_count=len(restarts),
        timing=served.timing_to(checkpoint.timing),
    )
    return reply, failure.error is None


async def publish(checkpoint: Checkpoint) -> tuple[pb.PublishCheckpointResponse, bool]:
    """The same call again gives the same publication."""
    failure = Failure()
    await failure.of(checkpoint.publish())
    reply = pb.PublishCheckpointResponse(
        checkpoint_id=checkpoint.id,
        manifest_digest=checkpoint.publication.digest,
        sequence_number=checkpoint.publication.number or 0,
        error=served.error_of(failure.error),
    )
    return reply, failure.error is None


async def run(
    checkpoint: Checkpoint, scope: Sequence[EpisodeId], ready_within: float, request: pb.RunCheckpointRequest
) -> tuple[pb.RunCheckpointResult, bool]:
    """Prepare, commit, publish. How it ended, and whether its end is good, is filled in by the Resume after it."""

    async def steps() -> None:
        report = await checkpoint.prepare(ready_within=ready_within)
        await checkpoint.commit(
            report.continued(scope),
            trainer=trainer_payload(request.trainer_state),
            stop=request.stop,
            reopen_when_captured=request.reopen_when_captured,
            incremental=chosen(request),
        )
        await checkpoint.publish()

    failure = Failure()
    await failure.of(steps())
    outcomes = heard(checkpoint, "Prepare", "Capture", "Commit") or list(failure.outcomes or ())
    result = pb.RunCheckpointResult(outcomes=served.outcomes_to(outcomes), error=served.error_of(failure.error))
    return result, True


async def restore(restored: Restoration) -> tuple[pb.RestoreCheckpointResponse, bool]:
    """A Restore that failed has undone itself when this returns."""
    failure = Failure()
    try:
        await failure.of(restored.__aenter__())
    except InvalidPhase as refusal:
        violations = [Violation("scope", "names what the checkpoint does not continue")]
        raise InvalidArgument(refusal.message, violations=violations) from refusal
    outcomes = restored.outcomes or list(failure.outcomes or ())
    reply = pb.RestoreCheckpointResponse(
        checkpoint_id=restored.id,
        source_checkpoint_id=restored.source_checkpoint_id,
        outcomes=served.outcomes_to(outcomes),
        error=served.error_of(failure.error),
    )
    if failure.error is None:
        continued, restarts = restored.continued, restored.restarts
        reply.continued.CopyFrom(served.listed(continued))
        reply.continued_count = len(continued)
        reply.restarts.CopyFrom(served.listed(restarts))
        reply.restart_count = len(restarts)
        places = [restored.placements[e] for e in wire.episodes_from(reply.continued)]
        reply.holders.extend(served.holders(places))
        for field, value in served.trainer_block(restored.manifest.trainer).items():
            setattr(reply, field, value)
    return reply, failure.error is None
