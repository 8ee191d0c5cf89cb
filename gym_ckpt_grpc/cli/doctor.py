"""`gym-ckpt doctor`: looks a deployment over and names what to do. Changes nothing, compares no clocks."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from gym_ckpt_grpc.cli.carrying import Access
from gym_ckpt_grpc.cli.checks import Check, Level
from gym_ckpt_grpc.cli.doctor_root import check_root
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.listeners import Listeners, is_here
from gym_ckpt_grpc.cli.output import people, print_json
from gym_ckpt_grpc.control import error_from, open_channel, wire
from gym_ckpt_grpc.coordinator import Finding, Fleet, Sighting
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.protocol.identity import PROTOCOL_MINOR
from gymckpt.v1 import participant_pb2, participant_pb2_grpc

OLD_MARK = 3600.0
"""Seconds after which a mark that nobody forgot is worth a word."""

ADVICE = {
    Finding.DOWN: "start it, or mend its address in the fleet's file",
    Finding.SILENT: "it is connected and does not answer: look at its log; a blocked event loop or a stopped process",
    Finding.TOO_FEW: "start the missing instances, or mend `instances` in the fleet's file",
    Finding.NOT_A_PARTICIPANT: "give the control plane's address, or say `participant: false` in the fleet's file",
    Finding.INCOMPATIBLE: "install a newer gym-ckpt-grpc there, or mend what the fleet's file asks for",
    Finding.WRONG_IDENTITY: "two servers are mixed up: mend kind, service or address in the fleet's file",
    Finding.REFUSED: "give the deployment's token with --token-file, or its certificate with --tls-cert and --tls-key",
    Finding.DUPLICATE: "two processes claim one place: stop one, or give each an instance of its own",
}
COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


async def doctor(fleet: Fleet, access: Access, *, root: str, as_json: bool) -> Exit:
    """Print all checks; UNREACHABLE if a server is not reached or refuses, FAILED for any other fault."""
    found = await _look(fleet, access)
    listeners = await asyncio.to_thread(Listeners)
    checks = [check for sighting in found for check in _reached(sighting, listeners)]
    checks += await _anonymous(fleet, access, found)
    for sighting in found:
        if sighting.status is not None:
            checks += [await _role(sighting, access), *_state(sighting, sighting.status)]
    checks += _open(found)
    highest = max((s.status.highest_epoch for s in found if s.status), default=0)
    checks += await asyncio.to_thread(check_root, root, highest)
    failed = [check for check in checks if check.level is Level.FAIL]
    if as_json:
        print_json({"ok": not failed, "checks": [check.described() for check in checks]})
    else:
        _print(checks)
    if any(check.unreachable for check in failed):
        return Exit.UNREACHABLE
    return Exit.FAILED if failed else Exit.OK


async def _look(fleet: Fleet, access: Access, *, anonymous: bool = False) -> list[Sighting]:
    return await access.look_at(fleet, anonymous=anonymous)


def _name(sighting: Sighting) -> str:
    return str(sighting.identity or f"{sighting.server.kind}/{sighting.server.service}")


# ---- one server


def _reached(sighting: Sighting, listeners: Listeners) -> list[Check]:
    name, address = _name(sighting), sighting.address
    here = listeners.at(address) if is_here(address) else []
    who = ", ".join(str(process) for process in here)
    if not sighting.ok:
        advice = ADVICE.get(sighting.finding, "look at its log")
        text = f"{sighting.finding.name} at {address}: {sighting.message}"
        if sighting.finding is Finding.DOWN and is_here(address) and listeners.known:
            if not listeners.taken(address):
                text += "; nobody listens there on this host"
            elif who:
                text += f"; {who} listens there"
                advice = "what listens there is no participant: give the control plane's address, or free the port"
        lost = sighting.finding in (Finding.DOWN, Finding.SILENT, Finding.REFUSED)
        level = Level.FAIL if sighting.server.required or sighting.finding is not Finding.DOWN else Level.WARN
        return [Check(level, name, text, advice, unreachable=lost)]
    checks = [Check(Level.OK, name, f"answers at {address} in {sighting.seconds * 1000:.0f} ms")]
    if len(here) > 1:
        advice = "calls reach either of them: stop one; servers of this project never share a port"
        checks.append(Check(Level.FAIL, name, f"{address} is shared by {who}", advice))
    elif who:
        checks.append(Check(Level.OK, name, f"{address} is served by {who}"))
    return checks


async def _anonymous(fleet: Fleet, access: Access, found: list[Sighting]) -> list[Check]:
    reached = {s.address for s in found if s.status is not None}
    checks = []
    for s in await _look(fleet, access, anonymous=True):
        if s.address not in reached:
            continue
        if s.finding is Finding.REFUSED:
            checks.append(Check(Level.OK, _known_name(s, found), "refuses a call without a token"))
        elif s.status is None and access.tls is not None:
            checks.append(Check(Level.OK, _known_name(s, found), "refuses a connection without a certificate"))
        else:
            advice = "start it with tokens: whoever reaches its port can close it"
            checks.append(Check(Level.FAIL, _known_name(s, found), "answers a call without a token", advice))
    return checks


def _known_name(sighting: Sighting, found: list[Sighting]) -> str:
    return next(_name(known) for known in found if known.address == sighting.address)


async def _role(sighting: Sighting, access: Access) -> Check:
    """Which role the token has: credentials are looked at first, so an empty call says it and changes nothing."""
    name = _name(sighting)
    shown = "token" if access.token else "certificate" if access.tls and access.tls.has_certificate else ""
    channel = open_channel(sighting.address, token=access.token, allow_insecure=access.allow_insecure, tls=access.tls)
    try:
        stub = participant_pb2_grpc.ParticipantServiceStub(channel)
        await stub.RenewLease(participant_pb2.RenewLeaseRequest(), timeout=access.timeout)
    except grpc.aio.AioRpcError as failure:
        try:
            error = error_from(failure)
        except ValueError:
            error = None
        if error is not None and error.code is ErrorCode.INVALID_ARGUMENT:
            return Check(Level.OK, name, f"the {shown} is a controller's" if shown else "no token is needed")
        if error is not None and error.code is ErrorCode.PERMISSION_DENIED:
            advice = "it can look; prepare, commit, resume and the like need the controller's token"
            return Check(Level.WARN, name, f"the {shown} is an observer's", advice)
        return Check(Level.WARN, name, f"the token's role is not known: {error or failure.code().name}", "ask again")
    finally:
        await channel.close()
    return Check(Level.FAIL, name, "accepts a call without a checkpoint id", "it is no participant of this protocol")


def _state(sighting: Sighting, status: participant_pb2.ParticipantStatus) -> list[Check]:
    name, minor = _name(sighting), status.participant.protocol_minor
    checks = [Check(Level.OK, name, f"speaks protocol 1.{minor}, as this command does")]
    if minor != PROTOCOL_MINOR:
        advice = "a newer side leaves out what the older does not know: bring both to one version"
        checks = [Check(Level.WARN, name, f"speaks protocol 1.{minor}, this command 1.{PROTOCOL_MINOR}", advice)]
    age = wire.seconds(status.oldest_mark_age)
    text = f"holds {status.marks_held} marks of retired rollouts, the oldest for {age:.0f} s"
    if not status.marks_held:
        checks.append(Check(Level.OK, name, "holds no marks of retired rollouts"))
    elif age < OLD_MARK:
        checks.append(Check(Level.OK, name, text))
    else:
        checks.append(Check(Level.WARN, name, text, "once those rollouts are finished: gym-ckpt forget ROLLOUT"))
    if status.leases_expired:
        text = f"opened by itself {status.leases_expired} times since it started"
        checks.append(Check(Level.WARN, name, text, "a controller died or was cut off: look at its log"))
    if status.restored_pending and not status.active_checkpoint_id:
        text = f"{status.restored_pending} restored episodes have not been started"
        checks.append(Check(Level.WARN, name, text, "send the attempts that restore printed, or retire them"))
    if "unnotified_changes" in status.extra:
        text = f"became ready unnoticed {status.extra['unnotified_changes']} times"
        checks.append(Check(Level.WARN, name, text, "its state owner must call changed() when readiness changes"))
    return checks


# ---- the fleet as a whole


def _open(found: list[Sighting]) -> list[Check]:
    checks = []
    by_id: dict[str, list[participant_pb2.ParticipantStatus]] = {}
    for s in found:
        if s.status and s.status.active_checkpoint_id:
            by_id.setdefault(s.status.active_checkpoint_id, []).append(s.status)
    for checkpoint_id, statuses in by_id.items():
        left = max(wire.seconds(status.lease_remaining) for status in statuses)
        phases = ", ".join(sorted({wire.phase_from(status.phase).name for status in statuses}))
        closed = max(wire.seconds(status.closed_for) for status in statuses)
        checks.append(
            Check(
                Level.WARN,
                "checkpoints",
                f"{checkpoint_id} of controller {statuses[0].controller_id} is open at {len(statuses)} of {len(found)} "
                f"({phases}), closed for {closed:.0f} s, its lease ends in {left:.0f} s at the latest",
                "its controller goes on with it, or gym-ckpt resume --session FILE, or wait for the lease",
            )
        )
    return checks or [Check(Level.OK, "checkpoints", "none is open")]


def _print(checks: list[Check]) -> None:
    for check in checks:
        people.print(f"[{COLOURS[check.level]}]{check.level.name:<4}[/]", end=" ")
        people.print(f"{check.subject}: {check.message}", markup=False, soft_wrap=True)
        if check.advice and check.level is not Level.OK:
            people.print(f"     {check.advice}", markup=False, soft_wrap=True)
    counts: dict[str, Any] = {level.name: sum(1 for c in checks if c.level is level) for level in Level}
    people.print(", ".join(f"{count} {name}" for name, count in counts.items()), markup=False)
