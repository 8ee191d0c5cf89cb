"""Bearer tokens: where they come from, and the check of one call's credentials.

A token is never part of a repr, an error or a log line. Files are read again when they change; a trailing
newline is not part of the token.
"""

from __future__ import annotations

import hmac
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from gym_ckpt_grpc.auth.roles import HEALTH_PREFIX, ROLES, Role
from gym_ckpt_grpc.protocol.errors import PermissionDenied, Unauthenticated

REFRESH_SECONDS = 1.0
"""How long a token file's content is used before its change time is looked at again."""
MAX_TOKEN = 4096
"""Bytes of a token: with all else it must fit the 8 KiB that metadata may have."""
_TOKEN = re.compile(rb"[!-~]+\Z")


def token_problem(value: bytes) -> str | None:
    """Say why this cannot travel as a bearer token, or None: 1 to 4,096 visible ASCII characters."""
    if not value:
        return "is empty"
    if len(value) > MAX_TOKEN:
        return f"is longer than {MAX_TOKEN} bytes"
    return None if _TOKEN.match(value) else "has blanks, line breaks or characters that are not ASCII"


class TokenSource(Protocol):
    """Gives a token; `refresh` may read a file and is called off the event loop."""

    def token(self) -> bytes:
        """The token as of the last refresh."""

    def stale(self) -> bool:
        """Whether a refresh is due."""

    def refresh(self) -> None:
        """Read it again if it changed. Keeps the old token where the file is gone or has no usable one."""


class TokenValue:
    """A token given as a value, for tests and for one read from the environment. Raises ValueError for a bad one."""

    def __init__(self, value: str) -> None:
        self._value = value.strip().encode()
        if problem := token_problem(self._value):
            raise ValueError(f"the token {problem}")

    def token(self) -> bytes:
        return self._value

    def stale(self) -> bool:
        return False

    def refresh(self) -> None:
        return None

    def __repr__(self) -> str:
        return "TokenValue(...)"


class TokenFile:
    """A token in a file. Raises ValueError at the start, naming the file, if it has no usable token."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, int, int] | None = None
        self._value = b""
        self._checked = 0.0
        self._problem: str | None = "is missing or unreadable"
        self.refresh()
        if self._problem:
            raise ValueError(f"token file {self._path} {self._problem}")

    def token(self) -> bytes:
        return self._value

    def stale(self) -> bool:
        return time.monotonic() - self._checked >= REFRESH_SECONDS

    def refresh(self) -> None:
        self._checked = time.monotonic()
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if stamp != self._stamp:
                value = self._path.read_bytes().strip()
                self._stamp, self._problem = stamp, token_problem(value)
                if self._problem is None:
                    self._value = value
        except OSError:
            return  # a file that is being replaced: the old token serves until the new one is there

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"


class Authenticator:
    """Checks a call's credentials against one token per role.

    open_health: whether health checks need no credentials.
    """

    def __init__(self, tokens: Mapping[Role, TokenSource], *, open_health: bool = False) -> None:
        if not tokens:
            raise ValueError("at least one role needs a token")
        self._tokens = dict(tokens)
        self._open_health = open_health

    def stale(self) -> bool:
        return any(source.stale() for source in self._tokens.values())

    def refresh(self) -> None:
        """Read token files again; blocking."""
        for source in self._tokens.values():
            source.refresh()

    def check(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raise Unauthenticated or PermissionDenied unless these credentials may call this method."""
        if self._open_health and method.startswith(HEALTH_PREFIX):
            return
        role = self._role(_bearer(metadata))
        if role is None:
            raise Unauthenticated("no valid credentials")
        if role not in ROLES.get(method, frozenset()):
            raise PermissionDenied(f"role {role} may not call {method[:200]}")

    def _role(self, presented: bytes | None) -> Role | None:
        found = None
        for role, source in self._tokens.items():  # every token is compared, so timing tells nothing
            if presented is not None and hmac.compare_digest(presented, source.token()):
                found = found or role
        return found


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
    values = [value for key, value in metadata if key.lower() == "authorization"]
    if len(values) != 1:
        return None
    raw = values[0].encode("utf-8", "surrogateescape") if isinstance(values[0], str) else values[0]
    scheme, _, token = raw.partition(b" ")
    return token if scheme.lower() == b"bearer" and token and token.isascii() else None
