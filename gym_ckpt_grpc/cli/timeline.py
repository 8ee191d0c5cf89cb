"""`gym-ckpt timeline`: how the taking of a checkpoint went, a bar per participant and step, from its event log."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.text import Text

from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, printable, size, table
from gym_ckpt_grpc.cli.roots import LISTED, described_troubles, open_root, tell, tell_troubles
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.storage.event_log import MOMENTS, EventLog, LoggedStep, read_event_log
from gym_ckpt_grpc.storage.viewing import CheckpointView, Trouble, view_checkpoint

WIDTH = 40
"""Characters of the longest bar."""
ORDER = ("Prepare", "Capture", "Commit", "Resume")
NO_LOG = "no event log: its coordinator ended before it was written, or an earlier version took the checkpoint"


def timeline(root: str, checkpoint: str, *, as_json: bool) -> Exit:
    """Print one checkpoint's steps; FAILED if something of it cannot be read. One without an event log is fine."""
    opened = open_root(root)
    view, log, troubles = view_checkpoint(opened, checkpoint), None, list[Trouble]()
    try:
        log = read_event_log(opened.files, view.location)
    except StateCorrupt as error:
        troubles.append(Trouble(view.location.events.removeprefix(f"{opened.path}/"), opened.shortened(error.message)))
    if log is not None and log.unreadable:
        name = view.location.events.removeprefix(f"{opened.path}/")
        troubles.append(Trouble(name, f"{log.unreadable:,} of its steps cannot be read"))
    damaged = [*view.troubles, *troubles]
    if as_json:
        print_json({**described(view, log), "problems": described_troubles(damaged)})
    else:
        _tell(view, log, missing=not troubles)
        tell_troubles(damaged)
    return Exit.FAILED if damaged else Exit.OK


def described(view: CheckpointView, log: EventLog | None) -> dict[str, Any]:
    """The timeline for programs. Times are seconds from the first closing, `began` seconds since 1970."""
    manifest = view.manifest
    return {
        "checkpoint_id": view.checkpoint_id,
        "sequence_number": view.publication.number if view.publication else 0,
        "created": manifest.created if manifest else "",
        "traceparent": (manifest.traceparent or "") if manifest else "",
        "event_log": log is not None,
        "began": log.began if log else None,
        "moments": dict(log.moments) if log else {},
        "steps": [_described(step) for step in log.steps] if log else [],
        "left_out": log.left_out if log else 0,
        "members": [
            {"participant": part.name, "records": part.count, "bytes": part.written_bytes} for part in view.parts
        ],
    }


def _described(step: LoggedStep) -> dict[str, Any]:
    return msgspec.structs.asdict(step)


def _tell(view: CheckpointView, log: EventLog | None, *, missing: bool) -> None:
    state = f"published as number {view.publication.number}" if view.publication else "not published"
    tell((view.checkpoint_id, "bold"), f"  {state}")
    if log is None:
        if missing:
            tell(NO_LOG)
        if view.manifest is not None:
            tell(f"created {view.manifest.created or 'at an unknown time'}, by {view.manifest.controller_id}")
        rows = [[part.name, "?" if part.count is None else part.count, size(part.written_bytes)] for part in view.parts]
        people.print(table("", ["participant", "records", "written"], rows))
        return
    tell(f"began {_instant(log.began)}{_moments(log)}")
    tell_pause(log)
    steps = [step for name in (*ORDER, *_others(log)) for step in _slowest(log, name)]
    span = max((step.end for step in log.steps), default=0.0)
    columns = ["participant", "step", f"0 to {span:.3f} s", "from", "seconds", "records", "written", "outcome"]
    people.print(table("", columns, [_row(step, span) for step in steps]))
    if len(steps) < len(log.steps):
        tell(f"and {len(log.steps) - len(steps):,} more that ended sooner; --json has all")
    if log.left_out:
        tell(f"{log.left_out:,} repeated steps were not kept")


def _instant(began: float) -> str:
    try:
        when = datetime.datetime.fromtimestamp(began, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"
    return when.isoformat(timespec="milliseconds")


def _moments(log: EventLog) -> str:
    known = sorted((log.moments[name], name) for name in MOMENTS if name in log.moments)
    return "".join(f", {name} after {after:.3f} s" for after, name in known)


def tell_pause(log: EventLog) -> None:
    """What the checkpoint cost the rollouts, in one line, as far as it is known."""
    prepared, released = log.moments.get("prepared"), log.moments.get("released")
    if prepared is None or released is None:
        return
    tell(
        f"pause of {released:.3f} s: {prepared:.3f} s until every participant was at its cut, "
        f"{max(0.0, released - prepared):.3f} s beyond it"
    )


def _others(log: EventLog) -> list[str]:
    return sorted({step.step for step in log.steps} - set(ORDER))


def _slowest(log: EventLog, name: str) -> Sequence[LoggedStep]:
    """Of one step what ended last, and what failed first of all: as many as people read, in the order of beginning."""
    mine = [step for step in log.steps if step.step == name]
    chosen = sorted(mine, key=lambda step: (step.outcome == "ok", -step.end))[:LISTED]
    return sorted(chosen, key=lambda step: (step.start, step.participant))


def _row(step: LoggedStep, span: float) -> list[object]:
    good = step.outcome == "ok"
    tries = "" if step.tries == 1 else f" ({step.tries} tries)"
    return [
        step.participant,
        step.step,
        Text(bar(step.start, step.end, span), "cyan" if good else "red"),
        f"{step.start:.3f}",
        f"{step.end - step.start:.3f}",
        str(step.records or ""),
        size(step.bytes) if step.bytes else "",
        Text(printable(step.outcome) + tries, "" if good else "red"),
    ]


def bar(start: float, end: float, span: float) -> str:
    """A stretch of time as text, at least one character of WIDTH."""
    if not 0 <= start <= end <= span or span == 0:
        return "?"
    first = min(WIDTH - 1, int(WIDTH * (start / span)))
    last = max(first + 1, round(WIDTH * (end / span)))
    return f"{' ' * first}{'━' * (last - first)}".ljust(WIDTH)
