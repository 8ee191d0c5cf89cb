"""Taking a checkpoint's directory away, so that a crash can interrupt it anywhere and nobody is surprised.

1. It is renamed to `.aside-<unique>-<id>`, which is no id: readers pass over it. It is whole, and may still come back.
2. Whoever keeps it is looked for once more. A pin or hold is placed first and its checkpoint looked for afterwards, so
   of the two at least one sees the other: either the placing fails since the checkpoint is gone, or what was placed is
   seen here, and the directory gets its name back.
3. It is renamed to `.deleted-<unique>-<id>`, the tombstone, which never comes back; then its files are deleted.

Each rename lasts before the next step. What an interruption leaves is settled by the next one. An object store has no
rename: there `move_dir` creates one small object under the target's name that stands for the prefix of the directory
(and removes the one that stood for it before); listings show that name in the prefix's place, and deleting the tree
deletes the objects of the prefix first and the small one last.
"""

from __future__ import annotations

import posixpath
import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateUnwritable
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.locations import CHECKPOINTS
from gym_ckpt_grpc.storage.root import CheckpointRoot
from gym_ckpt_grpc.storage.stop import StopFlag

ASIDE = ".aside-"
"""Beginning of the name of a directory whose removal is not decided yet; ids begin with a letter or a digit."""

TOMBSTONE = ".deleted-"
"""Beginning of the name of a directory that is being deleted."""

_REMOVING = re.compile(rf"({re.escape(ASIDE)}|{re.escape(TOMBSTONE)})(?:[0-9a-f]{{32}}-)?(?P<checkpoint_id>.+)\Z")

Look = Callable[[str], str]
"""What keeps the checkpoint of an id now, for people; empty if nothing does."""


def removing_id(name: str) -> str | None:
    """The checkpoint of a directory that is being removed; None if its name says nothing of that kind."""
    match = _REMOVING.match(name)
    return match["checkpoint_id"] if match else None


def undecided(names: Iterable[str]) -> frozenset[str]:
    """The checkpoints among names of directories that were moved aside and may still get their names back."""
    return frozenset(found for name in names if name.startswith(ASIDE) and (found := removing_id(name)))


def remove_directory(root: CheckpointRoot, checkpoint_id: str, look: Look, stop: StopFlag | None = None) -> str:
    """Remove a checkpoint's directory; what keeps it after all, or empty once it is gone. See the module.

    stop: where it is set, the rest is left to the next removal. Raises StateUnwritable, StateCorrupt, WriteStopped.
    """
    location, parent = root.location(checkpoint_id), _parent(root)
    aside = f"{parent}/{ASIDE}{uuid.uuid4().hex}-{checkpoint_id}"
    if not _moved(root.files, location.directory, aside):
        return ""
    root.files.sync_dir(parent)
    return _decide(root, aside, checkpoint_id, look, stop)


def settle(root: CheckpointRoot, name: str, look: Look, stop: StopFlag | None = None) -> str:
    """Go on with an interrupted removal, by the name of its directory; what keeps the checkpoint, or empty once gone.

    Raises StateUnwritable, StateCorrupt, WriteStopped.
    """
    path, checkpoint_id = f"{_parent(root)}/{name}", removing_id(name)
    assert checkpoint_id is not None
    if name.startswith(ASIDE):
        return _decide(root, path, checkpoint_id, look, stop)
    _bury(root, path, stop)
    return ""


def interrupted(root: CheckpointRoot) -> list[str]:
    """Names of the directories whose removal was interrupted, or is under way. Raises StateCorrupt."""
    return [name for name in root.files.names(_parent(root)) if removing_id(name) is not None]


def _parent(root: CheckpointRoot) -> str:
    return f"{root.path}/{CHECKPOINTS}"


def _decide(root: CheckpointRoot, aside: str, checkpoint_id: str, look: Look, stop: StopFlag | None) -> str:
    parent = _parent(root)
    try:
        why = look(checkpoint_id)
    except BaseException:
        _put_back(root, aside, checkpoint_id)
        raise
    if why:
        _put_back(root, aside, checkpoint_id)
        return why
    tombstone = f"{parent}/{TOMBSTONE}{uuid.uuid4().hex}-{checkpoint_id}"
    if _moved(root.files, aside, tombstone):
        root.files.sync_dir(parent)
        _bury(root, tombstone, stop)
    return ""


def _put_back(root: CheckpointRoot, aside: str, checkpoint_id: str) -> None:
    if _moved(root.files, aside, root.location(checkpoint_id).directory):
        root.files.sync_dir(_parent(root))


def _moved(files: FileLayer, path: str, target: str) -> bool:
    """Rename; False where another process has taken the directory meanwhile. Raises StateUnwritable."""
    try:
        files.move_dir(path, target)
    except StateUnwritable:
        names: list[str] | None = None
        with suppress(StateCorrupt):
            names = files.names(posixpath.dirname(path))
        if names is None or posixpath.basename(path) in names or posixpath.basename(target) in names:
            raise
        return False
    return True


def _bury(root: CheckpointRoot, tombstone: str, stop: StopFlag | None) -> None:
    remove_tree(root.files, tombstone, stop)
    root.files.sync_dir(_parent(root))


def remove_tree(files: FileLayer, path: str, stop: StopFlag | None = None) -> None:
    """Delete what has this name and all in it; links are removed, never followed, also one of this very name."""
    if not files.is_dir(path):
        if stop is not None:
            stop.check()
        files.remove(path)
        return
    for name in files.names(path):
        remove_tree(files, f"{path}/{name}", stop)
    files.remove_dir(path)
