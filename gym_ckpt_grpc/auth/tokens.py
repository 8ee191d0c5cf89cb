"""Bearer tokens: where they come from.

A token is never part of a repr, an error or a log line. Files are read again when they change; a trailing
newline is not part of the token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, Self

from gym_ckpt_grpc.auth.files import REFRESH_SECONDS, FileProblem, Kept

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
    """A token given as a value, for tests and for one read from the environment. Raises ValueError for a bad one.

    It is not pickled, since a token must not travel by accident; pass a TokenFile on to another process.
    """

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

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TokenValue holds a token and is not pickled; a TokenFile can be")


class TokenFile:
    """A token in a file, read again when it changes; blanks and line ends around it are no part of it.

    Raises ValueError at the start, naming the file, if it has no usable token. Later the last usable one serves, with
    one warning. Replace it by renaming another file over it: half of a token cannot be told from a whole one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._kept = Kept("token file", [self._path], self._usable)

    def _usable(self, contents: Sequence[bytes]) -> bytes:
        value = contents[0].strip()
        if problem := token_problem(value):
            raise FileProblem(f"token file {self._path} {problem}")
        return value

    def token(self) -> bytes:
        return self._kept.value

    def stale(self) -> bool:
        return self._kept.age() >= REFRESH_SECONDS

    def refresh(self) -> None:
        self._kept.refresh()

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"

    def __reduce__(self) -> tuple[type[TokenFile], tuple[str]]:
        return TokenFile, (str(self._path),)  # another process reads it for itself


def bearer_of(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[bool, bytes | None]:
    """Whether a call presents an authorization at all, and its bearer token if it is one, given once."""
    values = [value for key, value in metadata if key.lower() == "authorization"]
    if len(values) != 1:
        return bool(values), None
    raw = values[0].encode("utf-8", "surrogateescape") if isinstance(values[0], str) else values[0]
    scheme, _, token = raw.partition(b" ")
    return True, (token if scheme.lower() == b"bearer" and token and token.isascii() else None)
