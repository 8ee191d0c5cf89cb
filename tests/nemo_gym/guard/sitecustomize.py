"""Keeps a process on this host: some released servers reach out when they are imported or built.

The tests install it in their own process; a child has it because its directory stands first on PYTHONPATH, where
Python looks for `sitecustomize` at start.
"""

from __future__ import annotations

import os
import sys
from typing import Any

LOOPBACK = ("127.", "::1", "localhost", "::ffff:127.")
FETCHERS = frozenset({"apt", "apt-get", "curl", "git", "pip", "pip3", "uv", "wget"})
"""Programs that fetch: their connections are not seen from here."""


class ReachedOut(RuntimeError):
    """A test, or a server that it runs, tried to leave this host."""


def _local(host: Any) -> bool:
    text = host.decode("latin-1") if isinstance(host, bytes) else host
    return text in (None, "") or str(text).startswith(LOOPBACK)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: raises for a connection or a name that is not of this host, and for a program that fetches."""
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        if isinstance(address, tuple) and not _local(address[0]):
            raise ReachedOut(f"{event}: {address[:2]}")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        if not _local(arguments[0]):
            raise ReachedOut(f"{event}: {arguments[0]!r}")
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        program = os.fsdecode(arguments[0]) if arguments[0] else ""
        if os.path.basename(program) in FETCHERS:
            raise ReachedOut(f"{event}: {program}")


if not getattr(sys, "_gym_ckpt_guard", False):  # an audit hook cannot be taken off, and once is enough
    sys._gym_ckpt_guard = True  # type: ignore[attr-defined]
    sys.addaudithook(refuse)
