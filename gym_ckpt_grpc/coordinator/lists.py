"""ListEpisodes: the full list behind a count. The whole stream is read again after a transport failure."""

from __future__ import annotations

import asyncio
import time

import grpc

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.coordinator.calls import Retries, failure_of, identity_of, identity_problem, may_repeat
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.protocol.errors import ControlError, OutOfTime
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2

METHOD = "ListEpisodes"


async def list_episodes(
    member: Member,
    kind: EpisodeListKind,
    deadline: Deadline,
    *,
    checkpoint_id: str = "",
    retries: Retries | None = None,
) -> Outcome[tuple[EpisodeId, ...]]:
    """A whole list of one participant. Never raises for a failure of the call: it is in the outcome."""
    retries = retries or Retries()
    request = participant_pb2.ListEpisodesRequest(
        kind=participant_pb2.EpisodeListKind.ValueType(int(kind)), checkpoint_id=checkpoint_id
    )
    begun, tries, sent_at = time.monotonic(), 0, time.monotonic()
    error: ControlError = OutOfTime(f"no time was left to begin {METHOD}", participant=member.name)
    transport = ""

    def outcome(found: tuple[EpisodeId, ...] | None, problem: ControlError | None) -> Outcome[tuple[EpisodeId, ...]]:
        took = time.monotonic() - begun
        return Outcome(METHOD, member.identity, found, problem, transport, took, sent_at, tries)

    while (left := deadline.left()) > 0:
        tries, sent_at, found = tries + 1, time.monotonic(), list[EpisodeId]()
        try:
            async for batch in member.stub.ListEpisodes(request, timeout=left):
                if changed := identity_problem(member.identity, identity_of(batch)):
                    return outcome(None, changed)
                found += wire.episodes_from(batch.episodes)
            transport = ""
            return outcome(tuple(found), None)
        except grpc.aio.AioRpcError as failure:
            error, transport = failure_of(failure, member.name, member.address)
        pause = retries.pause(tries, error)
        if not may_repeat(METHOD, error, transport) or pause >= deadline.left():
            break
        await asyncio.sleep(pause)
    return outcome(None, error)
