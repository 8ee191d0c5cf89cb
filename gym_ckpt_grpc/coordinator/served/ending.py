"""Ending what a client has open, and what repeated calls are told of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.control.error_details import cut, to_message
from gym_ckpt_grpc.coordinator.errors import FleetError
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.coordinator.restoration import Restoration
from gym_ckpt_grpc.coordinator.result import CheckpointResult, CheckpointState
from gym_ckpt_grpc.coordinator.served import wire as served
from gym_ckpt_grpc.coordinator.served.failures import control_error, outcomes_of
from gym_ckpt_grpc.coordinator.transaction import Checkpoint
from gym_ckpt_grpc.protocol.errors import ControlError, GymCkptError, InternalError, RetireIncomplete, UsageError
from gym_ckpt_grpc.storage import Found
from gymckpt.v1 import coordinator_pb2 as pb

FINISHED = frozenset({CheckpointState.PUBLISHED, CheckpointState.STOPPED})
"""States of a checkpoint that is in the root's sequence."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a checkpoint or Restore ended. reply: of ResumeCheckpoint. summary: of a checkpoint."""

    checkpoint_id: str
    reply: pb.ResumeCheckpointResponse
    summary: pb.CheckpointSummary

    @property
    def published(self) -> bool:
        """Whether it is in the root's sequence."""
        return CheckpointState(self.reply.state) in FINISHED

    @property
    def publication(self) -> pb.PublishCheckpointResponse:
        """What PublishCheckpoint replies of a published one."""
        return pb.PublishCheckpointResponse(
            checkpoint_id=self.checkpoint_id,
            manifest_digest=self.summary.manifest_digest,
            sequence_number=self.summary.sequence_number,
        )

    @classmethod
    def failed(cls, checkpoint_id: str, error: GymCkptError | None = None) -> Self:
        """It ended unpublished; error: of its end."""
        known = error if isinstance(error, ControlError) or error is None else InternalError(str(error))
        state = served.state_to(CheckpointState.ABORTED)
        reply = pb.ResumeCheckpointResponse(checkpoint_id=checkpoint_id, state=state, error=served.error_of(known))
        return cls(checkpoint_id, reply, pb.CheckpointSummary(checkpoint_id=checkpoint_id, state=state))

    @classmethod
    def found(cls, found: Found) -> Self:
        """One that the root has published."""
        summary = served.summary_of(found)
        reply = pb.ResumeCheckpointResponse(checkpoint_id=summary.checkpoint_id, state=summary.state)
        return cls(summary.checkpoint_id, reply, summary)


async def end_checkpoint(checkpoint: Checkpoint) -> Ended:
    """Leave its block: published or not decides what that does."""
    await checkpoint.__aexit__(None, None, None)
    result = checkpoint.result
    assert result is not None
    reply = pb.ResumeCheckpointResponse(
        checkpoint_id=checkpoint.id,
        state=served.state_to(result.state),
        outcomes=served.outcomes_to(checkpoint.outcomes.get("Resume", ())),
        resume_pending=[wire.identity_to(identity) for identity in result.resume_pending],
        failure=cut(result.failure),
        timing=served.timing_to(result.timing),
    )
    if result.state is not CheckpointState.ABORTED or not result.notes:
        return Ended(checkpoint.id, reply, _summary(result))
    failed = next((o.error for o in checkpoint.outcomes.get("Resume", ()) if o.error), None)
    reply.error.CopyFrom(to_message(failed or InternalError("; ".join(result.notes))))
    return Ended(checkpoint.id, reply, _summary(result))


def _summary(result: CheckpointResult) -> pb.CheckpointSummary:
    return pb.CheckpointSummary(
        checkpoint_id=result.checkpoint_id,
        state=served.state_to(result.state),
        sequence_number=result.sequence_number,
        epoch=result.epoch,
        record_count=result.records,
        bytes=result.bytes,
        state_bytes=result.state_bytes,
        chain=result.chain,
        base_checkpoint_id=result.base,
        timing=served.timing_to(result.timing),
        continued_count=result.continued,
        restart_count=result.restarts,
        manifest_digest=result.manifest_digest,
    )


async def end_restore(restored: Restoration, *, discard: bool) -> Ended:
    """Let what is installed go on, or free it. A Restore that never was installed has undone itself."""
    error: ControlError | None = None
    outcomes: list[Outcome[Any]] = []
    state = CheckpointState.ABORTED
    if not restored.installed:
        return _restore(restored, state, outcomes, error)
    try:
        if discard:
            unwanted = UsageError(f"restore {restored.id} was discarded")
            await restored.__aexit__(UsageError, unwanted, None)
            if notes := getattr(unwanted, "__notes__", None):
                error = RetireIncomplete("; ".join(notes))
        else:
            await restored.__aexit__(None, None, None)
            state = CheckpointState.RESTORED
        outcomes = restored.resumed
    except FleetError as failure:
        error, outcomes = control_error(failure), list(outcomes_of(failure))
    except ControlError as failure:
        error, outcomes = failure, restored.resumed
    return _restore(restored, state, outcomes, error)


def _restore(
    restored: Restoration, state: CheckpointState, outcomes: list[Outcome[Any]], error: ControlError | None
) -> Ended:
    reply = pb.ResumeCheckpointResponse(
        checkpoint_id=restored.id,
        state=served.state_to(state),
        outcomes=served.outcomes_to(outcomes),
        error=served.error_of(error),
    )
    return Ended(restored.id, reply, pb.CheckpointSummary(checkpoint_id=restored.id, state=reply.state))
