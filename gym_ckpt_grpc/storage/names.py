"""File names made from ids by a fixed escaping.

Letters, digits, `_`, `-` and a `.` that is neither first nor last stand for themselves; every other byte of
the UTF-8 form is written `=XX`. A name that would be longer than 200 bytes is cut and ends in `=h` and the
sha256 of the whole text. So two texts never have one name, and no name leaves its directory, hides, or
exceeds 255 bytes with what is added to it.
"""

from __future__ import annotations

import hashlib
import re
import uuid

MAX_NAME = 200
"""Longest escaped name, in bytes."""

TEMPORARY_PREFIX = ".tmp-"
"""How the name of every file under construction begins; no escaped name begins with a dot."""

_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}[0-9a-f]{{32}}\Z")
_PLAIN = re.compile(r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?\Z")
_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_DOT = ord(".")
_ESCAPED = re.compile(rb"=([0-9a-f]{2})")


def escape(text: str) -> str:
    """The file name for a text. Raises ValueError if it is empty or has a lone surrogate."""
    if not text:
        raise ValueError("an empty text has no file name")
    if len(text) <= MAX_NAME and _PLAIN.match(text):
        return text
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{text[:80]!r} is not valid Unicode and has no file name") from None
    last = len(data) - 1
    name = "".join(
        chr(byte) if byte in _KEPT or (byte == _DOT and 0 < at < last) else f"={byte:02x}"
        for at, byte in enumerate(data)
    )
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(data).hexdigest()
    return f"{name[: MAX_NAME - len(digest) - 2]}=h{digest}"


def unescape(name: str) -> str | None:
    """The text of a file name, or None if no text has it, or it was cut and only its digest is left."""
    try:
        text = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), name.encode("ascii")).decode("utf-8")
        return text if escape(text) == name else None
    except ValueError:
        return None


def temporary_name() -> str:
    """A name for a file under construction that no other writer uses."""
    return f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"


def is_temporary(name: str) -> bool:
    """Whether a name is one of a file under construction; somebody else's may begin in the same way."""
    return _TEMPORARY.match(name) is not None
