"""Looking: a GetStatus of every declared server at once, and what the answers mean. Source: coordination section 2."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import grpc

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.coordinator.calls import failure_of, identity_of
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import DiscoveryFailed
from gym_ckpt_grpc.coordinator.fanout import all_of
from gym_ckpt_grpc.coordinator.fleet import Endpoint, Fleet, Server
from gym_ckpt_grpc.coordinator.member import Connections, Credentials, Member, by_listing_order
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gymckpt.v1 import participant_pb2

CONNECTION_TRIES = 3
CONNECTION_PAUSE = 0.3
"""Seconds before the second try; doubled before the third."""


class Finding(enum.IntEnum):
    """Mirror of `gymckpt.v1.ServerFinding`, without its prefix; a test keeps the two equal."""

    UNSPECIFIED = 0
    OK = 1
    DOWN = 2
    SILENT = 3
    TOO_FEW = 4
    NOT_A_PARTICIPANT = 5
    INCOMPATIBLE = 6
    WRONG_IDENTITY = 7
    REFUSED = 8
    DUPLICATE = 9
    BUSY = 10


MISTAKES = frozenset({Finding.WRONG_IDENTITY, Finding.REFUSED, Finding.DUPLICATE})
"""Mistakes of a configuration, not outages: being optional does not excuse them."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What looking at one server found.

    identity, status: what it answered, if it did. message: for people. seconds: how long it took.
    """

    server: Server
    address: str
    finding: Finding
    identity: ParticipantIdentity | None = None
    status: participant_pb2.ParticipantStatus | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.finding is Finding.OK

    def __str__(self) -> str:
        return f"{self.server.service} at {self.address}: {self.finding.name} {self.message}".rstrip()


@dataclass(frozen=True, slots=True)
class Membership:
    """Who takes part: members in listing order, and the optional servers left out, with the reason."""

    members: tuple[Member, ...]
    sightings: tuple[Sighting, ...]
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def highest_epoch(self) -> int:
        """The highest epoch that any participant has obeyed."""
        return max((s.status.highest_epoch for s in self.sightings if s.status), default=0)

    def open_checkpoints(self) -> set[str]:
        """Ids of checkpoints and restores found open."""
        return {s.status.active_checkpoint_id for s in self.sightings if s.status and s.status.active_checkpoint_id}


async def look_at(
    fleet: Fleet,
    *,
    token: TokenSource | None = None,
    timeout: float = 10.0,
    allow_insecure: bool = False,
    tls: ClientTls | None = None,
) -> list[Sighting]:
    """Look at a fleet once, without a coordinator: claims no epoch and changes nothing."""
    connections = Connections(Credentials(token=token, allow_insecure=allow_insecure, tls=tls))
    try:
        return await look(await fleet.resolve(), connections, timeout)
    finally:
        await connections.close()


async def look(endpoints: Sequence[Endpoint], connections: Connections, timeout: float) -> list[Sighting]:
    """Look at all at once, each at most `timeout` seconds; one sighting per endpoint. Fails for none."""
    found = await all_of([_look_at(endpoint, connections, timeout) for endpoint in endpoints])
    return _compare(found)


async def _look_at(endpoint: Endpoint, connections: Connections, timeout: float) -> Sighting:
    begun, deadline = time.monotonic(), Deadline(timeout)
    server, address = endpoint.server, endpoint.address
    if endpoint.problem:
        return Sighting(server, address, Finding.DOWN, message=endpoint.problem)
    stub, channel = connections.stub(address), connections.channel(address)

    def sighting(finding: Finding, message: str) -> Sighting:
        return Sighting(server, address, finding, message=message, seconds=time.monotonic() - begun)

    for attempt in range(CONNECTION_TRIES):
        try:
            reply = await stub.GetStatus(participant_pb2.GetStatusRequest(), timeout=deadline.left())
        except grpc.aio.AioRpcError as failure:
            finding, message = failed_finding(failure, server, address, channel)
            if finding is not Finding.DOWN or attempt + 1 == CONNECTION_TRIES:
                return sighting(finding, f"{message} ({time.monotonic() - begun:.1f} s, {attempt + 1} tries)")
            pause = CONNECTION_PAUSE * 2**attempt
            if deadline.left() <= pause:
                return sighting(finding, f"{message} ({time.monotonic() - begun:.1f} s, {attempt + 1} tries)")
            await asyncio.sleep(pause)
            continue
        return sighting_of(server, address, reply, begun)
    raise AssertionError("unreachable")


def sighting_of(
    server: Server,
    address: str,
    reply: participant_pb2.GetStatusResponse | participant_pb2.WatchStatusResponse,
    begun: float,
) -> Sighting:
    """What a status says about the server that gave it. begun: monotonic seconds of the question."""
    try:
        identity = identity_of(reply)
    except ValueError as unknown:
        return Sighting(server, address, Finding.WRONG_IDENTITY, message=str(unknown))
    finding, message = _judge(server, identity)
    return Sighting(server, address, finding, identity, reply.status, message, time.monotonic() - begun)


def failed_finding(
    failure: grpc.aio.AioRpcError, server: Server, address: str, channel: grpc.aio.Channel
) -> tuple[Finding, str]:
    """What a failed status call says about a server."""
    error, transport = failure_of(failure, server.service, address)
    if error.code in (ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED):
        return Finding.REFUSED, "credentials were refused"
    if transport == "UNIMPLEMENTED":
        return Finding.NOT_A_PARTICIPANT, "serves no ParticipantService"
    if transport == "DEADLINE_EXCEEDED":
        connected = channel.get_state() is grpc.ChannelConnectivity.READY
        return (Finding.SILENT, "connected, no answer") if connected else (Finding.DOWN, "no connection in time")
    if transport == "UNAVAILABLE":
        return Finding.DOWN, (failure.details() or "no connection")[:300]
    return Finding.INCOMPATIBLE, f"answers GetStatus with {error}"


def _judge(server: Server, identity: ParticipantIdentity) -> tuple[Finding, str]:
    declared = (server.state_kind, server.service, server.instance or identity.instance)
    if identity.place != declared:
        return Finding.WRONG_IDENTITY, f"declared as {'/'.join(declared)}, answers as {identity}"
    if identity.protocol_minor < server.protocol_minor:
        return Finding.INCOMPATIBLE, f"speaks minor {identity.protocol_minor}, {server.protocol_minor} is needed"
    lacking = sorted(set(server.capabilities) - set(identity.capabilities))
    if lacking:
        has = ", ".join(identity.capabilities) or "none"
        return Finding.INCOMPATIBLE, f"lacks {', '.join(lacking)}, has {has}"
    return Finding.OK, ""


def _compare(found: list[Sighting]) -> list[Sighting]:
    """Findings that only several answers together show: DUPLICATE, TOO_FEW."""
    incarnations: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for s in found:
        if s.ok and s.identity:
            incarnations[s.identity.place].add(s.identity.incarnation_id)
    result = []
    for s in found:
        if s.ok and s.identity and len(incarnations[s.identity.place]) > 1:
            who = ", ".join(x.address for x in found if x.ok and x.identity and x.identity.place == s.identity.place)
            s = replace(s, finding=Finding.DUPLICATE, message=f"{s.identity} is claimed by the servers at {who}")
        result.append(s)
    return [_count(s, result) for s in result]


def _count(sighting: Sighting, found: list[Sighting]) -> Sighting:
    if not sighting.ok or sighting.server.instances == 1:
        return sighting
    same = {s.identity.incarnation_id for s in found if s.ok and s.identity and s.server == sighting.server}
    if len(same) >= sighting.server.instances:
        return sighting
    message = f"{len(same)} of {sighting.server.instances} of {sighting.server.service}"
    return replace(sighting, finding=Finding.TOO_FEW, message=message)


def membership(sightings: Iterable[Sighting], connections: Connections) -> Membership:
    """Who takes part. Raises DiscoveryFailed naming every fault that being optional does not excuse."""
    sightings = tuple(sightings)
    faults = [s for s in sightings if not s.ok and (s.server.required or s.finding in MISTAKES)]
    if faults:
        raise DiscoveryFailed("; ".join(str(fault) for fault in faults), sightings)
    members: dict[str, Member] = {}
    excluded: dict[str, str] = {}
    for s in sightings:
        if s.identity and s.finding in (Finding.OK, Finding.TOO_FEW):
            # Two addresses with one incarnation are one participant: the first is called.
            endpoint = Endpoint(s.server, s.address)
            members.setdefault(s.identity.incarnation_id, connections.member(endpoint, s.identity))
        if not s.ok:
            place = str(s.identity) if s.identity else f"{s.server.kind}/{s.server.service}/{s.server.instance or '0'}"
            one_of_several = not s.identity and s.address != s.server.address
            name = place
            if s.finding is Finding.TOO_FEW or one_of_several:  # not to be taken for a member that is there
                name = f"{place}#{s.address if one_of_several else 'missing'}"
            excluded[name] = f"{s.finding.name}: {s.message}"
    return Membership(tuple(by_listing_order(members.values())), sightings, excluded)
