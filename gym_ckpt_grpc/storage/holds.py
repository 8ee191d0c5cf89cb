"""`holds/<checkpoint_id>=<name>`: what keeps a checkpoint until it is released by name, whatever epochs come and go.

For a trainer whose own save refers to a checkpoint. A pin ends with the run that made it; a hold does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem
from gym_ckpt_grpc.storage.documents import Document
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.placing import create_document

MAX_NAME = 100
"""Longest name of a hold, in characters: with the id in front of it, it is a file's name."""

_NAME = re.compile(r"(?P<checkpoint_id>[^=]+)=(?P<name>[^=]+)\Z")  # no id has a `=`


@dataclass(frozen=True, slots=True, order=True)
class Hold:
    """A checkpoint that is kept until the hold of this name is released."""

    checkpoint_id: str
    name: str


class _HoldFile(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    FORMAT: ClassVar[str] = "gymckpt.hold"

    checkpoint_id: str
    name: str


def check_name(name: str) -> None:
    """Raise InvalidArgument for what cannot name a hold: the characters of an id, at most MAX_NAME of them."""
    problem = checkpoint_id_problem(name)
    if problem is None and len(name) > MAX_NAME:
        problem = f"has {len(name)} characters, at most {MAX_NAME} are allowed"
    if problem:
        raise InvalidArgument(f"the hold's name {name[:80]!r} {problem}", violations=[Violation("name", problem)])


def add_hold(files: FileLayer, root: str, hold: Hold) -> None:
    """Hold a checkpoint, durable; again is fine. Raises StateUnwritable, InvalidArgument."""
    check_name(hold.name)
    content = _HoldFile(
        format=_HoldFile.FORMAT,
        schema_version=_HoldFile.VERSION,
        checkpoint_id=hold.checkpoint_id,
        name=hold.name,
    )
    create_document(files, _path(root, hold), content, root=root)


def remove_hold(files: FileLayer, root: str, hold: Hold) -> None:
    """Release a checkpoint; not held is fine. Raises StateUnwritable, InvalidArgument."""
    check_name(hold.name)
    files.remove(_path(root, hold))


def list_holds(files: FileLayer, root: str) -> tuple[Hold, ...]:
    """All holds, by checkpoint and name; the file's name alone says it. Raises StateCorrupt."""
    matches = (_NAME.match(name) for name in files.names(f"{root}/holds"))
    return tuple(sorted(Hold(match["checkpoint_id"], match["name"]) for match in matches if match))


def _path(root: str, hold: Hold) -> str:
    return f"{root}/holds/{hold.checkpoint_id}={hold.name}"
