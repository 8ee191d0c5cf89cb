"""Calling many participants: side by side, in stages, or with a head start for each stage.

A fan-out has one task per participant and returns when every task has ended, also after a failure or a
cancellation: nothing of it is under way once its caller has the answer. Source: coordination sections 1 and 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.protocol.identity import ParticipantKind

T = TypeVar("T")
Ask = Callable[[Member], Awaitable[Outcome[Any]]]
"""Asks one participant and gives its outcome; failures of calls are outcomes, never raised."""
Stages = tuple[tuple[ParticipantKind, ...], ...]

_ENV, _MODEL, _AGENT, _RES = (
    ParticipantKind.ENVIRONMENT,
    ParticipantKind.POLICY_MODEL,
    ParticipantKind.AGENT,
    ParticipantKind.RESOURCES,
)

PREPARE_STAGES: Stages = ((_ENV,), (_MODEL,), (_AGENT,), (_RES,))
"""Environments park first, so that no new step begins; resources close last, since others call them until then."""
RESUME_STAGES: Stages = ((_RES, _MODEL), (_AGENT,), (_ENV,))
"""Callees are open when callers wake; environments alone bring new work."""
FORGET_STAGES: Stages = ((_ENV,), (_AGENT,), (_MODEL, _RES))
"""No callee admits an attempt again before its callers do."""

PREPARE_WEIGHTS = {_ENV: 2.0, _MODEL: 2.0, _AGENT: 1.0, _RES: 1.0}
"""How `ready_within` is divided over the stages that have members."""
STAGE_GRACE = 0.3
"""Seconds after which the next stage of a Resume starts though the one before has not replied."""


def in_stages(members: Iterable[Member], stages: Stages) -> list[list[Member]]:
    """Members by stage, without the stages that have none."""
    members = list(members)
    grouped = [[member for member in members if member.kind in kinds] for kinds in stages]
    return [group for group in grouped if group]


def stage_part(rest: Sequence[Sequence[Member]], left: float) -> float:
    """Seconds of `left` for the first of the remaining stages; what it does not use flows on."""
    weights = [PREPARE_WEIGHTS[stage[0].kind] for stage in rest]
    return left * weights[0] / sum(weights)


async def fan_out(
    members: Iterable[Member], ask: Ask, *, heard: Callable[[Outcome[Any]], None] | None = None
) -> list[Outcome[Any]]:
    """Ask all at once; one outcome per participant, in their order.

    heard: told each outcome as it comes, so that what is known survives a cancellation.
    """

    async def one(member: Member) -> Outcome[Any]:
        outcome = await ask(member)
        if heard:
            heard(outcome)
        return outcome

    return await all_of([one(member) for member in members])


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    """Run all side by side and wait until each has ended, whatever happens; the first exception is raised then.

    Cancelling it cancels all, and still waits for all of them to end.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        if tasks:
            await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await until_done(tasks)
        raise
    return [task.result() for task in tasks]


async def until_done(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all have ended, through any number of cancellations; the last one is raised afterwards."""
    interrupted: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted:
        raise interrupted


async def with_head_start(
    stages: Sequence[Sequence[Member]], start: Callable[[Member], asyncio.Future[Any]], *, grace: float
) -> None:
    """Start the stages one after the other: the next when the one before has replied, or after `grace` seconds.

    Slow ones go on; whoever gave `start` owns the futures.
    """
    for stage in stages:
        started = [start(member) for member in stage]
        if started and stage is not stages[-1]:
            await asyncio.wait(started, timeout=grace)
