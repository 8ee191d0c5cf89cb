"""Revisions: how the author of a resources server or an agent says which sessions have changed.

An optional hook beside `export_sessions`, found by its name:

    def session_revisions(self) -> Mapping[str, int]

gives a number for each session, by the id or key under which `export_sessions` knows it. With it states are encoded
ahead, while admission is open, and a checkpoint pauses only for the sessions that have changed since. The contract:

- A plain function, called on the server's event loop several times a second and twice at a cut: it must be cheap. What
  it gives is copied at once, so it may be the server's own mapping.
- A number is an integer from 0 to 2**64 - 2. It differs whenever what `export_sessions` would give may differ, and none
  comes back for the same id: not when the session begins anew, not after a restore, not when a change is undone. One
  counter for the whole server does that (`SessionRevisions`); a digest of the state does not.
- No await between a change and its new number, in either order. A handler that changes, awaits and changes again gives
  two numbers. A change made in a thread gets one before it begins and one after it has ended, both on the loop.
- A session that is left out is encoded at each cut; one that no checkpoint knows of is passed over. If the function
  raises, it is logged once, and everything is encoded at the cut.
- A number too many costs time. One too few puts an older state into a checkpoint, and nothing can tell: check yours
  with `gym_ckpt_grpc.testing.RevisionAudit`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import count

from gym_ckpt_grpc.protocol.errors import UsageError

MAX_REVISION = 2**64 - 2


class SessionRevisions:
    """The numbers of a server's sessions, for its `session_revisions` to give."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._current: dict[str, int] = {}

    def changed(self, session_id: str) -> None:
        """Call it at each change of a session, its beginning and its restore included, with no await in between."""
        self._current[session_id] = next(self._numbers)

    def ended(self, session_id: str) -> None:
        """The session is gone; harmless if there was none."""
        self._current.pop(session_id, None)

    def current(self) -> Mapping[str, int]:
        """The number of each session."""
        return self._current


def check_revisions(hooks: object) -> None:
    """Raise UsageError for a `session_revisions` that could not be called on the loop and answered at once."""
    hook = getattr(hooks, "session_revisions", None)
    if hook is not None and (not callable(hook) or inspect.iscoroutinefunction(hook)):
        raise UsageError("session_revisions must be a plain function, not an asynchronous one")


def revision_in(revisions: Mapping[str, int], key: str) -> int | None:
    """The revision of a session; None if there is none, or one that cannot be stored."""
    revision = revisions.get(key)
    return revision if type(revision) is int and 0 <= revision <= MAX_REVISION else None
