"""Tells the audit log of each mutating call. Stands outermost, so that refused and cancelled calls are told of too."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from gym_ckpt_grpc.auth import is_reading
from gym_ckpt_grpc.auth.audit import AuditLog, CallNote, current_note, line_of
from gym_ckpt_grpc.control.decoding import UNSERVED
from gym_ckpt_grpc.telemetry import method_name, wrap_handler

_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}\Z")


class AuditServerInterceptor(grpc.aio.ServerInterceptor):
    """One line per call of a method that is not known to change nothing, when it has ended."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = method_name(handler_call_details.method)
        if is_reading(method):
            return await continuation(handler_call_details)
        note = CallNote(method)
        # Handlers run in the task, and so in the context, that looks them up.
        current_note.set(note)
        trace = _trace_id(handler_call_details.invocation_metadata or ())

        @contextlib.asynccontextmanager
        async def audited(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
            code = "UNKNOWN"
            try:
                yield
                code = _set_code(context)
            except BaseException as error:
                code = _code_of(error, context)
                raise
            finally:
                note.trace_id = trace if note.role else ""
                self._audit.write(line_of(note, peer=str(context.peer()), code=code))

        try:
            handler = await continuation(handler_call_details)
        except asyncio.CancelledError:  # before there is a handler, and so before the peer is known
            self._audit.write(line_of(note, peer="", code="CANCELLED"))
            raise
        return wrap_handler(handler or UNSERVED, audited)


def _set_code(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    code: Any = context.code()
    return next((c.name for c in grpc.StatusCode if code in (c, c.value[0])), "OK")


def _code_of(error: BaseException, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    if isinstance(error, grpc.aio.AbortError):
        return _set_code(context)
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        left: float | None = context.time_remaining()
        return "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"
    return "UNKNOWN"


def _trace_id(metadata: Any) -> str:
    for key, value in metadata:
        if key == "traceparent" and isinstance(value, str) and (known := _TRACE.match(value)):
            return known[1]
    return ""
