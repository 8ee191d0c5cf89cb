"""How near the whole fleet is to a safe cut: the reports of all participants together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import Blocker, PrepareReport

NO_RECORD = "no_record"
LEFT_OUT = "left_out"
EXCLUDED = "excluded"
RESTART = "restart"
LOST = "lost"
"""Why a rollout starts over from its input: no participant has a record of it; its state turned out to be gone;
a server that may hold it takes no part; a participant cannot capture it; a process that held it was replaced."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What Prepare learned.

    ready: every participant is at its cut. participants: report of each that was called, by
    `kind/service/instance`. restarts: in-flight rollouts that some participant cannot capture, the union over
    all, in full. excluded: optional servers that take no part, with the reason. While any is excluded nothing
    continues: which rollouts it holds is not known (coordination section 2).
    """

    ready: bool
    participants: Mapping[str, PrepareReport] = field(default_factory=dict)
    restarts: tuple[EpisodeId, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    set_aside: dict[EpisodeId, str] = field(default_factory=dict, compare=False)
    """What `continued` left out so far, with the reason; the manifest lists it as restarts."""

    @property
    def blockers(self) -> tuple[tuple[str, Blocker], ...]:
        """(participant, blocker), as far as the replies list them."""
        return tuple((name, b) for name, report in self.participants.items() for b in report.blockers)

    @property
    def blocker_count(self) -> int:
        """Exact number of blockers."""
        return sum(report.blocker_count for report in self.participants.values())

    def continued(self, episodes: Iterable[EpisodeId]) -> list[EpisodeId]:
        """The given episodes without those that restart, order kept: the scope of a commit."""
        gone = {episode.rollout_id for episode in self.restarts}
        chosen: list[EpisodeId] = []
        for episode in episodes:
            if self.excluded:
                self.set_aside[episode] = EXCLUDED
            elif episode.rollout_id in gone:
                self.set_aside[episode] = RESTART
            else:
                chosen.append(episode)
        return chosen

    def without(self, excluded: Mapping[str, str]) -> FleetReport:
        """The same, with further participants excluded: name -> reason."""
        return replace(self, excluded={**self.excluded, **excluded})

    def text(self, limit: int = 5) -> str:
        """Blockers for a message, the oldest first."""
        oldest = sorted(self.blockers, key=lambda pair: -pair[1].age)[:limit]
        more = f"; and {self.blocker_count - len(oldest)} more" if self.blocker_count > len(oldest) else ""
        return "; ".join(f"{name}: {blocker}" for name, blocker in oldest) + more
