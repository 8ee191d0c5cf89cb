"""Batches of ids that a caller gives: checked as a whole, so that one bad id changes nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId, rollout_id_problem


def all_episodes(episodes: Any) -> list[EpisodeId]:
    """The episodes without duplicates. Raises TypeError for a bare text, or what is no EpisodeId."""
    if not _is_list_of(EpisodeId, episodes):
        raise TypeError("episodes must be a list of EpisodeId")
    return list(dict.fromkeys(episodes))


def all_rollouts(rollouts: Any) -> list[str]:
    """The rollout ids without duplicates. Raises TypeError for a bare text, InvalidArgument naming bad ids."""
    if not _is_list_of(str, rollouts):
        raise TypeError("rollouts must be a list of rollout ids")
    bad = [(at, problem) for at, each in enumerate(rollouts) if (problem := rollout_id_problem(each))]
    if bad:
        violations = [Violation(f"rollout_ids[{at}]", problem) for at, problem in bad]
        raise InvalidArgument(f"rollout_ids[{bad[0][0]}] {bad[0][1]}", violations=violations)
    return list(dict.fromkeys(rollouts))


def _is_list_of(kind: type, values: Any) -> bool:
    """Whether this is a collection of such values; a text is none, although its characters are texts."""
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        return False
    return all(isinstance(each, kind) for each in values)
