"""The metrics hook: one record per call, on both sides, and one per control error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from opentelemetry import metrics

from gym_ckpt_grpc.protocol.errors import ErrorCode


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

    def __init__(self) -> None:
        meter = metrics.get_meter("gym_ckpt_grpc")
        self._durations = {
            side: meter.create_histogram(f"rpc.{side}.call.duration", unit="s") for side in ("server", "client")
        }
        self._errors = meter.create_counter("gym.checkpoint.control_errors_total", unit="1")

    def call_ended(self, record: CallRecord) -> None:
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": record.method.lstrip("/"),
            "rpc.response.status_code": record.status,
        }
        if record.status != "OK":
            attributes["error.type"] = record.status
        self._durations[record.side].record(record.seconds, attributes)

    def control_error(self, method: str, code: ErrorCode) -> None:
        self._errors.add(1, {"rpc.method": method.lstrip("/"), "error_code": code.name})
