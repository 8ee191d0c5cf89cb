"""State hooks of the released servers that keep state in sessions. Nothing of them is imported before one is asked for.

hooks = hooks_for(server)  # once for a server, before it serves
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gym_ckpt_grpc.integrations.nemo_gym.hooks.known import KNOWN, Known
from gym_ckpt_grpc.participants import ResourcesHooks

log = logging.getLogger(__name__)


class SessionHooks(ResourcesHooks, Protocol):
    """What a ResourcesOwner takes. Some give `session_revisions` as well.

    seed_fields: fields of a seed's body that hooks need; those that have some also have `seeded(session_id, fields)`,
    called when a seed was answered well, with the fields that its body had.
    """

    seed_fields: tuple[str, ...]


def hooks_for(server: object) -> SessionHooks | None:
    """The hooks of a server, looked up by its class and those that it derives from; None if there are none.

    None too, with a warning, for a class that keeps more than the released one it derives from, and for one whose
    source is not the one that the hooks were written for: they would lose what they do not know of. Naming a class of
    hooks as the `hooks` of an instance uses it all the same.
    """
    # A subclass that was made to take part has the name of the released class, so the last of a name is that one.
    found = {_place(cls): cls for cls in type(server).__mro__ if _place(cls) in KNOWN}
    for place, cls in found.items():
        known = KNOWN[place]
        problem = _surplus(type(server), cls) or _changed(cls, known)
        if problem:
            log.warning("the state hooks of %s are not used: %s", place, problem)
            return None
        module = importlib.import_module(f"{__name__}.{known.module}")
        hooks: SessionHooks = getattr(module, known.name)(server)
        return hooks
    return None


def _place(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _surplus(cls: type, released: type) -> str:
    """What a class may keep that the released one does not, as text; empty if nothing."""
    names = sorted(_attributes(cls).keys() - _attributes(released).keys())
    return f"{_place(cls)} also has {', '.join(names)}" if names else ""


def _attributes(cls: Any) -> Mapping[str, Any]:
    return {**getattr(cls, "model_fields", {}), **getattr(cls, "__private_attributes__", {})}


def _changed(released: type, known: Known) -> str:
    """Which source is another than the one known, as text; empty if none."""
    root = Path(str(sys.modules[released.__module__].__file__)).parents[1]
    files = ((root / place / name, digest) for place, each in known.sources.items() for name, digest in each.items())
    for path, digest in files:
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return f"{path} is not the file that they were written for"
    return ""
