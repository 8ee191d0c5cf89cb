"""Requests that are in wire form already.

A scope goes to every participant alike, and a request that is built per participant copies it each time: 1.5 ms for
16,000 rollouts, half a second of the pause for 300 servers. The common fields are encoded once, and what differs is
appended, since fields of one message may come in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NewType, cast

import grpc
from google.protobuf.message import Message

Encoded = NewType("Encoded", bytes)
"""A whole request in wire form."""


class EncodedChannel:
    """A channel for generated stubs, whose unary methods take an `Encoded` request as well as a message."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.unary_stream = channel.unary_stream

    def unary_unary(self, method: str, request_serializer: Callable[[Any], bytes], **options: Any) -> Any:
        """As a channel's own."""

        def serialize(request: Any) -> bytes:
            return request if isinstance(request, bytes) else request_serializer(request)

        return self._channel.unary_unary(method, request_serializer=serialize, **options)

    @classmethod
    def over(cls, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """One, for where a channel is asked for."""
        return cast(grpc.aio.Channel, cls(channel))


def encoded(common: bytes, own: Message) -> Encoded:
    """A request of common fields and a participant's own ones; no field may be in both."""
    return Encoded(common + own.SerializeToString())
