"""`pins/<epoch>-<checkpoint_id>`: a restore's hold on its source, create-only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem
from gym_ckpt_grpc.storage.documents import Document
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.placing import create_document

_NAME = re.compile(r"(?P<epoch>[1-9][0-9]*)-(?P<checkpoint_id>.+)\Z")


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """A checkpoint held by the restore of an epoch; void once a higher epoch has published."""

    epoch: int
    checkpoint_id: str


class _PinFile(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    FORMAT: ClassVar[str] = "gymckpt.pin"

    epoch: Annotated[int, msgspec.Meta(ge=1)]
    checkpoint_id: str


def add_pin(files: FileLayer, root: str, pin: Pin) -> None:
    """Hold a checkpoint, durable; again is fine. Raises StateUnwritable, ValueError for an epoch below 1."""
    if pin.epoch < 1 or checkpoint_id_problem(pin.checkpoint_id):
        raise ValueError(f"{pin} is no pin")
    content = _PinFile(
        format=_PinFile.FORMAT,
        schema_version=_PinFile.VERSION,
        epoch=pin.epoch,
        checkpoint_id=pin.checkpoint_id,
    )
    create_document(files, _path(root, pin), content, root=root)


def remove_pin(files: FileLayer, root: str, pin: Pin) -> None:
    """Let a checkpoint go; not held is fine. Raises StateUnwritable."""
    files.remove(_path(root, pin))


def list_pins(files: FileLayer, root: str) -> tuple[Pin, ...]:
    """All pins; the name alone says it, so a damaged pin still holds. Raises StateCorrupt."""
    matches = (_NAME.match(name) for name in files.names(f"{root}/pins"))
    return tuple(sorted(Pin(int(match["epoch"]), match["checkpoint_id"]) for match in matches if match))


def _path(root: str, pin: Pin) -> str:
    return f"{root}/pins/{pin.epoch}-{pin.checkpoint_id}"
