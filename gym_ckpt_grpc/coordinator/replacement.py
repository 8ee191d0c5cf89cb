"""What was lost with a process that another one has replaced. Source: coordination section 2.

A new process at a place knows nothing of what the old one held. Which rollouts that were is known in part: what the
old one had written at the last Commit. The rest has to be judged by what the new one says: a rollout that neither it
nor another instance of its service has a record of may have lived there. It is taken as lost: that costs repeated
work after a crash, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from gym_ckpt_grpc.protocol.ids import EpisodeId


class Replacements:
    """Replaced members (`kind/service/instance`) and the episodes that were lost with them."""

    def __init__(self) -> None:
        self._unjudged: set[str] = set()
        self._held: dict[str, Set[EpisodeId]] = {}
        self._lost: dict[EpisodeId, str] = {}

    def note(self, name: str) -> None:
        """Another process has this place now."""
        self._unjudged.add(name)

    def judge(self, scope: Iterable[EpisodeId], written: Mapping[str, Set[EpisodeId]]) -> dict[EpisodeId, str]:
        """The episodes of a scope that were lost, each with the member that was replaced.

        written: per member, the episodes that it has a record of in this checkpoint. Lost ones stay lost.
        """
        scope = list(scope)
        for name in self._unjudged & set(written):
            service = name.rpartition("/")[0]
            somewhere = set[EpisodeId]().union(*(written[n] for n in written if n.rpartition("/")[0] == service))
            before = self._held.get(name, frozenset())
            for episode in scope:
                if episode in before or episode not in somewhere:
                    self._lost.setdefault(episode, name)
            self._unjudged.discard(name)
        self._held.update(written)
        return {episode: self._lost[episode] for episode in scope if episode in self._lost}

    def restored(self) -> None:
        """The fleet holds a restored checkpoint: what came before is of no account."""
        self._unjudged.clear()
        self._held.clear()
        self._lost.clear()
