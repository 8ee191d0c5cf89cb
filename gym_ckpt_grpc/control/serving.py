"""What every server of this project shares: its address, its options, its interceptors, and the debugging services."""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import os
import socket
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_channelz.v1 import _async as channelz_async
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from gym_ckpt_grpc.auth import Authenticator, ServerTls
from gym_ckpt_grpc.auth.audit import AuditLog
from gym_ckpt_grpc.control.auditing import AuditServerInterceptor
from gym_ckpt_grpc.control.authenticating import AuthServerInterceptor
from gym_ckpt_grpc.control.channel import MAX_REQUEST, is_local
from gym_ckpt_grpc.control.interceptors import ErrorsInterceptor
from gym_ckpt_grpc.protocol.errors import InvalidArgument, UsageError, Violation
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.telemetry import (
    CallObserver,
    CallServerInterceptor,
    Telemetry,
    attributes,
    catalogue,
    default_telemetry,
    observing,
)

log = logging.getLogger("gym_ckpt_grpc.auth")
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
HEADER_TRACES = ("api", "chttp2_hpack_parser", "http")
MAX_SOCKET_PATH = 100
"""Bytes of a Unix socket path that every system takes."""

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.so_reuseport", 0),  # a second process on the port must fail, not share it
    ("grpc.max_receive_message_length", MAX_REQUEST),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def _reflection_v1(names: Sequence[str]) -> grpc.GenericRpcHandler:
    """Reflection under its released name, for tools that know no other; its messages are the same on the wire."""
    handler = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler})


def _warn_of_traces(traces: str) -> None:
    """gRPC's own traces of these kinds have every header in them, tokens included; `http` in some versions."""
    given = [name.strip() for name in traces.split(",")]
    if shown := [name for name in given if name == "all" or fnmatch.filter(HEADER_TRACES, name)]:
        log.warning("GRPC_TRACE has %s: gRPC writes tokens to standard error", ", ".join(sorted(shown)))


def _check_exposure(
    address: str, authenticator: Authenticator | None, tls: ServerTls | None, allow_insecure: bool
) -> None:
    """Raise UsageError for what would let strangers in, or would let nobody in."""
    if not is_local(address):
        needed = "" if tls or allow_insecure else "TLS, or allow_insecure for plain text"
        if needed := "an authenticator" if authenticator is None else needed:
            raise UsageError(f"{address} is not local: serving there needs {needed}")
    if authenticator and authenticator.takes_certificates and not (tls and tls.asks_clients):
        raise UsageError("roles of certificates need TLS with a client_ca: no client would be asked for one")


class ServiceHost:
    """One service on one address, with health, reflection and channelz behind the same check of credentials.

    service: full name. identity: whose errors these are, or None for a server that is no participant. address:
    `host:port` (port 0 picks one; read `address` after the start) or `unix:path`. The rest is as
    `ParticipantServer` says.
    """

    def __init__(
        self,
        service: str,
        address: str,
        *,
        identity: ParticipantIdentity | None,
        authenticator: Authenticator | None = None,
        allow_insecure: bool = False,
        tls: ServerTls | None = None,
        audit_log: str | os.PathLike[str] | None = None,
        observer: CallObserver | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        _check_exposure(address, authenticator, tls, allow_insecure)
        self.address = address
        self._service = service
        self._asked = address
        self._identity = identity
        self._authenticator = authenticator
        self._tls = tls
        self._end_listening: Callable[[], None] | None = None
        self._audit = AuditLog(audit_log, on_lost=self._lost) if audit_log is not None else None
        self._telemetry = telemetry
        self._observer = observing(telemetry, observer)
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()

    async def start(self, add_servicer: Callable[[grpc.aio.Server], None], *, max_calls: int | None = None) -> None:
        """Bind and serve. max_calls: at one time. Raises UsageError naming an address or a file that cannot be had."""
        self.address = await asyncio.to_thread(self._claim)
        await self._open_audit()
        if self._authenticator:
            _warn_of_traces(os.environ.get("GRPC_TRACE", ""))
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorsInterceptor(self._identity, self._observer)]
        if self._audit:
            interceptors.insert(0, AuditServerInterceptor(self._audit))
        if self._authenticator:
            interceptors.append(AuthServerInterceptor(self._authenticator))
        interceptors.append(CallServerInterceptor(self._observer, self._telemetry))
        server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS, maximum_concurrent_rpcs=max_calls)
        add_servicer(server)
        await self._add_debugging(server)
        try:
            port = self._bind(server)
        except RuntimeError as error:
            await server.stop(0)
            await self._close_audit()
            raise UsageError(f"cannot serve on {self.address}: the address is in use or not allowed") from error
        if not self.address.startswith(("unix:", "unix-abstract:")):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await server.start()
        self._server = server
        if self._tls:
            self._end_listening = self._tls.listen(lambda: None)  # it warns of an end that comes near

    def _lost(self, lines: int) -> None:
        """Lines of the audit log were lost."""
        (self._telemetry or default_telemetry()).add(catalogue.EVENTS_TOTAL, lines, {attributes.EVENT: "audit_lost"})

    def _bind(self, server: grpc.aio.Server) -> int:
        if self._tls is None:
            return server.add_insecure_port(self.address)
        return server.add_secure_port(self.address, self._tls.credentials())

    async def _open_audit(self) -> None:
        if self._audit is None:
            return
        try:
            await asyncio.to_thread(self._audit.open)
        except OSError as error:
            raise UsageError(f"audit log {self._audit.path} cannot be written: {error.strerror}") from error

    async def _close_audit(self) -> None:
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)

    async def _add_debugging(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz_async.ChannelzServicer(), server)
        names = (self._service, health.SERVICE_NAME, "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        server.add_generic_rpc_handlers((_reflection_v1(names),))
        for name in ("", self._service):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _claim(self) -> str:
        """Check a Unix socket's path: the last binder would steal it silently from a living process."""
        if not self._asked.startswith("unix:"):
            return self._asked
        path = self._asked.removeprefix("unix:").removeprefix("//")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise UsageError(f"socket path {path!r} is longer than {MAX_SOCKET_PATH} bytes")
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return self._asked
        if not stat.S_ISSOCK(mode):
            raise UsageError(f"{path!r} exists and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(path)
            except OSError:
                os.unlink(path)  # left by a process that is gone
                return self._asked
        raise UsageError(f"another process serves on {path!r}")

    async def stop(self, grace: float = 1.0) -> None:
        """Stop serving: calls under way have `grace` seconds."""
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace)
            self._server = None
            if self._end_listening:
                self._end_listening()
            await self._close_audit()


class HostedService(ABC):
    """A server of one service: an async context manager that serves from its start to its stop.

    Build and start it inside the running loop, never before a fork.
    """

    max_calls: int | None = None
    """Calls at one time, None for no limit."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host

    @abstractmethod
    def _add_servicer(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""

    @property
    def address(self) -> str:
        """Where it serves."""
        return self._host.address

    async def start(self) -> Self:
        """Bind and serve. Raises UsageError naming an address that cannot be had."""
        await self._host.start(self._add_servicer, max_calls=self.max_calls)
        return self

    async def stop(self, grace: float = 1.0) -> None:
        """Stop serving: calls under way have `grace` seconds."""
        await self._host.stop(grace)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def time_left(context: grpc.aio.ServicerContext[Any, Any], limit: float) -> float:
    """Seconds until the caller's deadline, clamped; a mutating call without one is refused as INVALID_ARGUMENT."""
    left: float | None = context.time_remaining()
    if left is None:
        problem = "is missing: set timeout= in Python, -max-time in grpcurl, --timeout in buf curl"
        raise InvalidArgument(f"the gRPC deadline {problem}", violations=[Violation("deadline", problem)])
    return min(left, limit)
