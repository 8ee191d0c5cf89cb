"""The server's half of authentication: before a request is decoded, whichever way the caller is known by."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from gym_ckpt_grpc.auth import Authenticator, Caller, Denied
from gym_ckpt_grpc.auth.audit import current_note
from gym_ckpt_grpc.auth.files import Looks
from gym_ckpt_grpc.control.decoding import UNSERVED, decoding
from gym_ckpt_grpc.protocol.errors import Unauthenticated
from gym_ckpt_grpc.telemetry import method_name, wrap_handler

Peer = Mapping[str, Iterable[bytes]] | None


class AuthServerInterceptor(grpc.aio.ServerInterceptor):
    """Refuses a call before its message is decoded. Stands inside the errors interceptor, which answers.

    A token is looked at before the message is received. A certificate is known in the handler's context only: there
    it is looked at first of all, and the message has been received as bytes.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._looks = Looks(authenticator.refresh)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if self._authenticator.stale():
            await self._looks.look()
        method = method_name(handler_call_details.method)
        metadata = tuple(handler_call_details.invocation_metadata or ())
        if not self._authenticator.needs_peer(method, metadata):
            await self._admit(method, metadata, None)
            return await continuation(handler_call_details)

        @contextlib.asynccontextmanager
        async def admitted(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
            await self._admit(method, metadata, context.auth_context())
            yield

        handler = await continuation(handler_call_details)
        return wrap_handler(decoding(handler or UNSERVED), admitted)

    async def _admit(self, method: str, metadata: Any, peer: Peer) -> None:
        """Raise unless the caller may call this. A token or role replaced a moment ago must not fail a call."""
        try:
            caller = self._authenticator.check(method, metadata, peer)
        except (Unauthenticated, Denied):
            await self._looks.look()
            try:
                caller = self._authenticator.check(method, metadata, peer)
            except Denied as error:
                _note(error.caller)
                raise
        _note(caller)


def _note(caller: Caller) -> None:
    note = current_note.get()
    if note is not None and caller.role:
        note.role, note.name = caller.role, caller.name
        note.by = "certificate" if caller.name else "token"
