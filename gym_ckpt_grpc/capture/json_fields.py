"""Strict reading of JSON objects: every bad field is named, all at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId, checkpoint_id_problem

T = TypeVar("T")

MAX_NUMBER = 2**64 - 1
MAX_TOKEN_ID = 2**32 - 1
"""A token id is hashed and stored as four bytes."""
MAX_TEXT = 4096
"""Characters of a text that is no id: a reason, a stop condition, a key."""

_HEX = re.compile(r"[0-9a-f]{64}\Z")


def digest_problem(text: str) -> str | None:
    """Say why this is no SHA-256 in lower-case hex, or None if it is one."""
    return None if _HEX.match(text) else "is no sha256 in lower-case hex"


def capture_key_problem(text: str) -> str | None:
    """Say why this is no capture key, or None if it is one."""
    try:
        EpisodeId.from_capture_key(text)
    except ValueError as error:
        return f"is no capture key: {error}"
    return None


def call_id_problem(text: str) -> str | None:
    """Say why this is no id of a call or cut, or None: 1 to 128 characters, as those of a checkpoint id."""
    return checkpoint_id_problem(text)


def refuse(what: str, found: list[Violation]) -> None:
    """Raise InvalidArgument with these violations, if there are any."""
    if found:
        fields = ", ".join(f"{v.field} {v.description}" for v in found[:5])
        raise InvalidArgument(f"{what}: {fields}", violations=found)


class Fields:
    """One JSON object being read. Wrong fields are collected; `done` raises them together.

    value: what was decoded. path: its name in messages. A reader gives a harmless value for a wrong field.
    """

    def __init__(self, value: object, path: str) -> None:
        self.path = path
        self.found: list[Violation] = []
        self._left: dict[Any, Any] = {}
        if isinstance(value, Mapping):
            self._left = dict(value)
        else:
            self.found.append(Violation(path, "is no JSON object"))

    def bad(self, name: str, problem: str) -> None:
        """Add a violation of a field."""
        self.found.append(Violation(f"{self.path}.{name}", problem))

    def take(self, name: str) -> Any:
        """The value of a field as it came, None if absent."""
        return self._left.pop(name, None)

    def text(self, name: str, problem: Callable[[str], str | None] | None = None, *, required: bool = True) -> str:
        """A text; without `required` it may be absent or empty. problem: its own check."""
        value = self.take(name)
        if value is None and not required:
            return ""
        if not isinstance(value, str):
            self.bad(name, "is required" if value is None else "is no text")
            return ""
        if not value:
            if required:
                self.bad(name, "is empty")
        elif found := problem(value) if problem else _plain_problem(value):
            self.bad(name, found)
        return value

    def number(self, name: str, *, least: int = 0, required: bool = True) -> int:
        """A whole number from `least` to 2**64 - 1; `least` without `required` where it is absent."""
        value = self.take(name)
        if value is None and not required:
            return least
        if problem := number_problem(value, least, MAX_NUMBER):
            self.bad(name, problem)
            return least
        return int(value)

    def texts(self, name: str, *, least: int = 0) -> tuple[str, ...]:
        """A list of different, non-empty texts; absent is an empty one."""
        value = self.take(name)
        if not isinstance(value, list | tuple | None):
            self.bad(name, "is no list")
            return ()
        entries = tuple(value or ())
        if len(entries) < least:
            self.bad(name, f"has {len(entries)} entries, at least {least} is needed")
        seen: set[str] = set()
        for i, entry in enumerate(entries):
            if not isinstance(entry, str) or not entry or _plain_problem(entry):
                self.bad(f"{name}[{i}]", "is no key")
            elif entry in seen:
                self.bad(f"{name}[{i}]", "stands twice")
            else:
                seen.add(entry)
        return entries

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """A list of token ids, or None where it is absent. The first wrong one is named."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            self.bad(name, "is no list")
            return ()
        for i, entry in enumerate(value):
            if problem := number_problem(entry, 0, MAX_TOKEN_ID):
                self.bad(f"{name}[{i}]", problem)
                return ()
        return tuple(value)

    def inner(self, name: str, read: Callable[[object, str], T]) -> T | None:
        """An object of its own, or None where it is absent."""
        value = self.take(name)
        if value is None:
            return None
        try:
            return read(value, f"{self.path}.{name}")
        except InvalidArgument as error:
            self.found += error.violations
            return None

    def done(self) -> None:
        """Raise InvalidArgument with everything that was wrong, fields that nobody knows included."""
        for name in self._left:
            self.bad(str(name)[:80], "is not known")
        refuse(self.path, self.found)


def _plain_problem(text: str) -> str | None:
    if len(text) > MAX_TEXT:
        return f"has {len(text)} characters, at most {MAX_TEXT} are allowed"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return None


def number_problem(value: object, least: int, most: int = MAX_NUMBER) -> str | None:
    """Say why this is no whole number in `least`..`most`, or None if it is one."""
    if value is None:
        return "is required"
    if not isinstance(value, int) or isinstance(value, bool):
        return "is no whole number"
    return None if least <= value <= most else f"is not in {least}..{most}"
