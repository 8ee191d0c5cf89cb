"""Ports of a policy model server to its capture ledger and its inference workers.

`participants` asks through these, `capture` implements them, and neither knows the other.
Source: participants sections 7, 8 and 12.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.protocol.ids import EpisodeId

Row = Mapping[str, Any]
"""One row of the ledger as JSON-able fields. `capture/rows.py` knows what they mean; others only carry it."""


# ---- cuts ------------------------------------------------------------------------------------------------

FINISH_REASONS = ("stop", "length")
"""Why a generation can have ended by itself."""


class CutDisposition(enum.IntEnum):
    """Mirror of `gymckpt.v1.CutDisposition`, without its prefix; a test keeps the two equal."""

    UNSPECIFIED = 0
    CUT = 1
    FINISHED = 2
    NOT_FOUND = 3
    UNCUTTABLE = 4
    FAILED = 5


class CutPresence(enum.IntEnum):
    """Mirror of `gymckpt.v1.CutPresence`, without its prefix; a test keeps the two equal."""

    UNSPECIFIED = 0
    PRESENT = 1
    MISSING = 2
    CHANGED = 3


class Capability(enum.IntEnum):
    """Mirror of `gymckpt.v1.GenerationCapability`, without its prefix; a test keeps the two equal."""

    UNSPECIFIED = 0
    CUT = 1
    CONTINUE = 2
    FINISHED = 3


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """One call of an inventory; an acknowledgement repeats it. request_digest: of the effective request, hex."""

    ticket_id: str
    episode: EpisodeId
    model_call_id: str
    request_digest: str


@dataclass(frozen=True, slots=True)
class CutEvidence:
    """What a backend promises to be durable. Fields as in `gymckpt.v1.CutEvidence`; nothing is checked here."""

    cut_id: str
    staging_keys: tuple[str, ...]
    prefix_tokens: int
    prefix_digest: str
    output_limit: int
    weight_version: int
    finish_reason: str = ""
    stop_reason: str = ""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A cut that a call goes on from, as it rides in the capture admission of that call.

    source_capture_key, source_call_id: the call that was cut. The other fields are those of its evidence.
    """

    source_capture_key: str
    source_call_id: str
    staging_keys: tuple[str, ...]
    prefix_tokens: int
    prefix_digest: str
    output_limit: int
    weight_version: int
    finish_reason: str = ""
    stop_reason: str = ""


@dataclass(frozen=True, slots=True)
class CutAck:
    """What became of one call, as the backend says; `participants` judges each alone."""

    call: CallIdentity
    disposition: CutDisposition
    reason: str = ""
    evidence: CutEvidence | None = None


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Who a backend is. incarnation_id: new at each process start."""

    backend_id: str
    incarnation_id: str
    model_id: str
    weight_version: int
    capabilities: frozenset[Capability]


@dataclass(frozen=True, slots=True)
class SweepHeader:
    """First part of a sweep's answer: who cuts, and the name of this pass, for audit."""

    backend_id: str
    incarnation_id: str
    snapshot_id: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one backend is asked for. closing, number: 1 and up. calls: with their ages in seconds."""

    checkpoint_id: str
    service: str
    closing: int
    number: int
    calls: Sequence[tuple[CallIdentity, float]]


class GenerationBackend(Protocol):
    """One inference worker. Calls raise ControlError (OutOfTime at the budget's end) when it cannot be asked."""

    @property
    def name(self) -> str:
        """Its key among the backends of a policy model server; outlives restarts."""

    async def describe(self, budget: Budget) -> BackendInfo:
        """Who it is now, and what it can do."""

    def cut(self, sweep: Sweep, budget: Budget) -> AsyncIterator[SweepHeader | Sequence[CutAck]]:
        """The header, then batches of acknowledgements as they come. What was yielded stands if it breaks."""

    async def check(self, cuts: Sequence[CutEvidence], budget: Budget) -> list[CutPresence]:
        """One presence for each cut, in order."""

    async def release(self, cut_ids: Sequence[str], budget: Budget) -> None:
        """Give cuts up. Repeats and unknown ids succeed."""


GenerationBackends = Mapping[str, GenerationBackend]
"""The inference workers behind a policy model server, by name."""


# ---- ledger ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Removed:
    """What a retire of ledgers found: ids whose ledger was there, and ids that had none. No duplicates."""

    removed: tuple[EpisodeId, ...]
    absent: tuple[EpisodeId, ...]


class StagedRows(Protocol):
    """Rows that an import has written beside the live ledgers."""


class Ledger(Protocol):
    """The token-free rows of a policy model server, on its disk.

    Methods touch files and are called in a thread, one at a time by this owner; other processes may work on the
    same directory. Each is a batch with a constant number of directory syncs.
    """

    def export(self, episodes: Iterable[EpisodeId]) -> dict[EpisodeId, list[Row]]:
        """All rows of each attempt, in the order they were appended; empty for one without a ledger."""

    def call_id(self, row: Row) -> str:
        """The model call that a row is about."""

    def staging_keys(self, row: Row) -> tuple[str, str] | None:
        """(capture key it was staged under or "", staging key) of a staged row; None for rows without tokens."""

    def tokens(self, row: Row) -> int:
        """Tokens that its call has added to what its parent had; 0 for rows without tokens."""

    def stamped(self, row: Row, episode: EpisodeId) -> Row:
        """The row with the capture key of `episode` as who staged it; a stamp is kept, failures have none."""

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise ValueError saying what is wrong with rows of a record, before anything is installed."""

    def stage(self, rows: Mapping[EpisodeId, Sequence[Row]]) -> StagedRows:
        """Write rows for their targets aside; empty ones clear what the target has. Touches nothing live."""

    def activate(self, staged: StagedRows) -> None:
        """For each target: remove it and later attempts of that rollout, fence below it, put the rows in place."""

    def drop(self, staged: StagedRows) -> None:
        """Remove what `stage` wrote."""

    def retire(self, episodes: Sequence[EpisodeId]) -> Removed:
        """Fence attempts up to each id, durably, then remove their ledgers."""

    def discard(self, episodes: Sequence[EpisodeId]) -> None:
        """Remove the ledgers of exactly these attempts; fences stay as they are."""
