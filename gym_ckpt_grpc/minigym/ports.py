"""Loopback ports for servers that are started later, and again after a crash on the same ports."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 200


def free_ports(count: int) -> list[int]:
    """Find `count` different TCP ports that nobody listens on, on 127.0.0.1.

    Below the ephemeral range where there is room: an outgoing connection of anybody cannot take such a port
    between two lives of its server. Else any port the system gives. All are held until all are found.
    """
    first = _first_ephemeral()
    with ExitStack() as held:
        return [_bound_port(held.enter_context(socket.socket()), first) for _ in range(count)]


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except OSError:
        return 0


def _bound_port(listener: socket.socket, first_ephemeral: int) -> int:
    for _ in range(_TRIES if first_ephemeral > _LOWEST + 1000 else 0):
        try:
            listener.bind((LOOPBACK, random.randrange(_LOWEST, first_ephemeral)))
        except OSError:
            continue
        break
    else:
        listener.bind((LOOPBACK, 0))
    port = listener.getsockname()[1]
    assert isinstance(port, int)
    return port
