"""How near a participant is to a safe cut: blockers, restarts, counts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from gym_ckpt_grpc.protocol.ids import EpisodeId

MAX_BLOCKERS = 100
"""Blockers that a report lists, oldest first; the count beside them is exact."""
MAX_LISTED = 1000
"""Entries of any list in a reply; the count beside it is exact and ListEpisodes gives the rest."""


class BlockerReason(enum.IntEnum):
    """Mirror of `gymckpt.v1.BlockerReason`, without its prefix; a test keeps the two equal."""

    UNSPECIFIED = 0
    RUNNING = 1
    WAIT_STEP = 2
    STREAMING_RESPONSE = 3
    IN_FLIGHT_REQUEST = 4
    RETIRING = 5
    WORKER_UNREPORTED = 6
    WORKER_LOST = 7


@dataclass(frozen=True, slots=True)
class Blocker:
    """One execution that holds up a Prepare. age: seconds it has been so. place: step or route."""

    reason: BlockerReason
    age: float
    episode: EpisodeId | None = None
    worker: str = ""
    place: str = ""

    def __str__(self) -> str:
        who = str(self.episode or self.worker or "-")
        where = f" in {self.place}" if self.place else ""
        return f"{who} {self.reason.name}{where} for {self.age:.1f} s"


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """Blockers (at most MAX_BLOCKERS, oldest first) and restarts (at most MAX_LISTED), with exact counts."""

    blockers: tuple[Blocker, ...] = ()
    blocker_count: int = 0
    restarts: tuple[EpisodeId, ...] = ()
    restart_count: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
