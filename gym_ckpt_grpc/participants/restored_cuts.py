"""Cuts that a restore brought back: offered to the call that asks for the same, leased to it, and used up.

Source: participants section 8.4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from gym_ckpt_grpc.control.generation import BackendInfo, Capability, Continuation, CutPresence
from gym_ckpt_grpc.participants.policy_records import CutRecord
from gym_ckpt_grpc.participants.reports import covers
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.protocol.ids import EpisodeId


@dataclass(slots=True)
class RestoredCut:
    """A cut of an earlier process. presence: what each backend that was asked said. holder: call id of its lease.
    redone: whether its tokens were counted as generated again."""

    record: CutRecord
    presence: dict[str, CutPresence] = field(default_factory=dict)
    holder: str = ""
    redone: bool = False

    def is_lost(self, backends: Collection[str]) -> bool:
        """Whether each backend was asked, and none has it. Where there is no backend nothing can be known."""
        said = [self.presence.get(name, CutPresence.PRESENT) for name in backends]
        return bool(said) and CutPresence.PRESENT not in said

    def fits(self, ticket: Ticket, service: str, backend: BackendInfo) -> bool:
        """Whether a call with its digest may go on from it, at this backend."""
        needed = Capability.FINISHED if self.record.finish_reason else Capability.CONTINUE
        return (
            self.record.service == service
            and self.record.model == ticket.model
            and self.presence.get(ticket.backend) is CutPresence.PRESENT
            and needed in backend.capabilities
            and self.record.weight_version <= backend.weight_version
        )


class RestoredCuts:
    """All restored cuts that no delivered reply has used, by the attempt they were installed as."""

    def __init__(self) -> None:
        self._cuts: dict[EpisodeId, dict[str, RestoredCut]] = {}
        self._of_rollout: dict[str, set[EpisodeId]] = {}
        self._leases: dict[str, tuple[EpisodeId, RestoredCut]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._cuts.values()))

    def __iter__(self) -> Iterator[RestoredCut]:
        return iter([cut for cuts in self._cuts.values() for cut in cuts.values()])

    def install(self, episode: EpisodeId, cuts: Iterable[RestoredCut]) -> None:
        """Offer cuts to an attempt, in place of all that were offered to its rollout."""
        for other in list(self._of_rollout.get(episode.rollout_id, ())):
            self.drop(other)
        if made := {cut.record.request_digest: cut for cut in cuts}:
            self._cuts[episode] = made
            self._of_rollout.setdefault(episode.rollout_id, set()).add(episode)

    def find(self, ticket: Ticket) -> RestoredCut | None:
        """The cut of a call's episode with its digest, unless another call has it; whether it fits is not asked."""
        cut = self._cuts.get(ticket.episode, {}).get(ticket.request_digest)
        return cut if cut is not None and not cut.holder else None

    def lease(self, ticket: Ticket, service: str, backend: BackendInfo) -> Continuation | None:
        """Give a call the cut that fits it, until `settle`; None if there is none. The cut is still exported."""
        cut = self.find(ticket)
        if cut is None or not cut.fits(ticket, service, backend):
            return None
        cut.holder = ticket.call_id
        self._leases[ticket.call_id] = (ticket.episode, cut)
        return cut.record.continuation()

    def settle(self, call_id: str, delivered: bool) -> RestoredCut | None:
        """The call has ended: its cut is used up if the reply was delivered, else offered again. Safe to repeat.

        Gives the cut that was used up now.
        """
        episode, cut = self._leases.pop(call_id, (None, None))
        if episode is None or cut is None:
            return None
        cut.holder = ""
        if delivered:
            self._remove(episode, cut)
            return cut
        return None

    def _remove(self, episode: EpisodeId, cut: RestoredCut) -> None:
        cuts = self._cuts.get(episode, {})
        if cuts.get(cut.record.request_digest) is cut:
            del cuts[cut.record.request_digest]
            if not cuts:
                self.drop(episode)

    def unused(self, episode: EpisodeId) -> list[CutRecord]:
        """What a checkpoint keeps of an attempt's restored cuts: also those leased to calls not delivered yet."""
        return [cut.record for cut in self._cuts.get(episode, {}).values()]

    def drop_lost(self, backends: Collection[str]) -> list[tuple[EpisodeId, RestoredCut]]:
        """Forget those that no backend has any more, and give them with their attempts."""
        lost = [
            (episode, cut)
            for episode, cuts in self._cuts.items()
            for cut in cuts.values()
            if not cut.holder and cut.is_lost(backends)
        ]
        for episode, cut in lost:
            self._remove(episode, cut)
        return lost

    def drop(self, episode: EpisodeId) -> None:
        """Forget the cuts of exactly this attempt."""
        for cut in self._cuts.pop(episode, {}).values():
            self._leases.pop(cut.holder, None)
        attempts = self._of_rollout.get(episode.rollout_id, set())
        attempts.discard(episode)
        if not attempts:
            self._of_rollout.pop(episode.rollout_id, None)

    def drop_covered(self, retired: EpisodeId) -> None:
        """Forget the cuts of an attempt and of earlier ones."""
        for episode in list(self._of_rollout.get(retired.rollout_id, ())):
            if covers(retired, episode):
                self.drop(episode)
