"""Deleting checkpoints: what holds one, and removal that a crash can interrupt anywhere (storage section 7).

A checkpoint leaves the published set by one rename to a name that no id can have; only then are its files deleted. A
removal that was interrupted is finished by the next one.
"""

from __future__ import annotations

from collections.abc import Collection

from gym_ckpt_grpc.protocol.errors import CheckpointConflict, StaleController, StateCorrupt, StateNotFound
from gym_ckpt_grpc.storage.aggregate import read_aggregate
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.locations import CHECKPOINTS, CheckpointLocation
from gym_ckpt_grpc.storage.root import CheckpointRoot
from gym_ckpt_grpc.storage.sequence import Publication

TOMBSTONE = ".deleted-"
"""Beginning of the name of a directory that is being deleted; ids begin with a letter or a digit."""


def delete_checkpoint(root: CheckpointRoot, checkpoint_id: str, *, epoch: int, open_ids: Collection[str] = ()) -> None:
    """Delete a checkpoint that nothing holds; one that is deleted already is fine.

    epoch: of the caller. open_ids: checkpoints that it has open, or is restoring. Raises CheckpointConflict naming the
    holder, StateNotFound, StaleController if a higher epoch was claimed, StateCorrupt for a sequence that cannot be
    read, StateUnwritable (the same call again finishes it).
    """
    location = root.location(checkpoint_id)
    _check_owner(root, epoch)
    finish_deletions(root)
    publications = root.sequence.publications()
    mine = next((entry for entry in publications if entry.checkpoint_id == checkpoint_id), None)
    there = root.files.is_dir(location.directory)
    if holder := _holder(root, location, publications, mine, there=there, epoch=epoch, open_ids=open_ids):
        raise CheckpointConflict(f"checkpoint {checkpoint_id!r} is kept: {holder}")
    if not there:
        if mine is None:
            raise StateNotFound(f"there is no checkpoint {checkpoint_id!r}")
        return
    parent = f"{root.path}/{CHECKPOINTS}"
    root.files.move_dir(location.directory, f"{parent}/{TOMBSTONE}{checkpoint_id}")
    root.files.sync_dir(parent)
    finish_deletions(root)


def _check_owner(root: CheckpointRoot, epoch: int) -> None:
    highest, _ = root.sequence.epoch()
    if highest > epoch:
        raise StaleController(f"epoch {epoch} was replaced by {highest}")
    if problems := root.sequence.problems():
        raise StateCorrupt(f"{problems[0].message}; what is published is not known, so nothing is deleted")


def _holder(
    root: CheckpointRoot,
    location: CheckpointLocation,
    publications: tuple[Publication, ...],
    mine: Publication | None,
    *,
    there: bool,
    epoch: int,
    open_ids: Collection[str],
) -> str:
    """What keeps a checkpoint, for people; empty if nothing does."""
    if location.checkpoint_id in open_ids:
        return "it is open"
    if mine is not None and mine == publications[0]:
        return "it is the newest published one"
    newest_epoch = publications[0].epoch if publications else 0
    for pin in root.pins():
        if pin.checkpoint_id == location.checkpoint_id and pin.epoch >= newest_epoch:
            return f"it is pinned by the restore of epoch {pin.epoch}"
    if not there:
        return ""
    try:
        if mine is not None:
            read_aggregate(root.files, location, expected_digest=mine.manifest_digest)
        else:
            intent = root.read_intent(location.checkpoint_id)
            if intent.epoch > epoch:
                return f"controller {intent.controller_id!r} writes it under epoch {intent.epoch}"
    except StateNotFound as error:
        return f"it cannot be read ({error.message})" if mine else f"it is none of ours ({error.message})"
    except StateCorrupt as error:
        return f"it cannot be read ({error.message})"
    return ""


def finish_deletions(root: CheckpointRoot) -> int:
    """Delete what interrupted removals left; how many there were. Raises StateUnwritable, StateCorrupt."""
    parent = f"{root.path}/{CHECKPOINTS}"
    left = [name for name in root.files.names(parent) if name.startswith(TOMBSTONE)]
    for name in left:
        _remove_tree(root.files, f"{parent}/{name}")
    if left:
        root.files.sync_dir(parent)
    return len(left)


def _remove_tree(files: FileLayer, directory: str) -> None:
    """Links are removed, never followed."""
    for name in files.names(directory):
        path = f"{directory}/{name}"
        if files.is_dir(path):
            _remove_tree(files, path)
        else:
            files.remove(path)
    files.remove_dir(directory)
