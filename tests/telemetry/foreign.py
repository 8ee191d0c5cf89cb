"""The interceptors of `opentelemetry-instrumentation-grpc`, over a provider of their own."""

from __future__ import annotations

from typing import Any

import opentelemetry.instrumentation.grpc
from opentelemetry.instrumentation.grpc import grpcext
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

_untyped: Any = opentelemetry.instrumentation.grpc
_extension: Any = grpcext


class Foreign:
    """Their interceptors, and the spans that they ended."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._kept.get_finished_spans()

    def client(self) -> Any:
        """Of grpc.aio channels, for every arity."""
        return _untyped.aio_client_interceptors(tracer_provider=self.provider)

    def server(self) -> Any:
        """Of grpc.aio servers."""
        return _untyped.aio_server_interceptor(tracer_provider=self.provider)

    def synchronous(self, channel: Any) -> Any:
        """A synchronous channel with their interceptor. By their own function: grpc's refuses it."""
        return _extension.intercept_channel(channel, _untyped.client_interceptor(tracer_provider=self.provider))
