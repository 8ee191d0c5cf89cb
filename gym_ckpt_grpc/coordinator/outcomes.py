"""How one participant's part of an operation ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)  # no slots: they keep Generic from being called with its parameter
class Outcome(Generic[R_co]):
    """One participant's answer to one operation, retries included.

    operation: name of the RPC. identity: whom it was sent to, as pinned. reply: the message, or None on failure.
    error: the typed failure, or None. transport: the gRPC status where the failure carried no ControlError.
    duration: seconds from the first try to the end. sent_at: monotonic seconds at which the last try was sent.
    tries: calls sent. begun: monotonic seconds of the first try.
    """

    operation: str
    identity: ParticipantIdentity
    reply: R_co | None = None
    error: ControlError | None = None
    transport: str = ""
    duration: float = 0.0
    sent_at: float = 0.0
    tries: int = 1
    begun: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def name(self) -> str:
        """`kind/service/instance`."""
        return str(self.identity)

    @property
    def answer(self) -> R_co:
        """The reply of a success; raises the error of a failure."""
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


def in_listing_order(outcomes: Iterable[Outcome[Any]]) -> list[Outcome[Any]]:
    """Outcomes by kind, service and instance, whoever answered first."""
    order = list(ParticipantKind)
    return sorted(outcomes, key=lambda o: (order.index(o.identity.kind), o.identity.service, o.identity.instance))


def failures(outcomes: list[Outcome[Any]]) -> list[Outcome[Any]]:
    """Those that failed."""
    return [outcome for outcome in outcomes if outcome.error]
