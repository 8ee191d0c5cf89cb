"""How a checkpoint ended, and how long its parts took."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gym_ckpt_grpc.protocol.identity import ParticipantIdentity


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


@dataclass(slots=True)
class Timing:
    """Seconds that each operation took, retries and repeats included; 0 for one that did not run.

    first_closed, last_opened: monotonic seconds of the first Prepare sent and the last good Resume reply.
    """

    prepare: float = 0.0
    capture: float = 0.0
    commit: float = 0.0
    publish: float = 0.0
    resume: float = 0.0
    first_closed: float | None = None
    last_opened: float | None = None

    @property
    def pause_ms(self) -> float:
        """Milliseconds from the first closing to the last opening, by the coordinator's own count."""
        if self.first_closed is None or self.last_opened is None:
            return 0.0
        return (self.last_opened - self.first_closed) * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """What is known once the block has ended.

    state: PUBLISHED, ABORTED or STOPPED. sequence_number: 0 if it is not published. records, bytes: of all parts.
    continued, restarts: counts of rollouts. resume_pending: participants whose Resume goes on in the background
    (their lease reopens them in the end). replaced: processes found in the place of a member at the Resume.
    notes: what went wrong in the exit, for people.
    """

    checkpoint_id: str
    epoch: int
    state: CheckpointState
    sequence_number: int = 0
    manifest_digest: str = ""
    records: int = 0
    bytes: int = 0
    continued: int = 0
    restarts: int = 0
    resume_pending: tuple[ParticipantIdentity, ...] = ()
    replaced: tuple[ParticipantIdentity, ...] = ()
    notes: tuple[str, ...] = ()
    timing: Timing = field(default_factory=Timing)
