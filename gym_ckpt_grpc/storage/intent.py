"""`intent.json`: says whose a checkpoint's directory is, created before the first Commit."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from gym_ckpt_grpc.protocol.errors import CheckpointConflict, StateCorrupt
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.documents import Document
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.locations import CheckpointLocation
from gym_ckpt_grpc.storage.part_manifest import Count, IdentityBlock
from gym_ckpt_grpc.storage.placing import create_once


class Intent(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is about to write a checkpoint, of whom and of what.

    members: with the incarnations that were prepared. scope: how the episodes were chosen, an open JSON
    object. frontier: the proof that the aggregate manifest will repeat, or None.
    """

    FORMAT: ClassVar[str] = "gymckpt.intent"

    format: str = "gymckpt.intent"
    schema_version: int = 1
    checkpoint_id: Annotated[str, msgspec.Meta(min_length=1)]
    run_id: str
    controller_id: str
    epoch: Count
    members: tuple[IdentityBlock, ...]
    scope: dict[str, Any] = msgspec.field(default_factory=dict)
    frontier: dict[str, Any] | None = None


def write_intent(files: FileLayer, location: CheckpointLocation, intent: Intent) -> None:
    """Create the intent, durable; an equal one is accepted.

    Raises CheckpointConflict if the directory is another's, StateUnwritable, InvalidArgument.
    """
    documents.check_block({"scope": intent.scope, "frontier": intent.frontier}, what="intent")
    if create_once(files, location.intent, documents.to_bytes(intent), root=location.root) is not None:
        raise CheckpointConflict(f"{location.intent!r} is there and belongs to another commit")


def read_intent(files: FileLayer, location: CheckpointLocation) -> Intent:
    """Read the intent. Raises StateNotFound, StateCorrupt."""
    intent, _ = documents.read(files, location.intent, Intent)
    if intent.checkpoint_id != location.checkpoint_id:
        raise StateCorrupt(f"{location.intent!r} belongs to checkpoint {intent.checkpoint_id[:200]!r}")
    return intent
