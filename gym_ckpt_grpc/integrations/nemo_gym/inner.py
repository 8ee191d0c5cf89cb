"""Calls of a server to itself."""

from __future__ import annotations

from collections.abc import Mapping

from gym_ckpt_grpc.participants import DataPlaneNames, Gate, GateRequest, Visit
from gym_ckpt_grpc.protocol.errors import ControlError

INNER_HEADER = "x-gymckpt-inner"
"""Marks a call of a server to itself, from a request that is counted already."""

_PASS = Visit()


class SelfCalls:
    """A gate that passes what the server sends to itself: only the root of a tree of requests is counted or held.

    secret: the value of INNER_HEADER in such calls, known to this process only.
    """

    def __init__(self, gate: Gate, secret: str) -> None:
        self._gate = gate
        self._secret = secret

    @property
    def names(self) -> DataPlaneNames:
        return self._gate.names

    async def enter(self, request: GateRequest) -> Visit:
        if request.headers.get(INNER_HEADER) == self._secret:
            return _PASS
        return await self._gate.enter(request)

    def reply_headers(self) -> Mapping[str, str]:
        return self._gate.reply_headers()

    def refused(self, error: ControlError) -> None:
        self._gate.refused(error)
