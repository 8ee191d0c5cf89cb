"""Whether a root can take a checkpoint, asked before anything is captured or written."""

from __future__ import annotations

from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage.files import FileLayer

_SPARE = 16 << 20  # bytes for manifests and the sequence, beyond what is expected of the records


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a preflight found. free_bytes: None if the place cannot say. notes: for people."""

    free_bytes: int | None
    notes: tuple[str, ...]


def preflight(files: FileLayer, root: str, *, expected_bytes: int = 0) -> Preflight:
    """Check that files can be made, synced and named once below a root, and that `expected_bytes` more fit.

    root: a path, made if it is missing. Costs two syncs, and leaves nothing. It is asked as whoever will write, so
    each participant asks for itself. Raises StateUnwritable naming the path.
    """
    files.make_dirs(root)
    try:
        notes = files.probe(root)
        free = files.free_bytes(root)
    except (StateCorrupt, StateNotFound) as error:  # it went away meanwhile, or cannot be asked
        raise StateUnwritable(error.message) from error
    if free is not None and free < expected_bytes + _SPARE:
        raise StateUnwritable(f"{root!r} has {free} bytes left, {expected_bytes + _SPARE} are needed")
    return Preflight(free, notes)
