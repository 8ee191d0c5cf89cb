"""`PolicyClient`: the only way an agent waits for a policy call while it counts at its boundary.

While a call is outstanding the session stands at its last boundary, so a checkpoint need not wait for the
generation. That is right only if the policy server holds its replies while closed, so the client counts as
waiting only after it has seen the gate header of its own service. Source: participants section 9.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gym_ckpt_grpc.participants.agent_sessions import SessionContext
from gym_ckpt_grpc.participants.names import DataPlaneNames, header
from gym_ckpt_grpc.participants.refusals import raise_refusal

NOT_IN_DIGEST = frozenset({"stream", "stream_options", "user", "metadata", "request_id"})
"""Fields of a request that do not change its answer (the fixed list of participants section 8.4)."""


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """One call to the policy server. path: prefix included. body: JSON-able."""

    path: str
    body: Any
    headers: Mapping[str, str]
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class PolicyReply:
    """Its reply. body: decoded JSON, JSON-able so that it can be kept in a checkpoint."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)


Transport = Callable[[PolicyRequest], Awaitable[PolicyReply]]
"""Sends a request to the policy server and nowhere else; raises what it likes if it cannot."""


class PolicyClient:
    """Calls one policy service.

    send: the transport to it. service: its name, as in its gate header.
    """

    def __init__(self, send: Transport, *, service: str, names: DataPlaneNames | None = None) -> None:
        self._send = send
        self._service = service
        self._names = names or DataPlaneNames()
        self.gated = False
        """Whether the gate of this service has been seen; before that a call counts as RUNNING."""

    async def probe(self, path: str = "/health") -> bool:
        """Ask a route of the server, to see its gate early; whether it was seen."""
        await self._exchange(PolicyRequest(path, None, {}, "GET"))
        return self.gated

    async def call(
        self, session: SessionContext, path: str, body: Any, *, headers: Mapping[str, str] | None = None
    ) -> PolicyReply:
        """Send a request under the session's episode and wait for the reply.

        path: such as `/v1/responses`, without the prefix. A reply or an error that comes while a checkpoint is
        open is given once that is over; only a cancellation goes through at once. Raises the ControlError that a
        gate answered, and what the transport raises.
        """
        digest = request_digest(path, body)
        kept = session.take_restored_reply(digest)
        if kept is not None:
            return PolicyReply(kept["status"], kept["body"], kept["headers"])
        sent = {**(headers or {}), self._names.waiting_header: "1"} if self.gated else dict(headers or {})
        request = PolicyRequest(self._names.path_of(session.episode, path), body, sent)
        if not self.gated:
            return _checked(await self._exchange(request))
        return _checked(await self._wait(session, request, digest))

    async def _wait(self, session: SessionContext, request: PolicyRequest, digest: str) -> PolicyReply:
        session.begin_waiting()
        try:
            try:
                reply = await self._exchange(request)
            finally:
                session.end_waiting()
        except Exception:
            await session.stay(digest)
            raise
        if session.checkpoint_open:
            if reply.status < 300:
                session.keep(digest, {"status": reply.status, "body": reply.body, "headers": dict(reply.headers)})
            await session.stay(digest)
        return reply

    async def _exchange(self, request: PolicyRequest) -> PolicyReply:
        reply = await self._send(request)
        gate = header(reply.headers, self._names.gate_header)
        if gate is not None and gate.startswith(f"{self._service}/"):
            self.gated = True
        return reply


def _checked(reply: PolicyReply) -> PolicyReply:
    raise_refusal(reply.status, reply.body, reply.headers)
    return reply


def request_digest(path: str, body: Any) -> str:
    """SHA-256, in hex, of what a request asks for: its path and body without what changes no answer."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in NOT_IN_DIGEST}
    return hashlib.sha256(path.encode() + b"\0" + orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
