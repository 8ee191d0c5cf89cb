"""Where things are: `file://` URIs, roots, and the layout of a checkpoint's directory (storage section 3)."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes, urlsplit

from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.names import escape

Place = tuple[ParticipantKind, str, str]
"""(kind, service, instance): `ParticipantIdentity.place`."""

CHECKPOINTS = "checkpoints"
PARTICIPANTS = "participants"


@dataclass(frozen=True, slots=True)
class PartLocation:
    """The directory of one participant's part, below its root."""

    root: str
    directory: str
    relative: str
    """The directory, from the checkpoint's directory: `participants/<kind>/<service>/<instance>`."""

    @property
    def manifest(self) -> str:
        return f"{self.directory}/manifest.json"

    def file(self, name: str) -> str:
        return f"{self.directory}/{name}"


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The directory of one checkpoint. root: absolute path, links followed. checkpoint_id: a legal id."""

    root: str
    checkpoint_id: str

    @property
    def directory(self) -> str:
        return f"{self.root}/{CHECKPOINTS}/{self.checkpoint_id}"

    @property
    def uri(self) -> str:
        """The `storage_uri` of requests."""
        return path_to_uri(self.directory)

    @property
    def intent(self) -> str:
        return f"{self.directory}/intent.json"

    @property
    def aggregate(self) -> str:
        return f"{self.directory}/checkpoint.json"

    @property
    def events(self) -> str:
        return f"{self.directory}/events.jsonl"

    def file(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def part(self, place: Place) -> PartLocation:
        """Where a participant's part is. Raises InvalidArgument for a service or instance without a name."""
        kind, service, instance = place
        try:
            relative = f"{PARTICIPANTS}/{kind.value}/{escape(service)}/{escape(instance)}"
        except ValueError as error:
            raise InvalidArgument(f"{kind}/{service!r}/{instance!r} cannot be stored: {error}") from None
        return PartLocation(self.root, f"{self.directory}/{relative}", relative)

    def part_file(self, place: Place, name: str, *, checkpoint: str = "") -> str:
        """A file of a participant's part, here or in the same place of another checkpoint of this root."""
        there = CheckpointLocation(self.root, checkpoint) if checkpoint else self
        return there.part(place).file(name)


def path_to_uri(path: str) -> str:
    """The `file://` URI of an absolute path."""
    return f"file://{quote(path)}"


def uri_to_path(uri: str, *, field: str = "storage_uri") -> str:
    """The absolute path of a `file://` URI; a plain absolute path is taken as it is.

    Raises InvalidArgument naming `field` for another scheme, a host, a query, a relative path, empty or dot
    segments, control characters, or text that is not UTF-8.
    """
    if uri.startswith("/"):
        path = uri
    else:
        try:
            parts = urlsplit(uri)
        except ValueError as error:
            raise _bad(field, uri, str(error)) from None
        if parts.scheme != "file":
            raise _bad(field, uri, "is not a file:// URI, the only kind this server stores to")
        if parts.netloc not in ("", "localhost") or "?" in uri or "#" in uri:
            raise _bad(field, uri, "has a host, a query or a fragment")
        # Not `parts.path`: urlsplit drops newlines and tabs in silence.
        raw = uri.partition("://")[2].removeprefix(parts.netloc) if "://" in uri else uri[len("file:") :]
        try:
            path = unquote_to_bytes(raw).decode("utf-8")
        except UnicodeError:
            raise _bad(field, uri, "is not UTF-8") from None
    if problem := _path_problem(path):
        raise _bad(field, uri, problem)
    return path.rstrip("/") or "/"


def _path_problem(path: str) -> str | None:
    if not path.startswith("/"):
        return "is not absolute"
    if any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) <= 0xDFFF for char in path):
        return "has control characters"
    segments = path.rstrip("/").split("/")[1:]
    if any(segment in ("", ".", "..") for segment in segments):
        return "has empty, . or .. segments"
    return None


def _bad(field: str, uri: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {uri[:200]!r} {problem}", violations=(Violation(field, problem),))


def resolve_root(uri: str, files: FileLayer) -> str:
    """The path of a configured root, with its links followed."""
    return files.resolve(uri_to_path(uri, field="root"))


def resolve_checkpoint(
    uri: str, roots: Iterable[str], *, files: FileLayer, field: str = "storage_uri"
) -> CheckpointLocation:
    """The checkpoint directory that a `storage_uri` or `base_checkpoint_uri` names.

    roots: URIs or absolute paths of the configured roots. Opens and creates nothing. Raises InvalidArgument
    naming `field` if it is not `<root>/checkpoints/<checkpoint_id>` of a configured root, or if a link on the
    way leads elsewhere.
    """
    path = uri_to_path(uri, field=field)
    parent, checkpoint_id = posixpath.split(path)
    base, middle = posixpath.split(parent)
    allowed = {resolve_root(root, files) for root in roots}
    if middle != CHECKPOINTS:
        raise _bad(field, uri, f"is not <root>/{CHECKPOINTS}/<checkpoint_id>")
    if problem := checkpoint_id_problem(checkpoint_id):
        raise _bad(field, uri, f"does not end in a checkpoint id: {checkpoint_id[:80]!r} {problem}")
    root = files.resolve(base)
    if root not in allowed:
        raise _bad(field, uri, "is outside the roots configured here")
    location = CheckpointLocation(root, checkpoint_id)
    if files.resolve(location.directory) != location.directory:
        raise _bad(field, uri, "leads through a link")
    return location


def check_part_path(location: PartLocation, files: FileLayer) -> None:
    """Refuse a part's directory that a link leads out of the root. Raises InvalidArgument; opens nothing."""
    if files.resolve(location.directory) != location.directory:
        raise InvalidArgument(f"{location.directory!r} leads through a link")
