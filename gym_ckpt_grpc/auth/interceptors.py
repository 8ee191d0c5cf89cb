"""The client's half of tokens on the wire; the server's is in control, beside its other interceptors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from gym_ckpt_grpc.auth.files import Looks
from gym_ckpt_grpc.auth.tokens import TokenSource


class _Core:
    """Adds the authorization header; one core for every arity."""

    def __init__(self, source: TokenSource, looks: Looks) -> None:
        self._source = source
        self._looks = looks

    async def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        if self._source.stale():
            await self._looks.look()
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata["authorization"] = "Bearer " + self._source.token().decode("ascii")
        return details._replace(metadata=metadata)  # type: ignore[attr-defined,no-any-return]


class _UnaryUnary(_Core, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(await self._with_token(client_call_details), request)


class _UnaryStream(_Core, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(await self._with_token(client_call_details), request)


class _StreamUnary(_Core, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(await self._with_token(client_call_details), request_iterator)


class _StreamStream(_Core, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(await self._with_token(client_call_details), request_iterator)


def token_interceptors(source: TokenSource) -> Sequence[grpc.aio.ClientInterceptor]:
    """Client interceptors that send this token with every call."""
    looks = Looks(source.refresh)
    return [arity(source, looks) for arity in (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)]
