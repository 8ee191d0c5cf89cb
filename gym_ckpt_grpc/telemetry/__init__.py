"""What is measured of every call, and the one interceptor core for all arities."""

from gym_ckpt_grpc.telemetry.arity import method_name as method_name
from gym_ckpt_grpc.telemetry.arity import wrap_handler as wrap_handler
from gym_ckpt_grpc.telemetry.calls import CallObserver as CallObserver
from gym_ckpt_grpc.telemetry.calls import CallRecord as CallRecord
from gym_ckpt_grpc.telemetry.calls import MetricsObserver as MetricsObserver
from gym_ckpt_grpc.telemetry.interceptors import CallServerInterceptor as CallServerInterceptor
from gym_ckpt_grpc.telemetry.interceptors import call_interceptors as call_interceptors
