"""Which earlier checkpoint a new one refers to, so that unchanged records are not written again.

The base is the newest published checkpoint of the root, whichever run it is of. An intent need not name it: what is
newest is never removed, and nothing newer can be published before this checkpoint is. Source: storage section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import ControlError, StateNotFound
from gym_ckpt_grpc.storage import LATEST, CheckpointRoot

MAX_CHAIN = 8
"""Checkpoints of a chain, its full one included; the next one is full again."""


@dataclass(frozen=True, slots=True)
class Base:
    """What Commit is told. uri: `base_checkpoint_uri`, empty for a full checkpoint. reason: for people."""

    uri: str
    reason: str


def find_base(root: CheckpointRoot, max_chain: int) -> Base:
    """The base of the next checkpoint. Blocking. Whatever cannot be read gives a full one: never raises for it."""
    try:
        found = root.find(LATEST)
    except StateNotFound as error:
        return Base("", f"written in full: {error.message}")
    except ControlError as error:
        return Base("", f"written in full, since the newest published checkpoint cannot be read: {error.message}")
    name = found.location.checkpoint_id
    chain = 1 + max((member.chain for member in found.manifest.members), default=0)
    if chain >= max_chain:
        return Base("", f"written in full: {name} ends a chain of {max_chain}")
    return Base(found.location.uri, f"incremental: unchanged records stay in {name} and what it refers to")
