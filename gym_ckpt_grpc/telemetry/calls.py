"""The metrics hook: one record per call, on both sides, and one per control error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.emitting import Telemetry, default_telemetry


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One ended call. side: `server` or `client`. method: full name. status: gRPC status name, such as `OK`.

    seconds: from the first byte to the last, as this side saw it.
    """

    side: str
    method: str
    status: str
    seconds: float


class CallObserver(Protocol):
    """What is told of calls. Must not block or raise; what it raises is dropped by the caller."""

    def call_ended(self, record: CallRecord) -> None:
        """A call ended. Calls whose credentials were refused come as control errors only."""

    def control_error(self, method: str, code: ErrorCode) -> None:
        """A control call failed with this code; once per failed call, where its status is made."""


class MetricsObserver:
    """Records calls with OpenTelemetry metrics, by the stable RPC conventions. Free where no SDK is installed."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry or default_telemetry()

    def call_ended(self, record: CallRecord) -> None:
        attributes = {at.RPC_SYSTEM: "grpc", at.RPC_METHOD: record.method.lstrip("/"), at.RPC_STATUS: record.status}
        if record.status != "OK":
            attributes[at.ERROR_TYPE] = record.status
        self._telemetry.add(catalogue.RPC_DURATION[record.side], record.seconds, attributes)

    def control_error(self, method: str, code: ErrorCode) -> None:
        labels = {at.RPC_METHOD: method.lstrip("/"), at.ERROR_CODE: code.name}
        self._telemetry.add(catalogue.CONTROL_ERRORS, 1, labels)
