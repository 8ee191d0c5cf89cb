"""A `dns:///` name stands for all its addresses: one participant each. Source: coordination section 2."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import OutOfTime

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) -> all its addresses as `ip:port`, or `[ip]:port`. Raises OSError where there are none."""

RESOLVE_LIMIT = 10.0
"""Seconds that a name has to resolve."""
SCHEME = "dns:"


async def system_resolver(host: str, port: int) -> list[str]:
    """What the system says of a name, asked in a thread; each address once, sorted."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        hosts = {str(address[0]) for *_, address in found}
        return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in sorted(hosts)]

    return await in_thread(ask, f"resolving {host}", Deadline(RESOLVE_LIMIT))


async def addresses_of(address: str, resolver: Resolver | None = None) -> tuple[list[str], str]:
    """All addresses that an address of a fleet stands for, and why there are none, or empty.

    `dns:///name:port` gives those of the name; any other address stands for itself.
    """
    if not address.startswith(SCHEME):
        return [address], ""
    host, colon, port = address.removeprefix(SCHEME).removeprefix("///").rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536) or "/" in host:
        return [], f"{address!r} is not dns:///name:port"
    try:
        found = await (resolver or system_resolver)(host.strip("[]"), int(port))
    except (OSError, OutOfTime, UnicodeError) as error:
        return [], f"the name {host!r} does not resolve: {error}"
    return list(dict.fromkeys(found)), "" if found else f"the name {host!r} has no address"
