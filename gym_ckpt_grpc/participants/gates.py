"""`RouteGate`: the gate of servers whose owner does the rest in its handlers (environment, agent)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from gym_ckpt_grpc.participants.admission import HELD, Admission, GateRequest, Held, Visit
from gym_ckpt_grpc.participants.names import DataPlaneNames
from gym_ckpt_grpc.protocol.errors import ControlError

_PASS = Visit()


class RouteGate:
    """Holds every route while closed but those passing, and refuses retired attempts there.

    passing: ends of paths that are always admitted: their handlers ask the owner, which parks or refuses them.
    """

    def __init__(self, admission: Admission, names: DataPlaneNames, *, passing: Sequence[str] = ()) -> None:
        self._admission = admission
        self._names = names
        self._passing = tuple(passing)

    @property
    def names(self) -> DataPlaneNames:
        return self._names

    async def enter(self, request: GateRequest) -> Visit:
        """Hold or admit; raises StaleAttempt for a retired attempt."""
        if self._passing and request.path.endswith(self._passing):
            return _PASS
        return await self._admission.admit(lambda: self._attempt(request), request.episode)

    def reply_headers(self) -> Mapping[str, str]:
        return {}

    def refused(self, error: ControlError) -> None:
        self._admission.refused(error)

    def _attempt(self, request: GateRequest) -> Visit | Literal[Held.HELD]:
        self._admission.check_mark(request.episode)
        return HELD if self._admission.closed else _PASS
