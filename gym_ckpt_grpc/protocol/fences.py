"""What outlives one checkpoint: the highest epoch obeyed, ids already resumed, and marks of retired attempts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from gym_ckpt_grpc.protocol.ids import EpisodeId


class EpochFence:
    """The highest epoch obeyed; it never falls. Epoch 0 is obeyed only while nothing higher was."""

    __slots__ = ("highest",)

    def __init__(self) -> None:
        self.highest = 0

    def refuses(self, epoch: int) -> bool:
        return epoch < self.highest

    def obey(self, epoch: int) -> None:
        """Remember an epoch whose call was accepted. Refused calls must not come here."""
        self.highest = max(self.highest, epoch)


class ResumedIds:
    """Checkpoint ids already resumed, the oldest dropped first.

    A bounded memory is enough: an id that dropped out belongs to a passed epoch, and the epoch fences it.
    """

    __slots__ = ("_ids", "_limit")

    def __init__(self, limit: int = 1024) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._limit = limit

    def __contains__(self, checkpoint_id: str) -> bool:
        return checkpoint_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, checkpoint_id: str) -> None:
        self._ids[checkpoint_id] = None
        self._ids.move_to_end(checkpoint_id)
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)


class Marks:
    """Refusals of retired attempts: per rollout the highest attempt refused. They only rise, until Forget."""

    __slots__ = ("_marks",)

    def __init__(self, marks: Mapping[str, int] | None = None) -> None:
        self._marks: dict[str, int] = dict(marks or {})

    def __len__(self) -> int:
        return len(self._marks)

    def __iter__(self) -> Iterator[EpisodeId]:
        return (EpisodeId(rollout, attempt) for rollout, attempt in sorted(self._marks.items()))

    def refuses(self, episode: EpisodeId) -> bool:
        return episode.attempt <= self._marks.get(episode.rollout_id, -1)

    def raise_to(self, episode: EpisodeId) -> None:
        """Refuse this attempt and all earlier ones of its rollout; a higher mark stays."""
        self._marks[episode.rollout_id] = max(episode.attempt, self._marks.get(episode.rollout_id, -1))

    def merge(self, others: Iterable[EpisodeId]) -> None:
        """Raise to each of another set's marks: afterwards this refuses what either refused."""
        for episode in others:
            self.raise_to(episode)

    def forget(self, rollout_id: str, through_attempt: int) -> bool:
        """Drop the mark unless it is above `through_attempt`; whether one was dropped."""
        if self._marks.get(rollout_id, through_attempt + 1) > through_attempt:
            return False
        del self._marks[rollout_id]
        return True
