"""Phases, operations, and the legality table: what may happen where. Source: protocol section 5, control section 1."""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """Mirror of `gymckpt.v1.Phase`, without its prefix; a test keeps the two equal.

    Admission is open in IDLE and closed in every other phase.
    """

    UNSPECIFIED = 0
    IDLE = 1
    PREPARING = 2
    PREPARED = 3
    CAPTURED = 4
    COMMITTING = 5
    COMMITTED = 6
    RESTORING = 7
    RESTORED = 8
    RESUMING = 9


PHASES = tuple(phase for phase in Phase if phase is not Phase.UNSPECIFIED)


class Operation(enum.StrEnum):
    """The mutating operations. The value is the word in metrics, spans and the CLI."""

    PREPARE = "prepare"
    CAPTURE = "capture"
    COMMIT = "commit"
    RESUME = "resume"
    RESTORE = "restore"
    RETIRE = "retire"
    FORGET = "forget"
    RENEW_LEASE = "renew_lease"


class Verdict(enum.Enum):
    """What the machine says to one call."""

    RUN = "run"
    """Begin the work (or, for Retire, Forget and RenewLease, just do it)."""
    JOIN = "join"
    """The work is under way: wait for it."""
    REPLAY = "replay"
    """It was done: give the recorded reply."""
    FENCE = "fence"
    """Resume of an id that is not open here: remember it as resumed, change nothing else."""
    KEPT = "kept"
    """Commit of a resumed id whose records were kept: start or join that write."""
    WAIT = "wait"
    """Retire during an install: wait for it, then run."""
    PHASE = "phase"
    """Refuse with INVALID_PHASE."""
    STALE = "stale"
    """Refuse with STALE_CHECKPOINT."""


def _table() -> dict[tuple[Phase, Operation], Verdict]:
    """Rows of the design's table, columns in the order of Operation."""
    run, join, replay, wait, no = Verdict.RUN, Verdict.JOIN, Verdict.REPLAY, Verdict.WAIT, Verdict.PHASE
    rows = {
        # phase            prepare  capture commit  resume restore retire forget renew
        Phase.PREPARING: (join, no, no, run, no, run, no, run),
        Phase.PREPARED: (replay, run, run, run, no, run, no, run),
        Phase.CAPTURED: (replay, replay, run, run, no, no, no, run),
        Phase.COMMITTING: (replay, replay, join, run, no, no, no, run),
        Phase.COMMITTED: (replay, replay, replay, run, no, no, no, run),
        Phase.RESTORING: (no, no, no, run, join, wait, no, run),
        Phase.RESTORED: (no, no, no, run, replay, run, run, run),
        Phase.RESUMING: (no, no, no, join, no, no, no, no),
    }
    return {(phase, op): row[i] for phase, row in rows.items() for i, op in enumerate(Operation)}


SAME_ID = _table()
"""(phase, operation) -> verdict, for the id that is open. Every phase but IDLE."""

NEW_ID: dict[Operation, Verdict] = {
    Operation.PREPARE: Verdict.RUN,
    Operation.CAPTURE: Verdict.PHASE,
    Operation.COMMIT: Verdict.PHASE,
    Operation.RESUME: Verdict.FENCE,
    Operation.RESTORE: Verdict.RUN,
    Operation.RETIRE: Verdict.RUN,
    Operation.FORGET: Verdict.RUN,
    Operation.RENEW_LEASE: Verdict.PHASE,
}
"""operation -> verdict in IDLE, for an id that was never resumed here (or none, for Retire and Forget)."""

RESUMED_ID: dict[Operation, Verdict] = {
    Operation.PREPARE: Verdict.STALE,
    Operation.CAPTURE: Verdict.STALE,
    Operation.COMMIT: Verdict.STALE,  # KEPT instead, while records of it are kept
    Operation.RESUME: Verdict.REPLAY,
    Operation.RESTORE: Verdict.STALE,
    Operation.RETIRE: Verdict.RUN,
    Operation.FORGET: Verdict.RUN,
    Operation.RENEW_LEASE: Verdict.STALE,
}
"""operation -> verdict for an id that was resumed here, whatever is open; Retire and Forget need IDLE."""

ARROWS: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        (Phase.IDLE, Phase.PREPARING),
        (Phase.PREPARING, Phase.PREPARED),
        (Phase.PREPARED, Phase.PREPARING),
        (Phase.PREPARED, Phase.CAPTURED),
        (Phase.PREPARED, Phase.COMMITTING),
        (Phase.CAPTURED, Phase.COMMITTING),
        (Phase.COMMITTING, Phase.PREPARED),
        (Phase.COMMITTING, Phase.CAPTURED),
        (Phase.COMMITTING, Phase.COMMITTED),
        (Phase.IDLE, Phase.RESTORING),
        (Phase.RESTORING, Phase.RESTORED),
        (Phase.PREPARING, Phase.IDLE),
        (Phase.RESTORING, Phase.IDLE),
        (Phase.RESUMING, Phase.IDLE),
    }
    | {(phase, Phase.RESUMING) for phase in PHASES if phase not in (Phase.IDLE, Phase.RESUMING)}
)
"""Every legal change of phase."""
