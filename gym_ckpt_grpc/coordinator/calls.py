"""One call to one participant: bounded by a deadline, tried again where that is safe.

Retries follow the method's `idempotency_level`, read from the descriptor: after a transport failure (no
ControlError in it) and after codes that the error table calls retryable; jittered from 100 ms to 2 s, honouring
`retry_after`, never past the deadline. An unknown outcome is settled by the same call with the same arguments.
Source: coordination section 1.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor_pb2 import MethodOptions
from google.protobuf.message import Message

from gym_ckpt_grpc.control import error_from, wire
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.encoded import Encoded
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    IncarnationChanged,
    InternalError,
    OutOfTime,
    PermissionDenied,
    StaleController,
    Unauthenticated,
    WorkerUnavailable,
)
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gymckpt.v1 import participant_pb2

Build = Callable[[float], Message | Encoded]
"""Makes the request of one try from the seconds that the try has."""

OnRetry = Callable[[int, ControlError], None]
"""Told before each retry: how many tries failed, and the last failure."""

_METHODS = participant_pb2.DESCRIPTOR.services_by_name["ParticipantService"].methods_by_name
_REPEATABLE = frozenset({MethodOptions.NO_SIDE_EFFECTS, MethodOptions.IDEMPOTENT})
_TRANSPORT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)
"""Statuses that, without a ControlError, leave open what became of the call."""


def repeatable(method: str) -> bool:
    """Whether the method's idempotency_level allows the same call again."""
    return _METHODS[method].GetOptions().idempotency_level in _REPEATABLE


class Jitter(Protocol):
    """Where pauses come from: random.Random, or a test's own."""

    def uniform(self, a: float, b: float, /) -> float: ...


@dataclass(frozen=True, slots=True)
class Retries:
    """Pauses between tries, in seconds: between `shortest` and a ceiling that doubles up to `longest`."""

    shortest: float = 0.1
    longest: float = 2.0
    jitter: Jitter = field(default_factory=random.Random)

    def pause(self, failed_tries: int, error: ControlError) -> float:
        """Seconds to wait after so many failed tries; at least what the error asks for."""
        ceiling = min(self.longest, self.shortest * 2.0 ** min(failed_tries, 16))
        return max(self.jitter.uniform(self.shortest, ceiling), error.retry_after or 0.0)


def failure_of(failure: grpc.aio.AioRpcError, member_name: str, address: str) -> tuple[ControlError, str]:
    """The typed error of a failed call, and the gRPC status if the failure carried no ControlError."""
    try:
        typed = error_from(failure)
    except ValueError:
        typed = None
    if typed is not None:
        typed.participant = typed.participant or member_name
        return typed, ""
    code = failure.code()
    kinds: dict[grpc.StatusCode, type[ControlError]] = {
        grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: OutOfTime,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    }
    kind = kinds.get(code, InternalError)
    text = f"{address} gave {code.name} without a typed error: {(failure.details() or '')[:300]}"
    return kind(text, participant=member_name), code.name


def identity_of(reply: Any) -> ParticipantIdentity:
    """Who sent a reply. Raises ValueError for an unknown kind."""
    return wire.identity_from(reply.status.participant if hasattr(reply, "status") else reply.participant)


def identity_problem(pinned: ParticipantIdentity, found: ParticipantIdentity) -> IncarnationChanged | None:
    """IncarnationChanged naming both, if another process or place answered than the pinned one."""
    if (found.place, found.incarnation_id) == (pinned.place, pinned.incarnation_id):
        return None
    return IncarnationChanged(
        f"expected process {pinned.incarnation_id} of {pinned}, found {found.incarnation_id} of {found}",
        participant=str(pinned),
    )


async def call(
    member: Member,
    method: str,
    build: Build,
    deadline: Deadline,
    *,
    retries: Retries | None = None,
    try_limit: float | None = None,
    on_retry: OnRetry | None = None,
    pin: bool = True,
) -> Outcome[Any]:
    """Call a unary RPC until it succeeds, is refused for good, or the deadline comes.

    build: the request, from the seconds this try has. try_limit: seconds of one try at most. pin: whether a reply
    of another process than the pinned one is a failure. Never raises for a failure of the call: it is in the
    outcome. Cancelling it cancels the try under way.
    """
    retries = retries or Retries()
    begun, tries, sent_at = time.monotonic(), 0, time.monotonic()
    error: ControlError = OutOfTime(f"no time was left to begin {method}", participant=member.name)
    transport = ""

    def outcome(reply: Any, problem: ControlError | None) -> Outcome[Any]:
        took = time.monotonic() - begun
        return Outcome(method, member.identity, reply, problem, transport, took, sent_at, tries, begun)

    while (left := deadline.left()) > 0:
        tries, sent_at = tries + 1, time.monotonic()
        seconds = min(left, try_limit or left)
        try:
            reply = await getattr(member.stub, method)(build(seconds), timeout=seconds)
            changed = identity_problem(member.identity, identity_of(reply)) if pin else None
            transport = ""
            return outcome(None if changed else reply, changed)
        except grpc.aio.AioRpcError as failure:
            error, transport = failure_of(failure, member.name, member.address)
        except ValueError as unknown:  # an identity that this package does not know
            return outcome(None, InternalError(str(unknown), participant=member.name))
        if not may_repeat(method, error, transport):
            break
        pause = retries.pause(tries, error)
        if pause >= deadline.left():
            break
        if on_retry:
            on_retry(tries, error)
        await asyncio.sleep(pause)
    return outcome(None, error)


def may_repeat(method: str, error: ControlError, transport: str) -> bool:
    """Whether a failed call is sent again, time allowing."""
    if isinstance(error, StaleController) or not repeatable(method):
        return False
    if transport:
        return grpc.StatusCode[transport] in _TRANSPORT
    return error.retryable
