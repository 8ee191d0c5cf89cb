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
    """The operation under way, a write kept after the release included. elapsed: seconds since it began; totals are 0
    while unknown."""

    operation: str
    elapsed: float
    records_done: int
    records_total: int
    bytes_done: int
    bytes_total: int


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
        running=_running(core, now),
        leases_expired=core.leases_expired,
        closed_for=now - work.closed_at if work else None,
        extra=extra,
    )


def _writes(core: Core) -> list[str]:
    works = [core.work, *core.kept.values()]
    return sorted({work.checkpoint_id for work in works if work and _writes_now(work)})


def _running(core: Core, now: float) -> Running | None:
    """What the open checkpoint does; if that is nothing, the oldest write that goes on after its release."""
    phase, work = core.machine.phase, core.work
    operation = None
    if work is not None:
        capturing = phase is Phase.PREPARED and work.capturing
        operation = Operation.CAPTURE if capturing else _RUNNING.get(phase)
    if work is None or operation is None:
        operation, work = Operation.COMMIT, next((kept for kept in core.kept.values() if _writes_now(kept)), None)
    if work is None:
        return None
    total = len(work.captured.records) if work.captured else 0
    return Running(str(operation), now - work.began, work.records_done, total, work.bytes_done, work.bytes_total)


def _writes_now(work: Work) -> bool:
    return work.commit is not None and not work.commit.done()
