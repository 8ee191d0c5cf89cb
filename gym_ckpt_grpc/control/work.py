"""What the control plane holds for one open checkpoint or restore, and the replies it gives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from gym_ckpt_grpc.control.ports import StagingKeys
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.protocol.report import PrepareReport
from gym_ckpt_grpc.storage import Record, StopFlag

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class PrepareReply:
    """What a Prepare reached."""

    phase: Phase
    report: PrepareReport


@dataclass(frozen=True, slots=True)
class Captured:
    """Frozen records of one capture. without_record: scope episodes that have none here."""

    records: Sequence[Record]
    left_out: tuple[EpisodeId, ...]
    without_record: tuple[EpisodeId, ...]
    restart_count: int


@dataclass(frozen=True, slots=True)
class CommitReply:
    """What a Commit wrote. release_problem: why compute was not freed (`stop`), or empty."""

    manifest_digest: str
    record_count: int
    bytes: int
    left_out: tuple[EpisodeId, ...]
    without_record: int
    deleting: int
    restart_count: int
    release_problem: str = ""
    staging_keys: StagingKeys | None = None


@dataclass(frozen=True, slots=True)
class ResumeReply:
    """Where the participant stands after a Resume."""

    phase: Phase
    active_checkpoint_id: str
    replayed: bool


@dataclass(frozen=True, slots=True)
class RestoreReply:
    """What a Restore installed."""

    source_checkpoint_id: str
    record_count: int
    without_record: int
    bytes: int
    installed: tuple[EpisodeId, ...]


@dataclass(frozen=True, slots=True)
class RetireReply:
    """outcomes: per episode None if it is retired, else why it is incomplete."""

    outcomes: Sequence[tuple[EpisodeId, str | None]]
    phase: Phase


@dataclass(slots=True, eq=False)
class Work:
    """The shell's side of one open checkpoint or restore.

    settled is set while PREPARED holds, and for good once the checkpoint ended. began: when its running operation
    began. answered_at: when it was kept after Resume, or its kept Commit ended; kept records are dropped a
    lease_ttl after that. outside: restored and not started when the records were frozen, and not in the scope: what
    its Commit deletes. installed: what its Restore made live. deleting_since counts on the loop's clock. waiters
    counts the calls that wait for an install: one that ends with nobody waiting is discarded. named: an earlier try
    of the write has named its files. fate_told: the owner was told how the write ended. cut: what is held from the
    freezing of records to the reopening. counted: its volume was. pause_told: how long admission was closed was told.
    """

    checkpoint_id: str
    closed_at: float
    number: int = field(default_factory=lambda: next(_numbers))
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    closed: bool = False
    closing: asyncio.Task[None] | None = None
    capture: asyncio.Task[Captured] | None = None
    commit: asyncio.Task[CommitReply] | None = None
    install: asyncio.Task[RestoreReply] | None = None
    reopening: asyncio.Task[None] | None = None
    dropping: asyncio.Task[None] | None = None
    retry_open: asyncio.Event = field(default_factory=asyncio.Event)
    stop: StopFlag = field(default_factory=StopFlag)
    cut: ExitStack = field(default_factory=ExitStack)
    deletions: dict[EpisodeId, asyncio.Task[None]] = field(default_factory=dict)
    deleting_since: float = 0.0
    outside: set[EpisodeId] = field(default_factory=set)
    installed: frozenset[EpisodeId] = frozenset()
    epoch: int = 0
    began: float = 0.0
    answered_at: float = 0.0
    captured: Captured | None = None
    records_done: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    waiters: int = 0
    ready_seen: bool = False
    named: bool = False
    fate_told: bool = False
    counted: bool = False
    pause_told: bool = False

    def end(self) -> None:
        """The checkpoint is over: wake whoever waits for a safe cut."""
        self.ended = True
        self.settled.set()

    @property
    def capturing(self) -> bool:
        """Whether records are being frozen, or are frozen: readiness does not matter any more."""
        return self.capture is not None
