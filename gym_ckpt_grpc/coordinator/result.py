"""How a checkpoint ended."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from gym_ckpt_grpc.coordinator.timing import Timing
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.storage import RetentionOutcome


class CheckpointState(enum.IntEnum):
    """Mirror of `gymckpt.v1.CheckpointState`, without its prefix; a test keeps the two equal."""

    UNSPECIFIED = 0
    PREPARING = 1
    PREPARED = 2
    COMMITTED = 3
    PUBLISHED = 4
    ABORTED = 5
    STOPPED = 6
    RESTORED = 7
    RELEASED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """What is known once the block has ended.

    state: PUBLISHED, ABORTED or STOPPED. sequence_number: 0 if it is not published. records: of all parts. bytes:
    written by this checkpoint; state_bytes: of all payloads, as they were encoded, wherever they are. chain: how many
    incremental checkpoints it is away from a full one. base: the id of the one that it was told to refer to, or empty.
    continued, restarts: counts of rollouts. resume_pending: participants whose Resume goes on in the background
    (their lease reopens them in the end). replaced: processes found in the place of a member at the Resume.
    failure: why nothing of it is durable though the fleet was released, and what stands instead; else empty.
    notes: what went wrong in the exit, for people. retention: the task that removes older checkpoints, which gives its
    outcome and never fails; None where retention was not asked for, or nothing was published, or the trainer stops.
    """

    checkpoint_id: str
    epoch: int
    state: CheckpointState
    sequence_number: int = 0
    manifest_digest: str = ""
    records: int = 0
    bytes: int = 0
    state_bytes: int = 0
    chain: int = 0
    base: str = ""
    continued: int = 0
    restarts: int = 0
    resume_pending: tuple[ParticipantIdentity, ...] = ()
    replaced: tuple[ParticipantIdentity, ...] = ()
    failure: str = ""
    notes: tuple[str, ...] = ()
    retention: asyncio.Task[RetentionOutcome] | None = None
    timing: Timing = field(default_factory=Timing)
