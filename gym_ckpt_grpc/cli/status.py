"""`gym-ckpt status`: where every participant of a fleet stands. Claims nothing and changes nothing."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, say, table
from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator import Fleet, Sighting, look_at


async def status(
    fleet: Fleet,
    token: TokenSource | None,
    *,
    timeout: float,
    allow_insecure: bool,
    tls: ClientTls | None,
    as_json: bool,
) -> Exit:
    """Ask every participant at once, each at most `timeout` seconds; UNREACHABLE if one has a bad finding."""
    found = await look_at(fleet, token=token, timeout=timeout, allow_insecure=allow_insecure, tls=tls)
    if as_json:
        print_json({"servers": [_described(sighting) for sighting in found]})
    else:
        columns = ["participant", "address", "finding", "phase", "checkpoint", "lease s", "blockers", "counts"]
        people.print(table("", columns, [_row(sighting) for sighting in found]))
        for sighting in found:
            if not sighting.ok:
                say(people, "red", str(sighting))
    return Exit.OK if all(sighting.ok for sighting in found) else Exit.UNREACHABLE


def _described(sighting: Sighting) -> dict[str, Any]:
    answer = MessageToDict(sighting.status, preserving_proto_field_name=True) if sighting.status else None
    return {
        "service": sighting.server.service,
        "address": sighting.address,
        "finding": sighting.finding.name,
        "message": sighting.message,
        "status": answer,
    }


def _row(sighting: Sighting) -> list[object]:
    answer = sighting.status
    if answer is None:
        return [sighting.server.service, sighting.address, sighting.finding.name, "", "", "", "", ""]
    lease = f"{wire.seconds(answer.lease_remaining):.1f}" if answer.HasField("lease_remaining") else ""
    counts = " ".join(f"{name}={count}" for name, count in sorted(answer.report.counts.items()) if count)
    return [
        str(sighting.identity),
        sighting.address,
        sighting.finding.name,
        wire.phase_from(answer.phase).name,
        answer.active_checkpoint_id,
        lease,
        str(answer.report.blocker_count),
        counts,
    ]
