"""How a resources server takes part: its mode, whether `/verify` may run twice, and what its author declares."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gym_ckpt_grpc.participants.revisions import check_revisions
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId

log = logging.getLogger(__name__)


class ResourcesMode(enum.StrEnum):
    """What happens to the sessions of a resources server in a checkpoint."""

    RESTART_ONLY = "restart_only"
    """They cannot be captured: their episodes start over. Never blocks."""
    STATELESS = "stateless"
    """There is nothing to capture but that they exist."""
    EXPORTED = "exported"
    """The author's hooks export and restore them."""


class VerifyMode(enum.StrEnum):
    """Whether `/verify` may run twice."""

    WAIT = "wait"
    REPLAY = "replay"
    """A promise: it changes no checkpointed state."""


@dataclass(frozen=True, slots=True)
class RestoredState:
    """A session to install: its id, its episode from now on, and what its author exported.

    content_type: of RAW state (`storage.raw`), which comes back as bytes; empty for any other.
    """

    session_id: str
    episode: EpisodeId
    state: Any
    content_type: str = ""


class ResourcesHooks(Protocol):
    """What the author of an `exported` resources server writes. All of a checkpoint or restore comes in one call.

    An optional `held_sessions(self) -> set[str]` tells which sessions the server still has; asked once per close.

    An optional `session_revisions(self) -> Mapping[str, int]` gives a number for each session, so that states can be
    encoded ahead of a checkpoint, which then pauses only for what has changed since; `participants/revisions.py` states
    its contract.
    """

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        """State of each session, JSON-able or `storage.raw` bytes, and not changed afterwards.

        Leave out those that are gone. With `session_revisions` it is also called while admission is open, for a few
        sessions at a time and beside the requests that change them, and may be cancelled at any of its awaits.
        """

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        """Check all, then install all. Raise InvalidState naming an episode whose state is unusable."""

    async def retire_session(self, session_id: str) -> None:
        """Free a session; must tolerate repeats and ids it never saw."""


REQUIRED_HOOKS = ("export_sessions", "restore_sessions", "retire_session")


def check_hooks(mode: ResourcesMode, hooks: object | None) -> None:
    """Raise UsageError naming the hooks that an `exported` server lacks. Inherited ones count, stubs do not."""
    if mode is not ResourcesMode.EXPORTED:
        return
    check_revisions(hooks)
    missing = [name for name in REQUIRED_HOOKS if not _is_written(hooks, name)]
    if missing:
        raise UsageError(f"an exported resources server needs {', '.join(missing)} of its own")


def _is_written(hooks: object | None, name: str) -> bool:
    method = getattr(hooks, name, None)
    stub = getattr(ResourcesHooks, name)
    return callable(method) and getattr(method, "__func__", method) is not stub


def declared_mode(server: type) -> ResourcesMode:
    """The `checkpoint_mode` of a server class, if that very class states it; else restart_only."""
    return ResourcesMode(_declared(server, "checkpoint_mode", ResourcesMode.RESTART_ONLY.value))


def declared_verify(server: type) -> VerifyMode:
    """The `checkpoint_verify` of a server class, if that very class states it; else wait."""
    return VerifyMode(_declared(server, "checkpoint_verify", VerifyMode.WAIT.value))


def _declared(server: type, name: str, default: str) -> str:
    """A subclass may keep state that its parent does not know of: what the parent promised is not inherited."""
    if name in vars(server):
        return str(vars(server)[name])
    inherited = getattr(server, name, default)
    if inherited != default:
        log.warning("%s does not restate %s = %r of its parent: it is %s", server.__name__, name, inherited, default)
    return default
