"""What the operations of one coordinator share: its epoch, its members, its leases, and whether it was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.coordinator.calls import Retries, call
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.encoded import Encoded
from gym_ckpt_grpc.coordinator.events import EventKind, Events
from gym_ckpt_grpc.coordinator.fanout import fan_out, until_done
from gym_ckpt_grpc.coordinator.fleet import Discovery
from gym_ckpt_grpc.coordinator.hearing import EventLogs
from gym_ckpt_grpc.coordinator.holds import Hold, Holds
from gym_ckpt_grpc.coordinator.incremental import MAX_CHAIN
from gym_ckpt_grpc.coordinator.lists import list_episodes
from gym_ckpt_grpc.coordinator.looking import MISTAKES, Membership, Sighting, look, membership
from gym_ckpt_grpc.coordinator.member import Connections, Credentials, Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome
from gym_ckpt_grpc.coordinator.renewal import Renewal
from gym_ckpt_grpc.coordinator.replacement import Replacements
from gym_ckpt_grpc.coordinator.retaining import Retaining
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.coordinator.tracing import BlockTrace
from gym_ckpt_grpc.protocol.errors import ControlError, StaleController, UsageError, WorkerUnavailable
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, Claim, Pin, Retention
from gym_ckpt_grpc.telemetry import COORDINATOR, Recorder
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import WORK_TOTAL, SpanType
from gymckpt.v1 import participant_pb2

T = TypeVar("T")
Request = Callable[[Member, float], Message | Encoded]
"""Makes a member's request from the seconds that one try has."""
Heard = Callable[[Outcome[Any]], None]

UNPIN_LIMIT = 5.0
"""Seconds for letting a restore's source go; the checkpoint is published by then, and the fleet may wait for it."""
MAX_RETIRE = 1000
"""Episodes of one Retire call."""


class Block(Protocol):
    """A checkpoint or restore that is entered."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See `Coordinator`. Times are seconds, finite and positive."""

    lease_ttl: float = 30.0
    discovery_timeout: float = 60.0
    exit_timeout: float = 30.0
    stage_grace: float = 0.3
    incremental: bool = False
    max_chain: int = MAX_CHAIN
    retention: Retention | None = None


class Session:
    """Between checkpoints it keeps nothing that the root and GetStatus cannot tell again, but the marks it set."""

    def __init__(
        self,
        discovery: Discovery,
        root: CheckpointRoot,
        *,
        controller_id: str,
        run_id: str,
        credentials: Credentials,
        settings: Settings,
        events: Events,
        retries: Retries | None = None,
    ) -> None:
        self.root = root
        self.lease_ttl = settings.lease_ttl
        """Of the checkpoint or restore that is open now, and of the next one that does not say otherwise."""
        self.replacements = Replacements()
        self.controller_id = controller_id
        self.run_id = run_id
        self.settings = settings
        self.events = events
        self.retries = retries or Retries()
        self.claim: Claim | None = None
        self.replaced: StaleController | None = None
        self.open_id = ""
        """The checkpoint or restore that is open now, or empty."""
        self.handed_on = False
        """Whether another process goes on with this epoch: it is not released then."""
        self.open_block: Block | None = None
        """The object of its `async with` block."""
        self.source_checkpoint = ""
        """What this run was restored from, for manifests."""
        self.pin: Pin | None = None
        """Holds the checkpoint that this run was restored from, until its first publication."""
        self.marks: dict[str, int] = {}
        """rollout -> highest attempt retired through this coordinator and not forgotten."""
        self.recorder = Recorder(COORDINATOR, telemetry=credentials.telemetry)
        self.trace = BlockTrace(self.recorder)
        """Of the checkpoint or restore that is open now; of no block if there is none."""
        self.retaining = Retaining(self, settings.retention)
        self.event_logs = EventLogs(root)
        self.background: set[asyncio.Task[Any]] = set()
        self.connections = Connections(credentials)
        self.renewal = Renewal(Holds(self._on_lost), credentials, self.context)
        self._discovery = discovery
        self._loop = asyncio.get_running_loop()
        self._incarnations: dict[str, str] = {}
        self._met_all = False
        self._watchers: dict[str, asyncio.Future[ControlError]] = {}

    @property
    def epoch(self) -> int:
        return self.claim.epoch if self.claim else 0

    def context(self, checkpoint_id: str) -> participant_pb2.ControlContext:
        return participant_pb2.ControlContext(
            checkpoint_id=checkpoint_id, controller_id=self.controller_id, epoch=self.epoch
        )

    def count_rollouts(self, fate: str, count: int) -> None:
        """Tell what became of so many rollouts; whoever calls sees to the once."""
        self.recorder.count(WORK_TOTAL, count, labels={at.WORK: "rollouts", at.FATE: fate})

    # ---- being replaced, and losing leases

    def check(self) -> None:
        """Raise StaleController if a newer controller has taken over: no call is made after that."""
        if self.replaced:
            raise self.replaced

    def note(self, error: ControlError | None) -> None:
        """Remember that a refusal says this coordinator was replaced."""
        if isinstance(error, StaleController) and self.replaced is None:
            self.replaced = error
            self.events.add(EventKind.TAKE_OVER, f"replaced: {error.message}")

    def _on_lost(self, hold: Hold) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell_lost, hold)

    def _tell_lost(self, hold: Hold) -> None:
        assert hold.lost is not None
        self.note(hold.lost)
        self.events.add(
            EventKind.LEASE, hold.lost.message, checkpoint_id=hold.checkpoint_id, participant=hold.member.name
        )
        watcher = self._watchers.get(hold.checkpoint_id)
        if watcher and not watcher.done() and (hold.member.required or self.replaced):
            watcher.set_result(hold.lost)

    def require_leases(self, checkpoint_id: str) -> None:
        """Raise what is known of a lost lease of a required participant, counted now, on this thread."""
        self.check()
        for hold in self.renewal.holds.of(checkpoint_id):
            if hold.lost is not None and hold.member.required:
                self.note(hold.lost)
                raise hold.lost

    async def guarded(self, checkpoint_id: str, work: Coroutine[Any, Any, T]) -> T:
        """Run an operation of a checkpoint; a lost lease ends it, waits for its end, and is raised instead."""
        watcher = self._watchers[checkpoint_id] = self._loop.create_future()
        task = self._loop.create_task(work, name=f"operation of {checkpoint_id}")
        try:
            self.require_leases(checkpoint_id)
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise watcher.result()
            return task.result()
        finally:
            self._watchers.pop(checkpoint_id, None)
            watcher.cancel()
            if not task.done():
                task.cancel()
                await until_done([task])
            if not task.cancelled():
                task.exception()

    def enter(
        self,
        checkpoint_id: str,
        block: Block,
        span: SpanType,
        *,
        lease_ttl: float | None = None,
        traceparent: str = "",
    ) -> None:
        """A block is entered. span: of the block. lease_ttl: if not as configured. traceparent: of the process that
        began it. Raises UsageError if one is open, StaleController."""
        if self.open_id:
            raise UsageError(f"{self.open_id} is open in this coordinator; leave it first")
        self.check()
        self.open_id, self.open_block = checkpoint_id, block
        self.lease_ttl = lease_ttl or self.settings.lease_ttl
        self.trace.begin(span, checkpoint_id, traceparent=traceparent)
        self.renewal.within = self.trace.for_thread()

    def left(self, result: str, error: BaseException | None = None) -> None:
        """The open block has ended. result: what it came to if nothing failed; error: what left it."""
        self.trace.end(result, error)
        self.open_id, self.open_block, self.renewal.within = "", None, None
        self.trace = BlockTrace(self.recorder)

    # ---- calling

    async def ask(
        self,
        members: Iterable[Member],
        method: str,
        request: Request,
        deadline: Deadline,
        *,
        heard: Heard | None = None,
        lease_of: str = "",
        pin: bool = True,
    ) -> list[Outcome[Any]]:
        """Call one method of all members at once; one outcome each. Raises StaleController if it was replaced.

        lease_of: the checkpoint whose leases accepted calls count for.
        """
        self.check()

        async def one(member: Member) -> Outcome[Any]:
            return await self.ask_one(member, method, request, deadline, lease_of=lease_of, pin=pin)

        outcomes = await fan_out(members, one, heard=heard)
        self.check()
        return outcomes

    async def ask_one(
        self,
        member: Member,
        method: str,
        request: Request,
        deadline: Deadline,
        *,
        lease_of: str = "",
        pin: bool = True,
        **options: Any,
    ) -> Outcome[Any]:
        """One call with retries; notes refusals as stale, and counts the lease."""
        outcome = await call(
            member,
            method,
            lambda seconds: request(member, seconds),
            deadline,
            retries=self.retries,
            pin=pin,
            **options,
        )
        self.note(outcome.error)
        if outcome.ok and lease_of:
            self.renewal.accepted(member, lease_of, outcome.sent_at)
        return outcome

    async def list_episodes(
        self, member: Member, kind: EpisodeListKind, deadline: Deadline, *, checkpoint_id: str = ""
    ) -> Outcome[tuple[EpisodeId, ...]]:
        """A whole list of one participant, by ListEpisodes."""
        return await list_episodes(member, kind, deadline, checkpoint_id=checkpoint_id, retries=self.retries)

    # ---- looking

    async def look(self, timeout: float) -> list[Sighting]:
        """Every server of the fleet; fails for none."""
        return await look(await self._discovery.resolve(), self.connections, timeout)

    async def members(self, deadline: Deadline) -> Membership:
        """Look again and compare with what was known. Raises DiscoveryFailed, StaleController.

        A replaced or added server is an event, and gets the marks that are not forgotten yet.
        """
        self.check()
        timeout = min(self.settings.discovery_timeout, max(deadline.left(), 0.001))
        found = membership(await self.look(timeout), self.connections)
        if self.claim and found.highest_epoch > self.epoch:
            self.note(StaleController(f"a participant has obeyed epoch {found.highest_epoch}, ours is {self.epoch}"))
            self.check()
        for name, reason in found.excluded.items():
            self.events.add(EventKind.FINDING, f"excluded: {reason}", participant=name)
        new = [member for member in found.members if self._is_new(member)]
        self._met_all = True
        await self.announce(new, deadline)
        return found

    async def reachable(self, method: str, deadline: Deadline) -> tuple[list[Member], list[Outcome[Any]]]:
        """Who can be called now, and a failed outcome for each server that should be there and is not.

        For operations that every participant has a part of its own in: one that is down does not stop the others.
        An optional one that is down is left out: it gets the marks when it comes back.
        """
        self.check()
        timeout = min(self.settings.discovery_timeout, max(deadline.left(), 0.001))
        sightings = await self.look(timeout)
        found = membership([s for s in sightings if s.ok], self.connections)
        await self.announce([m for m in found.members if self._is_new(m)], deadline)
        missing: list[Outcome[Any]] = [
            Outcome(
                method,
                s.identity or ParticipantIdentity(s.server.state_kind, s.server.service, s.server.instance or "0", ""),
                error=WorkerUnavailable(f"{s.address} was not called: {s.finding.name} {s.message}"),
                duration=s.seconds,
                tries=0,
            )
            for s in sightings
            if not s.ok and (s.server.required or s.finding in MISTAKES)
        ]
        return list(found.members), missing

    def know(self, identity: ParticipantIdentity) -> None:
        """A participant that another process of this controller has met already: it knows the marks."""
        self._incarnations[str(identity)] = identity.incarnation_id

    def _is_new(self, member: Member) -> bool:
        known = self._incarnations.get(member.name)
        incarnation = member.identity.incarnation_id
        self._incarnations[member.name] = incarnation
        if known is not None and known != incarnation:
            self.events.add(EventKind.FINDING, f"replaced: {known} is now {incarnation}", participant=member.name)
            self.replacements.note(member.name)
        elif known is None and self._met_all:
            self.events.add(EventKind.FINDING, f"added: {incarnation} at {member.address}", participant=member.name)
        return known != incarnation

    async def announce(self, members: Sequence[Member], deadline: Deadline) -> list[Outcome[Any]]:
        """Retire what is marked and not forgotten at participants that cannot know it yet."""
        marks = [EpisodeId(rollout, attempt) for rollout, attempt in self.marks.items()]
        outcomes: list[Outcome[Any]] = []
        for batch in in_batches(marks if members else [], MAX_RETIRE):
            outcomes += await self.ask(members, "Retire", self.retire_request("", batch), deadline)
        return outcomes

    def retire_request(self, checkpoint_id: str, episodes: Sequence[EpisodeId]) -> Request:
        columns = wire.episode_list(episodes)
        context = self.context(checkpoint_id)
        return lambda member, seconds: participant_pb2.RetireRequest(context=context, episodes=columns)

    async def unpin(self) -> None:
        """Let the sources of this run's restores go, also those that another process of it has pinned.

        A failure is an event: a publication of a higher epoch voids them.
        """

        def unpin() -> None:
            for pin in self.root.pins():
                if pin.epoch == self.epoch:
                    self.root.unpin(pin)

        try:
            await in_thread(unpin, "unpinning", Deadline(UNPIN_LIMIT))
            self.pin = None
        except ControlError as error:
            self.events.add(EventKind.RETENTION, f"what this run was restored from is still pinned: {error}")

    # ---- tasks that go on after their operation

    def own(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A task that belongs to this session: it is ended when the coordinator is left."""
        task = self._loop.create_task(work, name=name)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def end_background(self, patience: float) -> None:
        """Give what still runs `patience` seconds, then end it."""
        if self.background:
            await asyncio.wait(self.background, timeout=patience)
        tasks = list(self.background)
        for task in tasks:
            task.cancel()
        await until_done(tasks)


def in_batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Cut a list into runs of at most `size`."""
    return [items[i : i + size] for i in range(0, len(items), size)]
