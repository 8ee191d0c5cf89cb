"""The strict JSON files of a root: how they are checked, written and read back.

Each is an object that begins with `format` and `schema_version`. Readers refuse unknown fields, other types
and other versions, always as StateCorrupt naming the file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt
from gym_ckpt_grpc.storage.files import FileLayer, read_file

MAX_DOCUMENT = 256 << 20
"""Largest JSON file that is read, and so that is written, in bytes."""

_MAX_NESTING = 64


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every JSON file. FORMAT: what its `format` says. VERSION: what is written. READABLE: what is read."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1
    READABLE: ClassVar[tuple[int, ...]] = (1,)

    format: str
    schema_version: int


class _Head(msgspec.Struct):
    format: str
    schema_version: int


D = TypeVar("D", bound=Document)


def to_bytes(document: Document) -> bytes:
    """The bytes of a document, indented for people; the same document gives the same bytes.

    Raises InvalidArgument if it does not read back equal (a value in an open block that JSON cannot carry), or not
    at all, for its size.
    """
    try:
        data = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
        if msgspec.json.decode(data, type=type(document)) == document:
            return bounded(data, what=document.format)
        problem = "does not read back equal"
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    raise InvalidArgument(f"{document.format} cannot be written: {problem}")


def bounded(data: bytes, *, what: str, limit: int | None = None) -> bytes:
    """The bytes of a file that will be read. limit: MAX_DOCUMENT if None. Raises InvalidArgument if there are more."""
    limit = MAX_DOCUMENT if limit is None else limit
    if len(data) > limit:
        raise InvalidArgument(f"{what} would take {len(data)} bytes, more than the {limit} that are read back")
    return data


def from_bytes(data: bytes, kind: type[D], *, path: str) -> D:
    """Decode a document. Raises StateCorrupt naming `path`, and for another version those readable here."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != kind.FORMAT:
            raise StateCorrupt(f"{path!r} is {head.format[:80]!r}, not {kind.FORMAT!r}")
        if head.schema_version not in kind.READABLE:
            readable = ", ".join(map(str, kind.READABLE))
            raise StateCorrupt(f"{path!r} has schema_version {head.schema_version}; readable here: {readable}")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise StateCorrupt(f"{path!r} is not a valid {kind.FORMAT}: {error}") from error


def read(files: FileLayer, path: str, kind: type[D], *, digest: str | None = None) -> tuple[D, str]:
    """Read a document and its sha256. digest: what that must be, if known.

    Raises StateNotFound, or StateCorrupt naming the file.
    """
    data = read_bytes(files, path)
    found = sha256(data)
    if digest is not None and found != digest:
        raise StateCorrupt(f"{path!r} has the sha256 {found}, not {digest}")
    return from_bytes(data, kind, path=path), found


def read_bytes(files: FileLayer, path: str) -> bytes:
    """The bytes of a JSON file. Raises StateNotFound, StateCorrupt."""
    return read_file(files, path, limit=MAX_DOCUMENT)


def sha256(data: bytes) -> str:
    """The digest of a file's bytes, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Whether a text has the form of `sha256`."""
    return len(text) == 64 and not text.strip("0123456789abcdef")


def check_block(block: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """A copy of an open JSON block that reads back equal. Raises InvalidArgument with the culprit's path.

    Allowed: None, bool, int of 64 bits, finite float, str without surrogates, lists, dicts with str keys.
    """
    checked = _check(dict(block), what, 0)
    assert isinstance(checked, dict)
    return checked


def _check(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if depth > _MAX_NESTING:
        raise InvalidArgument(f"{path[:200]} is nested deeper than {_MAX_NESTING}")
    if kind is dict:
        return {_check_key(key, path): _check(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [_check(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
    if value is None or kind is bool:
        return value
    if kind is int and -(2**63) <= value < 2**64:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is str and _is_unicode(value):
        return value
    raise InvalidArgument(f"{path[:200]} is a {kind.__qualname__} that JSON cannot carry exactly")


def _check_key(key: Any, path: str) -> str:
    if type(key) is not str or not _is_unicode(key):
        raise InvalidArgument(f"{path[:200]} has a {type(key).__qualname__} as key; keys must be text")
    return key


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
