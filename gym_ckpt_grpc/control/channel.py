"""The one way to make a channel, with the options that the design's gRPC facts ask for."""

from __future__ import annotations

import ipaddress
from typing import Any

import grpc

from gym_ckpt_grpc.auth import ClientTls, TokenSource, token_interceptors
from gym_ckpt_grpc.control.reloading import ReloadingChannel
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.telemetry import CallObserver, Telemetry, call_interceptors, observing

MAX_REQUEST = 64 * 1024 * 1024
"""Bytes of the largest request a server accepts: a million episode ids."""
MAX_REPLY = 4 * 1024 * 1024
"""Bytes of the largest reply a client accepts; ours stay under 1 MiB."""

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.enable_http_proxy", 0),  # http_proxy would be obeyed even for loopback
    ("grpc.enable_retries", 0),  # retries are ours: deadline-bounded, by idempotency level
    ("grpc.max_send_message_length", MAX_REQUEST),
    ("grpc.max_receive_message_length", MAX_REPLY),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)


def is_local(address: str) -> bool:
    """Whether an address is a Unix socket or a loopback `host:port`, where plain text does not leave the host."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0]
    if host == "localhost":
        return True
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return False  # IPv6 needs its brackets: without them the port may be a part of the address
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_channel(
    address: str,
    *,
    token: TokenSource | None = None,
    allow_insecure: bool = False,
    tls: ClientTls | None = None,
    dedicated: bool = False,
    observer: CallObserver | None = None,
    telemetry: Telemetry | None = None,
) -> grpc.aio.Channel:
    """A channel to one participant; call it inside the running loop.

    token: sent with every call. allow_insecure: needed for plain text to an address that is not local.
    tls: encrypt, and go on with a new connection when its files change. The server's certificate must have the name
    or the IP address that `address` has (`localhost` of a Unix socket).
    telemetry: where its spans and metrics go; the process's own if None. observer: told of every call as well.
    dedicated: a connection of its own, not shared with other channels to the same target.
    Raises UsageError for an insecure non-local address.
    """
    if tls is None and not (allow_insecure or is_local(address)):
        raise UsageError(f"{address} is not local: it needs TLS, or allow_insecure for plain text")
    options = CHANNEL_OPTIONS + ((("grpc.use_local_subchannel_pool", 1),) if dedicated else ())
    interceptors = [
        *call_interceptors(observing(telemetry, observer), telemetry),
        *(token_interceptors(token) if token else ()),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    if tls.server_name:
        options += (("grpc.ssl_target_name_override", tls.server_name),)

    def open_with(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)

    return ReloadingChannel(open_with, tls)
