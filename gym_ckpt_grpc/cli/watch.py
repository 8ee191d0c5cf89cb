"""`gym-ckpt watch`: every change of every participant, as a live table, as lines, or as JSON lines."""

from __future__ import annotations

import sys
from contextlib import aclosing, nullcontext
from typing import Any

import orjson
from rich.live import Live
from rich.table import Table

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, size, table
from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator import Fleet, Sighting
from gym_ckpt_grpc.coordinator import watch as sightings_of

COLUMNS = (
    "participant",
    "phase",
    "checkpoint",
    "lease s",
    "blockers",
    "oldest",
    "records",
    "bytes",
    "pending",
    "marks",
)


async def watch(
    fleet: Fleet,
    token: TokenSource | None,
    *,
    allow_insecure: bool,
    tls: ClientTls | None,
    as_json: bool,
    live: bool,
) -> Exit:
    """Until interrupted. live: redraw one table, as on a terminal; else one line per change."""
    newest: dict[str, Sighting] = {}
    redrawn = live and not as_json
    with Live(_table(newest), console=people, auto_refresh=False) if redrawn else nullcontext() as shown:
        async with aclosing(sightings_of(fleet, token=token, allow_insecure=allow_insecure, tls=tls)) as changes:
            async for sighting in changes:
                newest[sighting.address] = sighting
                if shown is not None:
                    shown.update(_table(newest), refresh=True)
                elif as_json:
                    sys.stdout.write(orjson.dumps(described(sighting)).decode() + "\n")
                    sys.stdout.flush()
                else:
                    people.print(_line(sighting), markup=False, soft_wrap=True)
    return Exit.OK


def described(sighting: Sighting) -> dict[str, Any]:
    """One change, for programs. Seconds, without instants of any clock."""
    told: dict[str, Any] = {
        "participant": str(sighting.identity or sighting.server.service),
        "address": sighting.address,
        "finding": sighting.finding.name,
        "message": sighting.message,
    }
    status = sighting.status
    if status is None:
        return told
    report = wire.report_from(status.report)
    oldest = max(report.blockers, key=lambda blocker: blocker.age, default=None)
    return {
        **told,
        "phase": wire.phase_from(status.phase).name,
        "checkpoint_id": status.active_checkpoint_id,
        "lease_remaining": wire.seconds(status.lease_remaining) if status.HasField("lease_remaining") else None,
        "blocker_count": report.blocker_count,
        "oldest": {
            "episode": oldest.episode.capture_key if oldest.episode else oldest.worker,
            "reason": oldest.reason.name,
            "age": oldest.age,
            "place": oldest.place,
        }
        if oldest
        else None,
        "operation": status.progress.operation,
        "records_done": status.progress.records_done,
        "records_total": status.progress.records_total,
        "bytes_done": status.progress.bytes_done,
        "bytes_total": status.progress.bytes_total,
        "restored_pending": status.restored_pending,
        "marks_held": status.marks_held,
    }


def _cells(sighting: Sighting) -> list[str]:
    told = described(sighting)
    if sighting.status is None:
        return [told["participant"], told["finding"], told["message"], *[""] * (len(COLUMNS) - 3)]
    oldest, lease = told["oldest"], told["lease_remaining"]
    total = told["records_total"]
    return [
        told["participant"],
        told["phase"] if sighting.ok else f"{told['phase']} ({told['finding']})",
        told["checkpoint_id"],
        "" if lease is None else f"{lease:.1f}",
        str(told["blocker_count"]),
        f"{oldest['episode']} {oldest['reason']} {oldest['age']:.1f} s {oldest['place']}".rstrip() if oldest else "",
        f"{told['records_done']}/{total}" if total else "",
        size(told["bytes_done"]) if told["bytes_done"] else "",
        str(told["restored_pending"] or ""),
        str(told["marks_held"] or ""),
    ]


def _line(sighting: Sighting) -> str:
    named = zip(COLUMNS[1:], _cells(sighting)[1:], strict=True)
    return f"{_cells(sighting)[0]}: " + " ".join(f"{name}={cell}" for name, cell in named if cell)


def _table(newest: dict[str, Sighting]) -> Table:
    rows = [_cells(sighting) for sighting in sorted(newest.values(), key=lambda s: str(s.identity or s.server.service))]
    return table("", COLUMNS, rows)
