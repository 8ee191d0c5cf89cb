"""Both halves of authentication on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from gym_ckpt_grpc.auth.tokens import Authenticator, TokenSource
from gym_ckpt_grpc.protocol.errors import Unauthenticated


class AuthServerInterceptor(grpc.aio.ServerInterceptor):
    """Refuses a call before its message is read. Stands inside the errors interceptor, which answers."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if self._authenticator.stale():
            await asyncio.to_thread(self._authenticator.refresh)
        method = _text(handler_call_details.method)
        metadata = tuple(handler_call_details.invocation_metadata or ())
        try:
            self._authenticator.check(method, metadata)
        except Unauthenticated:
            # A token replaced a moment ago must not fail a call.
            await asyncio.to_thread(self._authenticator.refresh)
            self._authenticator.check(method, metadata)
        return await continuation(handler_call_details)


def _text(method: object) -> str:
    return method.decode("utf-8", "replace") if isinstance(method, bytes) else str(method)


class _Core:
    """Adds the authorization header; one core for every arity."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    async def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        if self._source.stale():
            await asyncio.to_thread(self._source.refresh)
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata["authorization"] = "Bearer " + self._source.token().decode("ascii")
        return details._replace(metadata=metadata)  # type: ignore[attr-defined,no-any-return]


class _UnaryUnary(_Core, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(await self._with_token(client_call_details), request)


class _UnaryStream(_Core, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(await self._with_token(client_call_details), request)


def token_interceptors(source: TokenSource) -> Sequence[grpc.aio.ClientInterceptor]:
    """Client interceptors that send this token with every call."""
    return [_UnaryUnary(source), _UnaryStream(source)]
