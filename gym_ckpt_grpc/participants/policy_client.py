"""`PolicyClient`: the only way an agent waits for a policy call while it counts at its boundary.

While a call is outstanding the session stands at its last boundary, so a checkpoint need not wait for the
generation. That is right only if the policy server holds its replies while closed, so the client counts as
waiting only after it has seen the gate header of its own service. Source: participants section 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_ckpt_grpc.participants.agent_sessions import SessionContext
from gym_ckpt_grpc.participants.names import DataPlaneNames, header
from gym_ckpt_grpc.participants.policy_calls import PolicyReply, PolicyRequest, Transport
from gym_ckpt_grpc.participants.policy_stream import PolicyStream, StreamTransport
from gym_ckpt_grpc.participants.refusals import raise_refusal
from gym_ckpt_grpc.participants.request_digest import request_digest
from gym_ckpt_grpc.protocol.errors import UsageError


class PolicyClient:
    """Calls one policy service.

    send: the transport to it. service: its name, as in its gate header. open_stream: the transport of streamed
    calls, if there are any.
    """

    def __init__(
        self,
        send: Transport,
        *,
        service: str,
        names: DataPlaneNames | None = None,
        open_stream: StreamTransport | None = None,
    ) -> None:
        self._send = send
        self._open_stream = open_stream
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
        digest = request_digest(body, path)
        kept = session.take_restored_reply(digest)
        if kept is not None:
            return PolicyReply(kept["status"], kept["body"], kept["headers"])
        request = self._request(session, path, body, headers)
        if not self.gated:
            return _checked(await self._exchange(request))
        return _checked(await self._wait(session, request, digest))

    def stream(
        self, session: SessionContext, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> PolicyStream:
        """A call whose reply is streamed: `async with client.stream(...) as events: async for event in events: ...`.

        body: without `stream`, which is added. Otherwise as `call`. Raises UsageError without `open_stream`.
        """
        if self._open_stream is None:
            raise UsageError("this policy client was made without open_stream")
        request = self._request(session, path, {**body, "stream": True}, headers)
        key = f"stream:{request_digest(body, path)}"
        return PolicyStream(session, request, self._open_stream, key=key, waits=self.gated, saw=self._saw)

    def _request(
        self, session: SessionContext, path: str, body: Any, headers: Mapping[str, str] | None
    ) -> PolicyRequest:
        sent = {**(headers or {}), self._names.waiting_header: "1"} if self.gated else dict(headers or {})
        return PolicyRequest(self._names.path_of(session.episode, path), body, sent)

    async def _wait(self, session: SessionContext, request: PolicyRequest, digest: str) -> PolicyReply:
        session.begin_waiting()
        try:
            reply = await self._exchange(request)
        except Exception:
            session.end_waiting()
            await session.stay()
            raise
        except BaseException:
            session.end_waiting(cancelled=True)
            raise
        session.end_waiting()
        if reply.status < 300:
            session.keep(digest, {"status": reply.status, "body": reply.body, "headers": dict(reply.headers)})
        if session.checkpoint_open:
            await session.stay()
        return reply

    async def _exchange(self, request: PolicyRequest) -> PolicyReply:
        reply = await self._send(request)
        self._saw(reply.headers)
        return reply

    def _saw(self, headers: Mapping[str, str]) -> None:
        gate = header(headers, self._names.gate_header)
        if gate is not None and gate.startswith(f"{self._service}/"):
            self.gated = True


def _checked(reply: PolicyReply) -> PolicyReply:
    raise_refusal(reply.status, reply.body, reply.headers)
    return reply
