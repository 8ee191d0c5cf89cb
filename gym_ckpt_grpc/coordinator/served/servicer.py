"""CoordinatorService: proto <-> the Coordinator's methods, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.control.budget import MAX_DEADLINE, Budget
from gym_ckpt_grpc.control.serving import time_left
from gym_ckpt_grpc.control.tasks import await_within
from gym_ckpt_grpc.coordinator.coordinator import Coordinator
from gym_ckpt_grpc.coordinator.errors import FleetError, RetireFailed
from gym_ckpt_grpc.coordinator.report import RESTART
from gym_ckpt_grpc.coordinator.restoration import Restoration
from gym_ckpt_grpc.coordinator.result import CheckpointState
from gym_ckpt_grpc.coordinator.retiring import RetireResult
from gym_ckpt_grpc.coordinator.served import operations, reading
from gym_ckpt_grpc.coordinator.served import wire as served
from gym_ckpt_grpc.coordinator.served.ending import Ended
from gym_ckpt_grpc.coordinator.served.failures import control_error, outcomes_of
from gym_ckpt_grpc.coordinator.served.running import RunStream
from gym_ckpt_grpc.coordinator.served.sessions import Open, Sessions
from gym_ckpt_grpc.coordinator.transaction import Checkpoint
from gym_ckpt_grpc.protocol.coordinator_validation import validate_coordinator as validate
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    InvalidArgument,
    StaleCheckpoint,
    StaleController,
    StateCorrupt,
    StateNotFound,
    Violation,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import coordinator_pb2 as pb
from gymckpt.v1 import coordinator_pb2_grpc

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_READY_WITHIN = 30.0
SHARE = 0.9
"""Of a call's time, for the work itself: the rest is for the reply with its outcomes."""
LEAST = 0.001
"""Seconds that work has where the call has none left: it then ends at once, as itself."""
LOOK_LIMIT = 10.0
"""Seconds that looking at servers has where the call has no deadline."""


def _budget(context: Context) -> Budget:
    return Budget(time_left(context, MAX_DEADLINE))


def _lease(request: Any) -> float | None:
    return wire.seconds(request.lease_ttl) if request.HasField("lease_ttl") else None


def _ready_within(request: Any, budget: Budget) -> float:
    """Default 30 s, or what the call has time for. Raises InvalidArgument for one that is not below the deadline."""
    left = budget.left() * SHARE
    if not request.HasField("ready_within"):
        return max(min(DEFAULT_READY_WITHIN, left), LEAST)
    asked = wire.seconds(request.ready_within)
    if asked >= budget.left():
        problem = f"must be below the call's deadline, which is {budget.left():.1f} s away"
        raise InvalidArgument(f"ready_within {problem}", violations=[Violation("ready_within", problem)])
    return min(asked, left)


def _within(checkpoint: Checkpoint, budget: Budget, work: Callable[[], T]) -> Callable[[], T]:
    """The same work, with the time of the call that begins it; one that joins changes nothing."""

    def begin() -> T:
        checkpoint.allow(max(budget.left() * SHARE, LEAST))
        return work()

    return begin


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves one coordinator, which is entered."""

    def __init__(self, coordinator: Coordinator, sessions: Sessions) -> None:
        self._coordinator = coordinator
        self._sessions = sessions

    # ---- a checkpoint, step by step

    async def PrepareCheckpoint(
        self, request: pb.PrepareCheckpointRequest, context: Context
    ) -> pb.PrepareCheckpointResponse:
        validate("PrepareCheckpoint", request)
        budget = _budget(context)
        ready_within, lease_ttl = _ready_within(request, budget), _lease(request)
        opened = self._sessions.current
        if opened is None or opened.id != request.checkpoint_id:
            opened = await self._begin(request.checkpoint_id, budget, lease_ttl)
        checkpoint = opened.checkpoint
        with opened.call():
            return await opened.once(
                "Prepare",
                lease_ttl,
                _within(checkpoint, budget, lambda: operations.prepare(checkpoint, ready_within)),
                budget,
            )

    async def _begin(self, checkpoint_id: str, budget: Budget, lease_ttl: float | None) -> Open:
        """A new checkpoint. Raises StaleCheckpoint for an id that the root has published."""
        if checkpoint_id:
            await self._refuse_published(checkpoint_id)
        seconds = budget.require("Prepare")
        opened = self._sessions.begin(
            checkpoint_id,
            lambda: self._coordinator.checkpoint(
                deadline=seconds, checkpoint_id=checkpoint_id or None, lease_ttl=lease_ttl
            ),
        )
        try:
            await opened.checkpoint.__aenter__()
        except BaseException:
            self._sessions.drop(opened)
            raise
        return opened

    async def _refuse_published(self, checkpoint_id: str) -> None:
        try:
            found = await reading.find(self._coordinator.root, checkpoint_id)
        except (StateNotFound, StateCorrupt):
            return
        if found.publication:
            raise StaleCheckpoint(f"{checkpoint_id} is published; take a new id")

    async def CommitCheckpoint(
        self, request: pb.CommitCheckpointRequest, context: Context
    ) -> pb.CommitCheckpointResponse:
        validate("CommitCheckpoint", request)
        budget = _budget(context)
        opened = self._sessions.find(request.checkpoint_id)
        checkpoint, scope = opened.checkpoint, wire.episodes_from(request.scope)
        how = (request.stop, request.reopen_when_captured, operations.chosen(request))
        arguments = (frozenset(scope), *how, request.trainer_state)
        with opened.call():
            return await opened.once(
                "Commit",
                arguments,
                _within(checkpoint, budget, lambda: operations.commit(checkpoint, scope, request)),
                budget,
            )

    async def PublishCheckpoint(
        self, request: pb.PublishCheckpointRequest, context: Context
    ) -> pb.PublishCheckpointResponse:
        validate("PublishCheckpoint", request)
        budget = _budget(context)
        opened = self._sessions.current
        if opened is None or opened.id != request.checkpoint_id:
            ended = self._sessions.ended(request.checkpoint_id) or await self._in_root(request.checkpoint_id)
            if ended and ended.published:
                return ended.publication
            opened = self._sessions.find(request.checkpoint_id)
        checkpoint = opened.checkpoint
        with opened.call():
            return await opened.once(
                "Publish", None, _within(checkpoint, budget, lambda: operations.publish(checkpoint)), budget
            )

    async def ResumeCheckpoint(
        self, request: pb.ResumeCheckpointRequest, context: Context
    ) -> pb.ResumeCheckpointResponse:
        validate("ResumeCheckpoint", request)
        budget, checkpoint_id = _budget(context), request.checkpoint_id
        opened = self._sessions.current
        if opened and opened.id == checkpoint_id:
            with opened.call():
                task = self._sessions.end(opened, discard=request.discard)
                return (await await_within(task, budget, "Resume")).reply
        ended = self._sessions.ended(checkpoint_id) or await self._in_root(checkpoint_id)
        return self._sessions.remember(ended or Ended.failed(checkpoint_id)).reply

    async def _in_root(self, checkpoint_id: str) -> Ended | None:
        """One that an earlier process of this service published, if the root says so."""
        try:
            found = await reading.find(self._coordinator.root, checkpoint_id)
        except StateNotFound:
            return None
        return Ended.found(found) if found.publication else None

    async def RenewCheckpoint(self, request: pb.RenewCheckpointRequest, context: Context) -> pb.RenewCheckpointResponse:
        validate("RenewCheckpoint", request)
        budget, opened = _budget(context), self._sessions.current
        if opened is None or opened.id != request.checkpoint_id:
            raise StateNotFound(f"{request.checkpoint_id!r} is not open here: its session has ended")
        reply = pb.RenewCheckpointResponse(checkpoint_id=opened.id)
        with opened.call():
            try:
                outcomes = await self._coordinator.renew(deadline=max(budget.left() * SHARE, LEAST))
                reply.outcomes.extend(served.outcomes_to(outcomes))
                lefts = [wire.seconds(o.answer.lease_remaining) for o in outcomes if o.ok]
                if lefts:
                    reply.lease_remaining.CopyFrom(wire.duration(min(lefts)))
            except StaleController:
                raise
            except ControlError as error:
                reply.error.CopyFrom(served.error_of(error) or reply.error)
            reply.session_remaining.CopyFrom(wire.duration(opened.remaining()))
        return reply

    async def RunCheckpoint(
        self, request: pb.RunCheckpointRequest, context: Context
    ) -> AsyncIterator[pb.RunCheckpointResponse]:
        validate("RunCheckpoint", request)
        budget = _budget(context)
        ready_within = _ready_within(request, budget)
        ended = self._sessions.ended(request.checkpoint_id) or await self._in_root(request.checkpoint_id or "none")
        if ended and ended.published:
            yield pb.RunCheckpointResponse(result=pb.RunCheckpointResult(checkpoint=ended.summary))
            return
        first = self._coordinator.events.last + 1
        opened = await self._begin(request.checkpoint_id, budget, _lease(request))
        opened.checkpoint.allow(max(budget.left() * SHARE, LEAST))
        stream = RunStream(self._coordinator, self._sessions, opened)
        try:
            async for message in stream.messages(first, request, ready_within, budget):
                yield message
        finally:
            stream.leave()

    # ---- restore

    async def RestoreCheckpoint(
        self, request: pb.RestoreCheckpointRequest, context: Context
    ) -> pb.RestoreCheckpointResponse:
        validate("RestoreCheckpoint", request)
        budget, opened = _budget(context), self._sessions.current
        scope = None
        if request.HasField("scope") and request.scope.WhichOneof("scope") == "episodes":
            scope = wire.episodes_from(request.scope.episodes)
        if opened is None or not request.restore_id or opened.id != request.restore_id:
            seconds = max(budget.require("Restore") * SHARE, LEAST)
            opened = self._sessions.begin(
                request.restore_id,
                lambda: self._coordinator.restoring(
                    request.checkpoint_id,
                    scope=scope,
                    deadline=seconds,
                    restore_id=request.restore_id or None,
                    lease_ttl=_lease(request),
                ),
            )
        arguments = (request.checkpoint_id, None if scope is None else frozenset(scope), _lease(request))
        target = opened
        with opened.call():
            return await opened.once("Restore", arguments, lambda: self._restore(target), budget)

    async def _restore(self, opened: Open) -> tuple[pb.RestoreCheckpointResponse, bool]:
        try:
            reply, good = await operations.restore(opened.restoration)
        except ControlError:
            self._sessions.drop(opened)  # the call was refused: the id is free again
            raise
        if not good:
            self._sessions.drop(opened, Ended.failed(opened.id))
        return reply, good

    # ---- marks

    async def RetireEpisodes(self, request: pb.RetireEpisodesRequest, context: Context) -> pb.RetireEpisodesResponse:
        validate("RetireEpisodes", request)
        seconds = max(_budget(context).left() * SHARE, LEAST)
        error: ControlError | None = None
        with self._sessions.touched():
            try:
                result = await self._coordinator.retire(wire.episodes_from(request.episodes), deadline=seconds)
            except RetireFailed as failure:
                result, error = failure.result, control_error(failure)
            except FleetError as failure:
                result, error = RetireResult(outcomes=list(outcomes_of(failure))), control_error(failure)
        return pb.RetireEpisodesResponse(
            outcomes=served.outcomes_to(result.outcomes),
            incomplete=served.listed(sorted(result.incomplete)),
            incomplete_count=len(result.incomplete),
            error=served.error_of(error),
        )

    async def ForgetRollouts(self, request: pb.ForgetRolloutsRequest, context: Context) -> pb.ForgetRolloutsResponse:
        validate("ForgetRollouts", request)
        seconds = max(_budget(context).left() * SHARE, LEAST)
        rollouts = {entry.rollout_id: entry.through_attempt for entry in request.rollouts}
        error: ControlError | None = None
        with self._sessions.touched():
            try:
                outcomes = list(await self._coordinator.forget(rollouts, deadline=seconds))
            except FleetError as failure:
                outcomes, error = list(outcomes_of(failure)), control_error(failure)
        return pb.ForgetRolloutsResponse(outcomes=served.outcomes_to(outcomes), error=served.error_of(error))

    # ---- reading

    async def ListParticipants(
        self, request: pb.ListParticipantsRequest, context: Context
    ) -> pb.ListParticipantsResponse:
        left: float | None = context.time_remaining()
        seconds = min(LOOK_LIMIT if left is None else max(left * SHARE, LEAST), MAX_DEADLINE)
        sightings = await self._coordinator.status(timeout=seconds)
        return pb.ListParticipantsResponse(servers=[served.server_status(sighting) for sighting in sightings])

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Context) -> pb.GetCheckpointResponse:
        validate("GetCheckpoint", request)
        opened, checkpoint_id = self._sessions.current, request.checkpoint_id
        if opened and opened.id == checkpoint_id:
            return pb.GetCheckpointResponse(checkpoint=self._open_summary(opened))
        if (ended := self._sessions.ended(checkpoint_id)) and not ended.published:
            return pb.GetCheckpointResponse(checkpoint=ended.summary)
        found = await reading.find(self._coordinator.root, checkpoint_id)
        return pb.GetCheckpointResponse(checkpoint=served.summary_of(found))

    def _open_summary(self, opened: Open) -> pb.CheckpointSummary:
        summary = pb.CheckpointSummary(checkpoint_id=opened.id, epoch=self._coordinator.epoch)
        if isinstance(opened.block, Checkpoint):
            summary.state = served.state_to(operations.state_of(opened.block))
            summary.sequence_number = opened.block.publication.number or 0
            summary.manifest_digest = opened.block.publication.digest
            summary.continued_count = len(opened.block.continued)
            summary.restart_count = len(opened.block.restarts)
            summary.base_checkpoint_id = opened.block.base_id
            summary.timing.CopyFrom(served.timing_to(opened.block.timing))
            summary.participants.extend(wire.identity_to(member.identity) for member in opened.block.members)
        elif opened.block.installed:
            summary.state = served.state_to(CheckpointState.RESTORED)
            summary.continued_count = len(opened.block.continued)
            summary.restart_count = len(opened.block.restarts)
        return summary

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsResponse:
        validate("ListCheckpoints", request)
        return await reading.page(self._coordinator.root, request)

    async def ListCheckpointEpisodes(
        self, request: pb.ListCheckpointEpisodesRequest, context: Context
    ) -> AsyncIterator[pb.ListCheckpointEpisodesResponse]:
        validate("ListCheckpointEpisodes", request)
        opened = self._sessions.current
        places: list[tuple[str, ...]] = []
        continued: tuple[EpisodeId, ...]
        restarts: dict[EpisodeId, str]
        if opened and opened.id == request.checkpoint_id:
            continued, restarts = opened.block.continued, dict(opened.block.restarts)
            if isinstance(opened.block, Restoration):
                places = [opened.block.placements.get(episode, ()) for episode in continued]
            elif not restarts:
                restarts = dict.fromkeys(opened.block.report.restarts, RESTART)
        else:
            lists = await reading.lists_of(self._coordinator.root, request.checkpoint_id)
            continued, restarts = lists.continued, dict(lists.restarts)
        if request.kind == pb.CHECKPOINT_EPISODE_KIND_CONTINUED:
            messages = reading.batches(continued, places=places)
        else:
            messages = reading.batches(list(restarts), reasons=list(restarts.values()))
        for message in messages:
            yield message

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Context
    ) -> AsyncIterator[pb.VerifyCheckpointResponse]:
        validate("VerifyCheckpoint", request)
        async for message in reading.verify(self._coordinator.root, request.checkpoint_id):
            yield message

    async def DeleteCheckpoint(
        self, request: pb.DeleteCheckpointRequest, context: Context
    ) -> pb.DeleteCheckpointResponse:
        validate("DeleteCheckpoint", request)
        seconds = max(_budget(context).left(), LEAST)
        await self._coordinator.delete(request.checkpoint_id, deadline=seconds)
        return pb.DeleteCheckpointResponse(checkpoint_id=request.checkpoint_id)

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        events = self._coordinator.events
        number = request.from_number if request.from_number <= events.last + 1 else 0
        async for event in events.follow(number):
            yield pb.WatchEventsResponse(event=served.event_to(event, self._coordinator.epoch))
