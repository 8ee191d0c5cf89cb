"""What is told of calls: one record per call, on both sides, and one per control error."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.emitting import Telemetry, default_telemetry
from gymckpt.v1 import coordinator_pb2, generation_pb2, participant_pb2

SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that the RPC conventions call errors of the server; of a client every status but OK is one."""
OTHER = "_OTHER"
"""Stands for a method that no server of ours has, as the RPC conventions want it: a stranger may send any name."""

_FILES: tuple[Any, ...] = (
    participant_pb2,
    coordinator_pb2,
    generation_pb2,
    health_pb2,
    reflection_pb2,
    channelz_pb2,
)
METHODS = frozenset(
    f"{service.full_name}/{method}"
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods_by_name
)
"""Every method that a server of ours may have."""


class CallRecord(NamedTuple):
    """One ended call. side: `server` or `client`. method: full name. status: gRPC status name, such as `OK`.

    seconds: from the first byte to the last, as this side saw it.
    """

    side: str
    method: str
    status: str
    seconds: float


class CallObserver(Protocol):
    """What is told of calls, beside the metrics. Must not block or raise; what it raises is dropped by the caller."""

    def call_ended(self, record: CallRecord) -> None:
        """A call ended. Calls whose credentials were refused come as control errors only."""

    def control_error(self, method: str, code: ErrorCode) -> None:
        """A control call failed with this code; once per failed call, where its status is made."""


def beginning(method: str) -> dict[str, str]:
    """What the stable RPC conventions say of a call when it begins. method: full name."""
    return {at.RPC_SYSTEM: "grpc", at.RPC_METHOD: method.lstrip("/")}


def ending(side: str, status: str) -> dict[str, str]:
    """What they say when it has ended: `error.type` only where the status is an error as this side sees it."""
    failed = status in SERVER_FAULTS if side == "server" else status != "OK"
    return {at.RPC_STATUS: status} | ({at.ERROR_TYPE: status} if failed else {})


@lru_cache(maxsize=1024)  # a method and a status come again and again
def _labels(side: str, method: str, status: str) -> Mapping[str, str]:
    return beginning(method) | ending(side, status)


class MetricsObserver:
    """Records calls with OpenTelemetry metrics, by the stable RPC conventions. Free where no SDK is installed."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry or default_telemetry()

    def call_ended(self, record: CallRecord) -> None:
        labels = _labels(record.side, record.method, record.status)
        self._telemetry.add(catalogue.RPC_DURATION[record.side], record.seconds, labels)

    def control_error(self, method: str, code: ErrorCode) -> None:
        name = method.lstrip("/")
        labels = {at.RPC_METHOD: name if name in METHODS else OTHER, at.ERROR_CODE: code.name}
        self._telemetry.add(catalogue.CONTROL_ERRORS, 1, labels)


class _Both:
    """Tells the metrics, then the user's own observer."""

    def __init__(self, metrics: CallObserver, own: CallObserver) -> None:
        self._metrics, self._own = metrics, own

    def call_ended(self, record: CallRecord) -> None:
        with contextlib.suppress(Exception):
            self._metrics.call_ended(record)
        self._own.call_ended(record)

    def control_error(self, method: str, code: ErrorCode) -> None:
        with contextlib.suppress(Exception):
            self._metrics.control_error(method, code)
        self._own.control_error(method, code)


def observing(telemetry: Telemetry | None, own: CallObserver | None) -> CallObserver:
    """The observer of a server or a channel: the metrics of `telemetry`, and the user's own if there is one."""
    metrics = MetricsObserver(telemetry)
    return metrics if own is None else _Both(metrics, own)
