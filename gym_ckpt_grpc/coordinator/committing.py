"""Capture and Commit over the fleet, and what their replies say together. Source: coordination section 4."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.destination import Destination
from gym_ckpt_grpc.coordinator.encoded import Encoded, encoded
from gym_ckpt_grpc.coordinator.errors import CommitFailed
from gym_ckpt_grpc.coordinator.fanout import fan_out
from gym_ckpt_grpc.coordinator.ledger import Part
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.coordinator.preparing import prepare_request
from gym_ckpt_grpc.coordinator.report import EXCLUDED, LEFT_OUT, LOST, NO_RECORD, RESTART, FleetReport
from gym_ckpt_grpc.coordinator.session import Heard, Request, Session
from gym_ckpt_grpc.protocol.errors import InvalidPhase
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.protocol.phases import Phase
from gymckpt.v1 import participant_pb2

REPREPARE_WITHIN = 10.0
"""Seconds of one wait for a participant whose readiness was lost."""
REPREPARES = 5
"""How often one operation prepares a participant again."""
NAMED = 10
"""Episodes that an error's text names; the error of the participant has the count."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a scope. continued: in the scope's order. restarts: episode -> reason."""

    continued: tuple[EpisodeId, ...]
    restarts: dict[EpisodeId, str]
    parts: tuple[Part, ...]


class Committing:
    """Capture, Commit and the lists after it, of one checkpoint with one scope for all."""

    def __init__(self, session: Session, checkpoint_id: str, scope: Sequence[EpisodeId], heard: Heard) -> None:
        self._session = session
        self._checkpoint_id = checkpoint_id
        self._context = session.context(checkpoint_id)
        self._scope = list(scope)
        self._columns = wire.scope_to(EpisodeScope.of(scope))
        self._heard = heard

    async def capture(self, members: Sequence[Member], deadline: Deadline) -> list[Outcome[Any]]:
        """Freeze the scope everywhere at once; one outcome per member."""

        common = participant_pb2.CaptureRequest(context=self._context, scope=self._columns).SerializeToString()

        def request(member: Member, seconds: float) -> Encoded:
            who = participant_pb2.CaptureRequest(expected_incarnation_id=member.identity.incarnation_id)
            return encoded(common, who)

        return await self._ask_ready(members, "Capture", request, deadline)

    async def commit(
        self, members: Sequence[Member], destination: Destination, deadline: Deadline, *, stop: bool
    ) -> list[Outcome[Any]]:
        """Write everywhere at once, all on the same base or none; one outcome per member."""

        common = participant_pb2.CommitRequest(
            context=self._context,
            scope=self._columns,
            storage_uri=destination.storage_uri,
            base_checkpoint_uri=destination.base_uri,
            stop=stop,
        ).SerializeToString()

        def request(member: Member, seconds: float) -> Encoded:
            who = participant_pb2.CommitRequest(expected_incarnation_id=member.identity.incarnation_id)
            return encoded(common, who)

        return await self._ask_ready(members, "Commit", request, deadline)

    async def _ask_ready(
        self, members: Sequence[Member], method: str, request: Request, deadline: Deadline
    ) -> list[Outcome[Any]]:
        """Ask all at once; one whose readiness was lost is prepared again, while time is left."""
        session = self._session
        session.check()

        async def one(member: Member) -> Outcome[Any]:
            for again in itertools.count():
                outcome = await session.ask_one(member, method, request, deadline, lease_of=self._checkpoint_id)
                lost = isinstance(outcome.error, InvalidPhase) and outcome.error.phase == Phase.PREPARING.name
                if not lost or again == REPREPARES or not await self._prepare_again(member, deadline):
                    return outcome
            raise AssertionError("unreachable")

        outcomes = await fan_out(members, one, heard=self._heard)
        session.check()
        return outcomes

    async def _prepare_again(self, member: Member, deadline: Deadline) -> bool:
        part = deadline.within(REPREPARE_WITHIN)
        request = prepare_request(self._session, self._checkpoint_id, part)
        again = await self._session.ask_one(member, "Prepare", request, deadline, lease_of=self._checkpoint_id)
        return again.ok and wire.phase_from(again.answer.phase) is Phase.PREPARED

    async def lists(self, members: Sequence[Member], deadline: Deadline) -> list[Outcome[tuple[EpisodeId, ...]]]:
        """ListEpisodes(committed) of all."""
        which = EpisodeListKind.COMMITTED

        async def one(member: Member) -> Outcome[tuple[EpisodeId, ...]]:
            return await self._session.list_episodes(member, which, deadline, checkpoint_id=self._checkpoint_id)

        return await fan_out(members, one, heard=self._heard)

    def settle(
        self,
        captures: Sequence[Outcome[Any]],
        commits: Sequence[Outcome[Any]],
        lists: Sequence[Outcome[tuple[EpisodeId, ...]]],
    ) -> Settled:
        """Decide what continues: an episode with a record somewhere that nobody left out.

        Raises CommitFailed naming participant and episodes where what was captured was neither written nor named
        in `left_out`, or where a count differs.
        """
        captured = {outcome.name: outcome.answer for outcome in captures}
        written: set[EpisodeId] = set()
        left_out: set[EpisodeId] = set()
        problems: list[str] = []
        for commit, listed in zip(commits, lists, strict=True):
            found = set(listed.answer)
            gone = self._left_out(found, captured.get(commit.name), commit.answer)
            problems += self._problems(commit, found, gone, captured.get(commit.name))
            written |= found
            left_out |= gone
        if problems:
            raise CommitFailed("; ".join(problems), [*commits, *lists])
        restarts: dict[EpisodeId, str] = {}
        for episode in self._scope:
            if episode in left_out:
                restarts[episode] = LEFT_OUT
            elif episode not in written:
                restarts[episode] = NO_RECORD
        continued = tuple(episode for episode in self._scope if episode not in restarts)
        return Settled(continued, restarts, tuple(Part(c.identity, c.answer) for c in commits))

    def _left_out(self, found: set[EpisodeId], capture: Any, commit: Any) -> set[EpisodeId]:
        gone: set[EpisodeId] = set()
        for reply in filter(None, (capture, commit)):
            gone.update(wire.episodes_from(reply.left_out))
            if reply.left_out_count > len(reply.left_out.rollout_ids):
                # The reply had to cut its list, and no RPC has the rest: whatever has no record here may be in it.
                gone.update(episode for episode in self._scope if episode not in found)
        return gone

    def _problems(self, commit: Outcome[Any], found: set[EpisodeId], gone: set[EpisodeId], capture: Any) -> list[str]:
        reply, scope = commit.answer, set(self._scope)
        stray = sorted(found - scope)
        missing = [episode for episode in self._scope if episode not in found and episode not in gone]
        problems = []
        if stray:
            problems.append(f"{commit.name} wrote {_names(stray)}, which the scope does not have")
        if capture is not None and capture.record_count != reply.record_count:
            problems.append(
                f"{commit.name} captured {capture.record_count} records and wrote {reply.record_count}; "
                f"without one: {_names(missing)}"
            )
        elif len(found) != len(scope) - reply.without_record_count:
            problems.append(
                f"{commit.name} says that {len(scope) - reply.without_record_count} of {len(scope)} episodes have a "
                f"record and lists {len(found)}; without one: {_names(missing)}"
            )
        return problems


def fates(
    settled: Settled, lost: Iterable[EpisodeId], report: FleetReport
) -> tuple[tuple[EpisodeId, ...], dict[EpisodeId, str]]:
    """What continues, and what restarts and why, once it is known what was lost with replaced processes."""
    gone = dict.fromkeys(lost, LOST)
    continued = tuple(episode for episode in settled.continued if episode not in gone)
    restarts = {**gone, **settled.restarts}
    if report.excluded:
        # Which rollouts an excluded server holds is not known: none of them continues.
        restarts.update(dict.fromkeys(continued, EXCLUDED))
        continued = ()
    for episode, reason in {**dict.fromkeys(report.restarts, RESTART), **report.set_aside}.items():
        restarts.setdefault(episode, reason)
    return continued, restarts


def _names(episodes: Sequence[EpisodeId]) -> str:
    more = f" and {len(episodes) - NAMED} more" if len(episodes) > NAMED else ""
    return (", ".join(str(episode) for episode in episodes[:NAMED]) or "none") + more
