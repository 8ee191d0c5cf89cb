"""Installing a checkpoint over the fleet: as which attempts, at all at once, and whether the counts agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.coordinator import ledger
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import RestoreFailed, describe
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fanout import fan_out
from gym_ckpt_grpc.coordinator.looking import Membership
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome, failures
from gym_ckpt_grpc.coordinator.report import NO_RECORD, RESTART
from gym_ckpt_grpc.coordinator.retiring import retire_everywhere
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2

LIVE_COUNTS = ("episodes", "sessions", "inflight")
"""Counts of a report that say that a participant has live work."""
PENDING = EpisodeListKind.RESTORED_PENDING
RETIRED = EpisodeListKind.RETIRED


@dataclass(frozen=True, slots=True)
class Plan:
    """What is installed as what: episode in the checkpoint -> its next attempt, in the checkpoint's order."""

    targets: dict[EpisodeId, EpisodeId]

    @property
    def install_as(self) -> list[int]:
        """Attempts for the request; empty if each is its episode's attempt + 1."""
        if all(target.attempt == source.attempt + 1 for source, target in self.targets.items()):
            return []
        return [target.attempt for target in self.targets.values()]


class Installing:
    """One install. heard: outcomes of the Restore as they came."""

    def __init__(
        self, session: Session, source: ledger.Source, members: Sequence[Member], scope: Sequence[EpisodeId]
    ) -> None:
        self._session = session
        self._source = source
        self._members = members
        self._scope = scope
        self.heard: dict[str, Outcome[Any]] = {}

    async def plan(self, found: Membership, deadline: Deadline) -> Plan:
        """Retire what outlived the crash, then choose each rollout's next attempt above everything known.

        A participant outlived it if its process is the manifest's, or if it has live or pending work. What lives
        is the attempt of the checkpoint itself, or what a restore since then installed: the attempt after it, or
        after the highest mark.
        """
        survivors = self._survivors(found)
        busy = self._busy(found)
        pending = await self._listed(PENDING, deadline)
        known = await self._listed(RETIRED, deadline)
        alive: dict[str, int] = {}
        for episode in self._scope:
            mark, waiting = known.get(episode.rollout_id, -1), pending.get(episode.rollout_id, -1)
            if busy:
                lives = episode.attempt if survivors else episode.attempt + 1
                alive[episode.rollout_id] = max(lives, waiting, mark + 1 if mark >= episode.attempt else -1)
            elif survivors:
                alive[episode.rollout_id] = max(episode.attempt, mark)
        if alive:
            await self._retire(alive, survivors | busy, deadline)
        targets = {}
        for episode in self._scope:
            rollout = episode.rollout_id
            floor = max(episode.attempt, alive.get(rollout, -1), known.get(rollout, -1))
            targets[episode] = EpisodeId(rollout, floor + 1)
        return Plan(targets)

    def _survivors(self, found: Membership) -> set[str]:
        processes = {m.participant.incarnation_id for m in self._source.manifest.members}
        return {member.name for member in self._members if member.identity.incarnation_id in processes}

    def _busy(self, found: Membership) -> set[str]:
        names = {member.name for member in self._members}
        return {
            str(s.identity)
            for s in found.sightings
            if s.status
            and str(s.identity) in names
            and (s.status.restored_pending or any(s.status.report.counts.get(key, 0) for key in LIVE_COUNTS))
        }

    async def _listed(self, which: EpisodeListKind, deadline: Deadline) -> dict[str, int]:
        """rollout -> highest attempt in this list of any member."""

        async def one(member: Member) -> Outcome[tuple[EpisodeId, ...]]:
            return await self._session.list_episodes(member, which, deadline)

        outcomes = await fan_out(self._members, one)
        if failed := failures(outcomes):
            raise RestoreFailed(f"episodes could not be listed: {describe(failed)}", outcomes)
        highest: dict[str, int] = {}
        for outcome in outcomes:
            for episode in outcome.answer:
                highest[episode.rollout_id] = max(episode.attempt, highest.get(episode.rollout_id, 0))
        return highest

    async def _retire(self, alive: dict[str, int], where: set[str], deadline: Deadline) -> None:
        text = f"{', '.join(sorted(where)) or 'pending state'} outlived the crash: {len(alive)} attempts are retired"
        self._session.events.add(EventKind.RESTORE, text)
        episodes = [EpisodeId(rollout, attempt) for rollout, attempt in alive.items()]
        await retire_everywhere(self._session, self._members, episodes, deadline)

    async def install(self, restore_id: str, plan: Plan, deadline: Deadline) -> list[Outcome[Any]]:
        """Restore at all at once. Raises RestoreFailed with all outcomes, once every call has ended."""
        session, found = self._session, self._source.found
        columns, install_as = wire.episode_list(plan.targets), plan.install_as
        digests = {m.participant.place: m.manifest_digest for m in self._source.manifest.members}

        def request(member: Member, seconds: float) -> participant_pb2.RestoreRequest:
            return participant_pb2.RestoreRequest(
                context=session.context(restore_id),
                lease_ttl=wire.duration(session.lease_ttl),
                storage_uri=found.location.uri,
                source_checkpoint_id=found.manifest.checkpoint_id,
                expected_manifest_digest=digests[member.identity.place],
                scope=columns,
                install_as=install_as,
            )

        for member in self._members:
            session.renewal.begin(member, restore_id, session.lease_ttl)
        outcomes = await session.ask(self._members, "Restore", request, deadline, heard=self._hear, lease_of=restore_id)
        if failed := failures(outcomes):
            text = f"Restore failed on {len(failed)} of {len(outcomes)}: {describe(failed)}"
            raise RestoreFailed(text, outcomes)
        return outcomes

    def _hear(self, outcome: Outcome[Any]) -> None:
        self.heard[outcome.name] = outcome

    def compare(self, outcomes: Sequence[Outcome[Any]], plan: Plan) -> None:
        """Compare what was installed with the manifest. Raises RestoreFailed naming each difference."""
        lists, manifest = self._source.lists, self._source.manifest
        whole = len(plan.targets) == len(lists.continued)
        exact = whole and all(reason in (NO_RECORD, RESTART) for reason in lists.restarts.values())
        problems = []
        for outcome in outcomes:
            part, reply = manifest.member(outcome.identity.place), outcome.answer
            assert part is not None
            if reply.record_count > part.records or (exact and reply.record_count != part.records):
                problems.append(f"{outcome.name} installed {reply.record_count} of {part.records} records")
            if reply.installed_count != len(plan.targets):
                problems.append(f"{outcome.name} installed {reply.installed_count} of {len(plan.targets)} episodes")
            if reply.source_checkpoint_id != manifest.checkpoint_id:
                problems.append(f"{outcome.name} installed {reply.source_checkpoint_id}")
        if problems:
            raise RestoreFailed(f"counts differ from {manifest.checkpoint_id}: {'; '.join(problems)}", outcomes)

    async def placements(self, plan: Plan, deadline: Deadline) -> dict[EpisodeId, tuple[str, ...]]:
        """Installed episode -> the participants where it is pending. Raises RestoreFailed if one is nowhere."""

        async def one(member: Member) -> Outcome[tuple[EpisodeId, ...]]:
            return await self._session.list_episodes(member, PENDING, deadline)

        outcomes = await fan_out(self._members, one)
        if failed := failures(outcomes):
            raise RestoreFailed(f"what is installed could not be listed: {describe(failed)}", outcomes)
        places: dict[EpisodeId, list[str]] = defaultdict(list)
        for outcome in outcomes:
            for episode in outcome.answer:
                places[episode].append(outcome.name)
        nowhere = [str(target) for target in plan.targets.values() if target not in places]
        if nowhere:
            more = f" and {len(nowhere) - 5} more" if len(nowhere) > 5 else ""
            raise RestoreFailed(f"installed nowhere: {', '.join(nowhere[:5])}{more}", outcomes)
        return {target: tuple(places[target]) for target in plan.targets.values()}
