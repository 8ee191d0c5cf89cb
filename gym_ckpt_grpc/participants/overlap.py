"""When a Restore may install: the overlap rule of every kind. Source: participants section 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.participants.admission import Admission
from gym_ckpt_grpc.protocol.errors import InvalidPhase, StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId, RestoreScope
from gym_ckpt_grpc.storage import Record


def check_overlap(
    scope: RestoreScope, admission: Admission, here: Callable[[str], Iterable[EpisodeId]], unattributed: int = 0
) -> None:
    """Refuse a scope that meets what is here, or that a mark refuses.

    here: rollout id -> live work, seeds and unclaimed restored records of it on this server, any attempt.
    unattributed: live work that could belong to any rollout. Raises InvalidPhase naming the episodes, StaleAttempt.
    """
    if unattributed and scope.targets:
        raise InvalidPhase(f"{unattributed} live sessions here belong to no known rollout")
    live = [episode for source in scope.targets for episode in here(source.rollout_id)]
    if live:
        names = list(dict.fromkeys(live))
        raise InvalidPhase(f"{len(names)} episodes of the scope are alive here or not claimed yet", episodes=names)
    stale = [target for target in scope.targets.values() if admission.refuses(target)]
    if stale:
        raise StaleAttempt(f"{len(stale)} attempts to be installed were retired", episodes=stale)


def targets_of(records: Sequence[Record], scope: RestoreScope) -> list[tuple[Record, EpisodeId]]:
    """Each record with the episode it is installed as. Raises InvalidState for one outside the scope."""
    pairs = []
    for record in records:
        target = scope.targets.get(record.episode)
        if target is None:
            raise InvalidState(f"the record of {record.episode} is not in the scope", record.episode)
        pairs.append((record, target))
    return pairs


@contextmanager
def naming_sources(scope: RestoreScope) -> Iterator[None]:
    """An author's hook runs: a record that it rejects is named by the attempt that it stands under.

    The hook knows the attempt to come; whoever looks for the record needs the other.
    """
    try:
        yield
    except InvalidState as error:
        sources = {target: source for source, target in scope.targets.items()}
        if error.episode is not None:
            error.episode = sources.get(error.episode, error.episode)
        raise
