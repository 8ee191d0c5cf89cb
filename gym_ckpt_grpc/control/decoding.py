"""Requests are decoded by the handler, inside everything that looks at the caller first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sized
from typing import Any

import grpc
from google.protobuf.message import Message

from gym_ckpt_grpc.auth.audit import current_note
from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation

_COUNTED = ("episodes", "rollouts", "in_flight", "scope", "calls", "cut_ids")
"""Fields that say how much a call is about, in the order in which they are looked for."""


def decoding(handler: Any) -> Any:
    """The same handler, which decodes its request itself: bytes that are no message become a typed refusal.

    The core would answer INTERNAL, which says that the server is at fault. A second time changes nothing.
    """
    if handler is None or handler.request_streaming or handler.request_deserializer is None:
        return handler
    decode = handler.request_deserializer
    inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
    make: Any = (
        grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    )

    def behaviour(raw: bytes, context: Any) -> Any:
        try:
            request = decode(raw)
        except Exception as error:
            problem = "is no message of this RPC: its bytes cannot be decoded"
            raise InvalidArgument(f"the request {problem}", violations=[Violation("request", problem)]) from error
        _note(request)
        return inner(request, context)

    return make(behaviour, response_serializer=handler.response_serializer)


async def _unserved(_requests: Any, context: Any) -> AsyncIterator[bytes]:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    yield b""


UNSERVED: Any = grpc.stream_stream_rpc_method_handler(_unserved)
"""Stands for a method that is not served, where its caller is looked at or told of all the same."""


def _note(request: Any) -> None:
    """For the audit log: which checkpoint, and of how many episodes, rollouts or generations."""
    note = current_note.get()
    if note is None or not isinstance(request, Message):
        return
    context = getattr(request, "context", None)
    note.checkpoint_id = getattr(request if context is None else context, "checkpoint_id", "")
    for name in _COUNTED:
        if name in request.DESCRIPTOR.fields_by_name:
            note.episodes = _count(request, name)
            return


def _count(request: Message, name: str) -> int | None:
    """Items of a field; None if it is not set, which means all."""
    value = getattr(request, name)
    if not isinstance(value, Message):
        return len(value) if isinstance(value, Sized) else None
    if not request.HasField(name):
        return None
    for inner in ("episodes", "rollout_ids"):
        if inner in value.DESCRIPTOR.fields_by_name:
            return _count(value, inner)
    return None
