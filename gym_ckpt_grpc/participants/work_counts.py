"""`WorkCounts`: how much work checkpoints have saved, each piece counted once.

A checkpoint has all of what an earlier one had, and a restore brings it back: neither makes it new work. So only what
no durable checkpoint had before counts as protected, and what was restored counts as continued and never as protected.
Numbers are those of this process: what one does not know, such as the work of a run that starts over, it does not
count. Source: telemetry section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import count

from gym_ckpt_grpc.participants.admission import Admission
from gym_ckpt_grpc.participants.reports import covers
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry.attributes import FATE, WORK
from gym_ckpt_grpc.telemetry.catalogue import WORK_TOTAL


class WorkCounts:
    """The work of one server. work: what it counts, `tokens` or `turns`.

    What is kept is as much as the newest durable checkpoint has entries.
    """

    def __init__(self, admission: Admission, work: str) -> None:
        self._admission = admission
        self._work = work
        self._numbers = count(1)
        self._open = ""
        self._taken: dict[str, tuple[int, dict[Hashable, int]]] = {}  # by checkpoint, until its fate is known
        self._durable: dict[Hashable, int] = {}
        self._newest = 0
        self._installed: dict[EpisodeId, Counter[str]] = {}  # work by its fate, which counts when admission opens

    # ---- checkpoints

    def closed(self, checkpoint_id: str) -> None:
        """Admission has closed for a checkpoint, or for a restore, which exports nothing."""
        self._open = checkpoint_id

    def begin_export(self) -> None:
        """Records are frozen, perhaps anew."""
        self._taken[self._open] = (next(self._numbers), {})

    def take(self, what: Hashable, amount: int) -> None:
        """A frozen record has so much work of an execution: all that was done of it, not only what is new."""
        if self._open in self._taken:
            self._taken[self._open][1][what] = amount

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        """Once for each checkpoint. What it has more than those before it is protected from now on."""
        number, taken = self._taken.pop(checkpoint_id, (0, {}))
        if not durable:
            return
        known = self._durable
        self.add("protected", sum(max(0, amount - known.get(what, 0)) for what, amount in taken.items()))
        merged = {what: max(amount, known.get(what, 0)) for what, amount in taken.items()}
        # What the newest one does not have any more has ended. An older one, written late, knows nothing of that.
        self._durable = merged if number > self._newest else {**known, **merged}
        self._newest = max(number, self._newest)

    # ---- restores

    def install(self, episode: EpisodeId, what: Hashable, continued: int, *, brought: int | None = None) -> None:
        """A restore has made it live. continued: the work that goes on. brought: all that is not new; the same if None.

        It counts when admission opens, unless it is dropped before.
        """
        self._installed.setdefault(episode, Counter())["continued"] += continued
        self._durable[what] = continued if brought is None else brought

    def redone(self, episode: EpisodeId, amount: int) -> None:
        """Restored work has to be done again. While admission is closed it counts as what was installed does."""
        if episode in self._installed:
            self._installed[episode]["redone"] += amount
        else:
            self.add("redone", amount)

    def drop(self, episode: EpisodeId) -> None:
        """What a restore has installed is freed again."""
        self._installed.pop(episode, None)

    def drop_covered(self, retired: EpisodeId) -> None:
        """The same of an attempt that is retired, and of earlier ones."""
        for episode in [each for each in self._installed if covers(retired, each)]:
            self.drop(episode)

    def opened(self) -> None:
        """Admission is open: what stands installed goes on."""
        installed, self._installed = self._installed, {}
        for fate, amount in sum(installed.values(), Counter[str]()).items():
            self.add(fate, amount)

    def add(self, fate: str, amount: int) -> None:
        """Count work at once; the caller sees to the once."""
        if amount > 0:
            self._admission.count(WORK_TOTAL, amount, labels={WORK: self._work, FATE: fate})
