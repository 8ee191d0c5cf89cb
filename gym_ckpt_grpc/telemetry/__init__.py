"""Spans and metrics of checkpoints: one catalogue, a recorder per participant, and the one interceptor core."""

from gym_ckpt_grpc.telemetry import attributes as attributes
from gym_ckpt_grpc.telemetry import catalogue as catalogue
from gym_ckpt_grpc.telemetry.arity import method_name as method_name
from gym_ckpt_grpc.telemetry.arity import wrap_handler as wrap_handler
from gym_ckpt_grpc.telemetry.calls import CallObserver as CallObserver
from gym_ckpt_grpc.telemetry.calls import CallRecord as CallRecord
from gym_ckpt_grpc.telemetry.calls import MetricsObserver as MetricsObserver
from gym_ckpt_grpc.telemetry.calls import observing as observing
from gym_ckpt_grpc.telemetry.configuring import Exporting as Exporting
from gym_ckpt_grpc.telemetry.configuring import configure as configure
from gym_ckpt_grpc.telemetry.configuring import exporting as exporting
from gym_ckpt_grpc.telemetry.emitting import GaugeSource as GaugeSource
from gym_ckpt_grpc.telemetry.emitting import Reading as Reading
from gym_ckpt_grpc.telemetry.emitting import Telemetry as Telemetry
from gym_ckpt_grpc.telemetry.emitting import default_telemetry as default_telemetry
from gym_ckpt_grpc.telemetry.interceptors import CallServerInterceptor as CallServerInterceptor
from gym_ckpt_grpc.telemetry.interceptors import call_interceptors as call_interceptors
from gym_ckpt_grpc.telemetry.recorder import COORDINATOR as COORDINATOR
from gym_ckpt_grpc.telemetry.recorder import Recorder as Recorder
from gym_ckpt_grpc.telemetry.recorder import Timed as Timed
from gym_ckpt_grpc.telemetry.spans import ActiveSpan as ActiveSpan
from gym_ckpt_grpc.telemetry.spans import outcome_of as outcome_of
from gym_ckpt_grpc.telemetry.switches import Switches as Switches
from gym_ckpt_grpc.telemetry.unwinding import unwinding_sigterm as unwinding_sigterm
