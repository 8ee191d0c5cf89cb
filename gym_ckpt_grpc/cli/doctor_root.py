"""What `gym-ckpt doctor` checks about a root: whether it can be written, and whether the newest in it is whole."""

from __future__ import annotations

from gym_ckpt_grpc.cli.checks import Check, Level
from gym_ckpt_grpc.cli.output import size
from gym_ckpt_grpc.protocol.errors import ControlError, StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage import LATEST, CheckpointRoot, check_members

SUBJECT = "root"
SCARCE = 1 << 30
"""Free bytes below which a root is worth a word."""


def check_root(root: str, highest_epoch: int) -> list[Check]:
    """Blocking. highest_epoch: the highest that any participant has obeyed."""
    if not root:
        return [Check(Level.OK, SUBJECT, "was not looked at: --root names it")]
    try:
        opened = CheckpointRoot(root)
        if not opened.files.is_dir(opened.path):
            return [Check(Level.FAIL, SUBJECT, f"{opened.path} is no directory", "make it, or name another")]
    except ControlError as error:
        return [Check(Level.FAIL, SUBJECT, str(error), "name another one")]
    return [*_writable(opened), *_newest(opened), *_owner(opened, highest_epoch)]


def _writable(opened: CheckpointRoot) -> list[Check]:
    try:
        found = opened.preflight()
    except (StateUnwritable, StateCorrupt) as error:
        advice = "mend its permissions or its mount, or make room: no checkpoint can be written"
        return [Check(Level.FAIL, SUBJECT, str(error), advice)]
    checks = [Check(Level.OK, SUBJECT, f"{opened.path} can be written, and names are created by one writer only")]
    if found.free_bytes is not None:
        scarce = found.free_bytes < SCARCE
        text = f"{size(found.free_bytes)} are free"
        checks.append(Check(Level.WARN if scarce else Level.OK, SUBJECT, text, "make room before it is full"))
    checks += [Check(Level.WARN, SUBJECT, note, "see the storage notes") for note in found.notes]
    return checks


def _newest(opened: CheckpointRoot) -> list[Check]:
    problems = opened.sequence.problems()
    checks = [
        Check(Level.FAIL, SUBJECT, str(problem), "put the entry back from a copy; publications after it still stand")
        for problem in problems
    ]
    try:
        found = opened.find(LATEST)
        check_members(opened.files, found.location, found.manifest)
    except StateNotFound as error:
        return [*checks, Check(Level.OK, SUBJECT, error.message)]
    except StateCorrupt as error:
        advice = "gym-ckpt verify names all damage; restore an earlier checkpoint by its id"
        return [*checks, Check(Level.FAIL, SUBJECT, f"the newest checkpoint is damaged: {error}", advice)]
    assert found.publication is not None
    text = f"the newest is {found.manifest.checkpoint_id}, number {found.publication.number}: its manifests agree"
    return [*checks, Check(Level.OK, SUBJECT, text)]


def _owner(opened: CheckpointRoot, highest_epoch: int) -> list[Check]:
    try:
        epoch, released = opened.sequence.epoch()
    except StateCorrupt:
        return []  # told as a problem of the sequence
    checks = []
    owner = opened.read_owner()
    if owner is not None and not released and owner.epoch == epoch and owner.is_gone():
        text = f"controller {owner.controller_id} of epoch {epoch} ended without closing: its process is gone"
        checks.append(Check(Level.WARN, SUBJECT, text, "nothing holds the root: the next start claims above it"))
    elif epoch and not released:
        checks.append(Check(Level.OK, SUBJECT, f"epoch {epoch} is claimed and not released: its controller may live"))
    elif epoch:
        checks.append(Check(Level.OK, SUBJECT, f"epoch {epoch} was released: nobody holds the root"))
    if highest_epoch > epoch:
        text = f"participants have obeyed epoch {highest_epoch}, the root knows {epoch}"
        checks.append(Check(Level.WARN, SUBJECT, text, "they were driven from another root: is this the right one?"))
    return checks
