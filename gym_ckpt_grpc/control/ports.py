"""The hook contract between the control plane and the owner of a server's state, and the port it is given.

`StateOwner` is what participants implement; `OwnerPort` is all that an owner knows of the control plane. The
rooms of level 4 meet only through these. Source: participants sections 2 and 3.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import PrepareReport
from gym_ckpt_grpc.storage import Payload, Record
from gym_ckpt_grpc.telemetry import Recorder
from gym_ckpt_grpc.telemetry.catalogue import Instrument


class InvalidState(ValueError):
    """An owner rejects a record at Restore: reported as STATE_CORRUPT naming the episode."""

    def __init__(self, message: str, episode: EpisodeId | None = None) -> None:
        super().__init__(message)
        self.episode = episode


class HookFailed(Exception):
    """An author's hook failed for one episode; carries the episode so that the error can name it."""

    def __init__(self, message: str, episode: EpisodeId | None = None) -> None:
        super().__init__(message)
        self.episode = episode


class EpisodeListKind(enum.IntEnum):
    """Mirror of `gymckpt.v1.EpisodeListKind`, without its prefix; a test keeps the two equal.

    An owner is asked for RESTART, BLOCKING and RESTORED_PENDING; the control plane knows the others itself.
    """

    UNSPECIFIED = 0
    COMMITTED = 1
    RESTART = 2
    BLOCKING = 3
    RESTORED_PENDING = 4
    RETIRED = 5
    WITHOUT_RECORD = 6


@dataclass(frozen=True, slots=True)
class Closing:
    """One closing of admission. number rises by one per closing; an answer to an earlier one is late.

    ready_within: seconds that the controller gives this participant to get ready, 0 and up, counted from the close;
    None for a Restore, which waits for nobody and exports nothing.
    """

    checkpoint_id: str
    number: int
    budget: Budget
    ready_within: float | None = None


class OpeningCause(enum.StrEnum):
    """Why admission opens."""

    RESUMED = "resumed"
    ABORTED = "aborted"
    LEASE_EXPIRED = "lease_expired"
    RESTORED = "restored"
    CLOSE_FAILED = "close_failed"


@dataclass(frozen=True, slots=True)
class Opening:
    """One opening of admission."""

    cause: OpeningCause


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Frozen records, and episodes of the scope whose state turned out to be gone."""

    records: Sequence[Record]
    left_out: Sequence[EpisodeId] = ()


@dataclass(frozen=True, slots=True)
class StagingKeys:
    """Keys of staged tokens that records name, each once: how many, the digest of all, and the first of them, sorted.

    digest: SHA-256, lower-case hex, of the sorted keys, each followed by a newline.
    """

    count: int
    digest: str
    first: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommitExtra:
    """What a kind adds to a commit. manifest: facts for its manifest, JSON-able. documents: files of their own beside
    the records, by a label of at most 64 characters. staging_keys: for the reply of a policy model server.
    """

    manifest: Mapping[str, Any] = field(default_factory=dict)
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    staging_keys: StagingKeys | None = None


class Precopied(enum.Enum):
    """What one pass of encoding ahead found."""

    NEVER = "never"
    """This owner has nothing to encode ahead, now or later: it is not asked again."""
    QUIET = "quiet"
    """Nothing has changed since the pass before."""
    CHANGING = "changing"
    """Something has: another pass is worth its while soon."""
    MORE = "more"
    """The pass has stopped since it was `over`; the next one may follow at once."""


class Pace(Protocol):
    """How much a pass of encoding ahead may take. Its methods raise CancelledError once admission is to close."""

    spent: float
    """Processor seconds of work since the last rest."""

    @property
    def max_bytes(self) -> int:
        """Bytes of encoded state that may be kept, 0 and up."""

    @property
    def over(self) -> bool:
        """Whether the pass has lasted long enough to look anew at what has changed."""

    def working(self) -> AbstractContextManager[None]:
        """Count what is done in this block as work. May be held over awaits."""

    async def digest(self, payloads: Sequence[Payload]) -> None:
        """Digest payloads in a thread, so that nobody has to at the cut."""

    async def rest(self) -> None:
        """Let others have the loop, for as long as the share asks after this much work."""


class MarkView(Protocol):
    """What an owner may ask about retired attempts."""

    def refuses(self, episode: EpisodeId) -> bool:
        """Whether this attempt was retired."""

    def being_retired(self, episode: EpisodeId) -> bool:
        """Whether it was retired and is not freed yet."""


class OwnerPort(Protocol):
    """What an owner is given at `attach`."""

    @property
    def identity(self) -> ParticipantIdentity:
        """Who this participant is."""

    @property
    def recorder(self) -> Recorder:
        """Where this participant's spans and metrics go."""

    @property
    def marks(self) -> MarkView:
        """Refusals; an owner consults them on every request."""

    def changed(self) -> None:
        """Tell that readiness may have changed. Only while closed; cheap; once per loop turn is enough."""


class StateOwner(Protocol):
    """Owns the checkpointed state of one server. All methods are called on the server's event loop."""

    @property
    def kind(self) -> ParticipantKind:
        """Which state it owns."""

    def attach(self, port: OwnerPort) -> None:
        """Called once, before anything else."""

    async def close_admission(self, closing: Closing) -> None:
        """Set the closed flag before the first await, then ask work to park, within `closing.budget`.

        Raising reopens admission and fails the call.
        """

    async def open_admission(self, opening: Opening) -> None:
        """Continue parked work and release held calls. Safe to repeat; returns when the doors are open."""

    def is_ready(self) -> bool:
        """Whether every live execution is at a boundary. O(1): no report, no scan, no digest."""

    def report(self, limit: int) -> PrepareReport:
        """Blockers, at most `limit`, oldest first; exact totals; restarts; counts."""

    def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        """All blocking, restart or restored-pending episodes, in batches."""

    def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        """Frozen records of the scope, in batches; nothing outside it. Raise HookFailed to name an episode."""

    async def precopy(self, pace: Pace) -> Precopied:
        """One pass of encoding ahead, while admission is open: what changed since it was last encoded is encoded and
        kept, and `export` uses it if it has not changed again.

        Called again and again in IDLE, never twice at a time; cancelled when admission is about to close. Rests after
        each small piece of work. Raising hinders no checkpoint.
        """

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> Any:
        """Check everything and build it aside, touching nothing live; gives what `activate` takes.

        `scope` names every episode to install with its target, also those without a record here.
        """

    async def activate(self, staged: Any) -> None:
        """Make all of it live as next attempts, with no step that the data can make fail."""

    async def discard(self, staged: Any) -> None:
        """Drop what `stage` built, without trace."""

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        """Stop it and its earlier attempts, wait until they ended, then free their state."""

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        """Raise RetireIncomplete while a retired attempt still holds something."""

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        """Drop own refusals up to this attempt."""

    def restored_pending(self) -> frozenset[EpisodeId]:
        """Next attempts installed by a restore that nothing has started."""

    async def delete_restored(self, episode: EpisodeId) -> None:
        """Free such state if it is still unstarted, and leave no refusal."""

    async def release_exported(self, episodes: Sequence[EpisodeId]) -> None:
        """Free compute held outside the process for what was exported; best effort (Commit with stop)."""

    def commit_extra(self, records: Sequence[Record]) -> CommitExtra:
        """What this kind adds to a commit of frozen records. Called in a thread, at each try: it reads only them."""

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        """The fate of a checkpoint's records, told exactly once for each checkpoint that was closed for, also
        if the close failed; never for a Restore.

        durable: they are in storage, or may be. False: nothing of them is or will be there. It may come after
        admission has opened (`keep_write`), or even while the next checkpoint is open. Must not wait.
        """

    def accept_manifest_extra(self, extra: Mapping[str, Any]) -> None:
        """Check a manifest's extra fields before `stage`; raise InvalidState to refuse them."""

    def status_extra(self) -> Mapping[str, str]:
        """Cheap extra fields for GetStatus."""

    def gauges(self) -> Mapping[Instrument, float]:
        """What this kind's gauges show now, by instrument of the catalogue. Called often, any time: it only reads."""


class OwnerDefaults:
    """Defaults of the hooks that a small owner has no use for."""

    async def precopy(self, pace: Pace) -> Precopied:
        return Precopied.NEVER

    async def release_exported(self, episodes: Sequence[EpisodeId]) -> None:
        return None

    def commit_extra(self, records: Sequence[Record]) -> CommitExtra:
        return CommitExtra()

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        return None

    def accept_manifest_extra(self, extra: Mapping[str, Any]) -> None:
        return None

    def status_extra(self) -> Mapping[str, str]:
        return {}

    def gauges(self) -> Mapping[Instrument, float]:
        return {}
