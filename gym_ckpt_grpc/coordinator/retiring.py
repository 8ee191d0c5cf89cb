"""Retire and Forget over the fleet. Source: coordination sections 3 and 4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import ForgetFailed, RetireFailed, describe
from gym_ckpt_grpc.coordinator.fanout import FORGET_STAGES, in_stages
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome, failures
from gym_ckpt_grpc.coordinator.session import MAX_RETIRE, Request, Session, in_batches
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.validation import MAX_FORGET
from gym_ckpt_grpc.telemetry import Timed
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import COORDINATE_FORGET, COORDINATE_RETIRE
from gymckpt.v1 import participant_pb2

MAX_NAMED = 5


@dataclass(slots=True)
class RetireResult:
    """retired: episodes of which nothing remains anywhere. incomplete: episode -> participant -> why.

    outcomes: one per participant and batch.
    """

    retired: tuple[EpisodeId, ...] = ()
    incomplete: dict[EpisodeId, dict[str, str]] = field(default_factory=dict)
    outcomes: list[Outcome[Any]] = field(default_factory=list)


async def retire_everywhere(
    session: Session,
    members: Sequence[Member],
    episodes: Iterable[EpisodeId],
    deadline: Deadline,
    *,
    checkpoint_id: str = "",
) -> RetireResult:
    """Refuse and free attempts everywhere at once, as an operation. Raises RetireFailed if any is incomplete."""
    chosen = list(episodes)
    if not chosen:
        return RetireResult()
    with session.trace.operation(COORDINATE_RETIRE, "retire", checkpoint_id=checkpoint_id) as timed:
        return await retire_within(timed, session, members, chosen, deadline, checkpoint_id=checkpoint_id)


async def retire_within(
    timed: Timed,
    session: Session,
    members: Sequence[Member],
    episodes: Iterable[EpisodeId],
    deadline: Deadline,
    *,
    checkpoint_id: str = "",
    missing: Sequence[Outcome[Any]] = (),
) -> RetireResult:
    """Refuse and free attempts, 1,000 a call, as part of an operation that has begun. Raises RetireFailed.

    missing: failed outcomes of servers that cannot be called. A mark is kept in mind until Forget, also where a call
    failed: it may have arrived.
    """
    chosen = sorted(set(episodes))
    result = RetireResult()
    for episode in chosen:
        session.marks[episode.rollout_id] = max(episode.attempt, session.marks.get(episode.rollout_id, 0))
    # Two attempts of one rollout cannot stand in one call: the higher one includes the lower.
    highest = list({episode.rollout_id: episode for episode in chosen}.values())
    timed.set(at.PARTICIPANTS, len(members))
    timed.set(at.EPISODES, len(highest))
    for batch in in_batches(highest, MAX_RETIRE):
        outcomes = await session.ask(members, "Retire", session.retire_request(checkpoint_id, batch), deadline)
        outcomes += missing
        result.outcomes += outcomes
        for outcome in outcomes:
            _collect(outcome, batch, result.incomplete)
    result.retired = tuple(episode for episode in highest if episode not in result.incomplete)
    if result.incomplete:
        names = ", ".join(str(episode) for episode in list(result.incomplete)[:MAX_NAMED])
        failed = failures(result.outcomes)
        text = f"{len(result.incomplete)} of {len(highest)} episodes are not retired everywhere: {names}"
        raise RetireFailed(f"{text}; {describe(failed)}" if failed else text, result)
    return result


def _collect(outcome: Outcome[Any], batch: Sequence[EpisodeId], incomplete: dict[EpisodeId, dict[str, str]]) -> None:
    if outcome.error:
        for episode in batch:
            incomplete.setdefault(episode, {})[outcome.name] = str(outcome.error)
        return
    for one in outcome.answer.outcomes:
        if one.state != participant_pb2.RETIRE_STATE_RETIRED:
            episode = EpisodeId(one.episode.rollout_id, one.episode.attempt)
            incomplete.setdefault(episode, {})[outcome.name] = one.message or "incomplete"


def highest_attempts(rollouts: Mapping[str, int] | Iterable[EpisodeId]) -> dict[str, int]:
    """Each rollout once, with the highest attempt named."""
    if isinstance(rollouts, Mapping):
        return dict(rollouts)
    highest: dict[str, int] = {}
    for episode in rollouts:
        highest[episode.rollout_id] = max(episode.attempt, highest.get(episode.rollout_id, 0))
    return highest


async def forget_everywhere(
    session: Session,
    members: Sequence[Member],
    rollouts: Mapping[str, int],
    deadline: Deadline,
    *,
    checkpoint_id: str = "",
) -> list[Outcome[Any]]:
    """End refusals everywhere, as an operation. Raises ForgetFailed."""
    with session.trace.operation(COORDINATE_FORGET, "forget", checkpoint_id=checkpoint_id) as timed:
        return await forget_within(timed, session, members, rollouts, deadline, checkpoint_id=checkpoint_id)


async def forget_within(
    timed: Timed,
    session: Session,
    members: Sequence[Member],
    rollouts: Mapping[str, int],
    deadline: Deadline,
    *,
    checkpoint_id: str = "",
) -> list[Outcome[Any]]:
    """End refusals as part of an operation that has begun, callers before callees; stops after a failing stage with
    ForgetFailed."""
    outcomes: list[Outcome[Any]] = []
    batches = in_batches(list(rollouts.items()), MAX_FORGET)
    timed.set(at.PARTICIPANTS, len(members))
    timed.set(at.ROLLOUTS, len(rollouts))
    for stage in in_stages(members, FORGET_STAGES):
        for batch in batches:
            answers = await session.ask(stage, "Forget", _forget_request(session, checkpoint_id, batch), deadline)
            outcomes += answers
            if failed := failures(answers):
                raise ForgetFailed(f"Forget failed: {describe(failed)}", outcomes)
    for rollout, attempt in rollouts.items():
        if session.marks.get(rollout, attempt + 1) <= attempt:
            del session.marks[rollout]
    return outcomes


def _forget_request(session: Session, checkpoint_id: str, batch: Sequence[tuple[str, int]]) -> Request:
    request = participant_pb2.ForgetRequest(
        context=session.context(checkpoint_id),
        rollouts=[participant_pb2.ForgetRollout(rollout_id=r, through_attempt=a) for r, a in batch],
    )
    return lambda member, seconds: request
