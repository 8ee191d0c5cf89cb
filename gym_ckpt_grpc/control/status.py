"""What GetStatus and WatchStatus tell. Building it never waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.work import Work
from gym_ckpt_grpc.protocol.phases import Operation, Phase
from gym_ckpt_grpc.protocol.report import PrepareReport

_RUNNING = {
    Phase.PREPARING: Operation.PREPARE,
    Phase.COMMITTING: Operation.COMMIT,
    Phase.RESTORING: Operation.RESTORE,
    Phase.RESUMING: Operation.RESUME,
}


@dataclass(frozen=True, slots=True)
class Running:
    """The operation under way. elapsed: seconds since it began; totals are 0 while unknown."""

    operation: str
    elapsed: float
    records_done: int
    records_total: int
    bytes_done: int


@dataclass(frozen=True, slots=True)
class Status:
    """One participant at one moment. Durations in seconds, None where they mean nothing."""

    phase: Phase
    active_checkpoint_id: str
    controller_id: str
    highest_epoch: int
    lease_remaining: float | None
    report: PrepareReport
    writes_under_way: tuple[str, ...]
    marks_held: int
    oldest_mark_age: float | None
    restored_pending: int
    running: Running | None
    leases_expired: int
    closed_for: float | None
    extra: Mapping[str, str]


def build_status(core: Core) -> Status:
    """The status of this moment."""
    machine, work, now = core.machine, core.work, core.clock()
    current = machine.open
    extra = dict(core.owner.status_extra())
    if core.unnotified_changes:
        extra["unnotified_changes"] = str(core.unnotified_changes)
    return Status(
        phase=machine.phase,
        active_checkpoint_id=machine.active_checkpoint_id,
        controller_id=current.controller_id if current else "",
        highest_epoch=machine.epochs.highest,
        lease_remaining=current.lease.remaining(now) if current else None,
        report=core.report(),
        writes_under_way=tuple(_writes(core)),
        marks_held=len(core.retirement),
        oldest_mark_age=core.retirement.oldest_age(),
        restored_pending=len(core.owner.restored_pending()),
        running=_running(machine.phase, work, now),
        leases_expired=core.leases_expired,
        closed_for=now - work.closed_at if work else None,
        extra=extra,
    )


def _writes(core: Core) -> list[str]:
    works = [core.work, *core.kept.values()]
    return sorted({w.checkpoint_id for w in works if w and w.commit and not w.commit.done()})


def _running(phase: Phase, work: Work | None, now: float) -> Running | None:
    if work is None:
        return None
    capturing = phase is Phase.PREPARED and work.capturing
    operation = Operation.CAPTURE if capturing else _RUNNING.get(phase)
    if operation is None:
        return None
    total = len(work.captured.records) if work.captured else 0
    return Running(str(operation), now - work.began, work.records_done, total, work.bytes_done)
