"""ParticipantService: proto <-> domain, and nothing else.

Every mutating RPC is validated as a whole, needs a deadline, and reaches the control plane as one Call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from typing import Any

import grpc

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.control_plane import ControlPlane
from gym_ckpt_grpc.control.error_details import cut
from gym_ckpt_grpc.control.ports import EpisodeListKind
from gym_ckpt_grpc.control.serving import time_left
from gym_ckpt_grpc.control.status import Status
from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId, RestoreScope
from gym_ckpt_grpc.protocol.lease import DEFAULT_LEASE_TTL
from gym_ckpt_grpc.protocol.machine import Call, CommitArguments
from gym_ckpt_grpc.protocol.phases import Operation
from gym_ckpt_grpc.protocol.report import MAX_LISTED
from gym_ckpt_grpc.protocol.validation import validate
from gym_ckpt_grpc.storage import CheckpointLocation
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

LEAST_RESUME = 0.1
"""Seconds that a Resume has, even one whose deadline has passed: opening is always right."""
MAX_OUTCOME = 256
"""Bytes of one episode's text in a reply that may have a thousand of them."""


def _call(operation: Operation, request: Any, budget: Budget, arguments: Hashable = None) -> Call:
    return Call(
        operation=operation,
        checkpoint_id=request.context.checkpoint_id,
        controller_id=request.context.controller_id,
        epoch=request.context.epoch,
        arguments=arguments,
        left=budget.left(),
        expected_incarnation=getattr(request, "expected_incarnation_id", ""),
    )


def _lease_ttl(request: Any) -> float:
    return wire.seconds(request.lease_ttl) if request.HasField("lease_ttl") else DEFAULT_LEASE_TTL


class ParticipantServicer(participant_pb2_grpc.ParticipantServiceServicer):
    """Serves one control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._identity = wire.identity_to(plane.identity)

    def _time_left(self, context: Context) -> float:
        """Seconds until the caller's deadline, clamped; a mutating call without one is refused."""
        return time_left(context, self._plane.settings.max_deadline)

    def _budget(self, context: Context) -> Budget:
        return Budget(self._time_left(context))

    async def _location(self, uri: str, field: str, checkpoint_id: str, budget: Budget) -> CheckpointLocation:
        location = await self._plane.resolve(uri, field, budget=budget)
        if location.checkpoint_id != checkpoint_id:
            problem = f"names checkpoint {location.checkpoint_id}, not {checkpoint_id}"
            raise InvalidArgument(f"{field} {problem}", violations=[Violation(field, problem)])
        return location

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=self._status(self._plane.status()))

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        async for status in self._plane.statuses():
            yield pb.WatchStatusResponse(status=self._status(status))

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareResponse:
        validate("Prepare", request)
        left = self._time_left(context)
        budget = Budget(left)
        ready_within = wire.seconds(request.ready_within)
        if ready_within >= left:
            problem = f"must be below the call's deadline, which is {left:.1f} s away"
            raise InvalidArgument(f"ready_within {problem}", violations=[Violation("ready_within", problem)])
        ttl = _lease_ttl(request)
        reply, replayed = await self._plane.prepare(
            _call(Operation.PREPARE, request, budget, ttl),
            ready_within=ready_within,
            lease_ttl=ttl,
            budget=budget,
        )
        return pb.PrepareResponse(
            participant=self._identity,
            phase=wire.phase_to(reply.phase),
            report=wire.report_to(reply.report),
            replayed=replayed,
        )

    async def Capture(self, request: pb.CaptureRequest, context: Context) -> pb.CaptureResponse:
        validate("Capture", request)
        budget = self._budget(context)
        scope = wire.scope_from(request.scope)
        captured, replayed = await self._plane.capture(
            _call(Operation.CAPTURE, request, budget, scope), scope, budget=budget
        )
        return pb.CaptureResponse(
            participant=self._identity,
            record_count=len(captured.records),
            left_out=wire.episode_list(captured.left_out, MAX_LISTED),
            left_out_count=len(captured.left_out),
            replayed=replayed,
        )

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        validate("Commit", request)
        budget = self._budget(context)
        location = await self._location(request.storage_uri, "storage_uri", request.context.checkpoint_id, budget)
        base = None
        if request.base_checkpoint_uri:
            base = await self._plane.resolve(request.base_checkpoint_uri, "base_checkpoint_uri", budget=budget)
        arguments = CommitArguments(
            wire.scope_from(request.scope), request.storage_uri, request.base_checkpoint_uri, request.stop
        )
        call = _call(Operation.COMMIT, request, budget, arguments)
        reply, replayed = await self._plane.commit(call, arguments, location, base=base, budget=budget)
        return pb.CommitResponse(
            participant=self._identity,
            manifest_digest=reply.manifest_digest,
            record_count=reply.record_count,
            bytes=reply.bytes,
            left_out=wire.episode_list(reply.left_out, MAX_LISTED),
            left_out_count=len(reply.left_out),
            without_record_count=reply.without_record,
            deleting=reply.deleting,
            restart_count=reply.restart_count,
            release_problem=reply.release_problem,
            staging_keys=wire.staging_keys_to(reply.staging_keys),
            replayed=replayed,
        )

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        validate("Resume", request)
        budget = Budget(max(self._time_left(context), LEAST_RESUME))
        call = _call(Operation.RESUME, request, budget)
        reply, replayed = await self._plane.resume(call, keep_write=request.keep_write, budget=budget)
        return pb.ResumeResponse(
            participant=self._identity,
            phase=wire.phase_to(reply.phase),
            active_checkpoint_id=reply.active_checkpoint_id,
            replayed=replayed,
        )

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        validate("Restore", request)
        budget = self._budget(context)
        location = await self._location(request.storage_uri, "storage_uri", request.source_checkpoint_id, budget)
        scope = RestoreScope.plan(wire.episodes_from(request.scope), request.install_as)
        ttl = _lease_ttl(request)
        digest = request.expected_manifest_digest
        arguments = (request.storage_uri, digest, ttl, frozenset(scope.targets.items()))
        reply, replayed = await self._plane.restore(
            _call(Operation.RESTORE, request, budget, arguments),
            scope,
            location,
            expected_digest=digest,
            lease_ttl=ttl,
            budget=budget,
        )
        return pb.RestoreResponse(
            participant=self._identity,
            phase=pb.PHASE_RESTORED,
            source_checkpoint_id=reply.source_checkpoint_id,
            record_count=reply.record_count,
            without_record_count=reply.without_record,
            bytes=reply.bytes,
            installed=wire.episode_list(reply.installed, MAX_LISTED),
            installed_count=len(reply.installed),
            replayed=replayed,
        )

    async def Retire(self, request: pb.RetireRequest, context: Context) -> pb.RetireResponse:
        validate("Retire", request)
        budget = self._budget(context)
        episodes = wire.episodes_from(request.episodes)
        reply = await self._plane.retire(_call(Operation.RETIRE, request, budget), episodes, budget=budget)
        return pb.RetireResponse(
            participant=self._identity,
            outcomes=[_retire_outcome(episode, problem) for episode, problem in reply.outcomes],
            phase=wire.phase_to(reply.phase),
        )

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        validate("Forget", request)
        budget = self._budget(context)
        rollouts = [(entry.rollout_id, entry.through_attempt) for entry in request.rollouts]
        forgotten = await self._plane.forget(_call(Operation.FORGET, request, budget), rollouts, budget=budget)
        return pb.ForgetResponse(
            participant=self._identity, rollout_ids=forgotten[:MAX_LISTED], rollout_count=len(forgotten)
        )

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        validate("RenewLease", request)
        call = _call(Operation.RENEW_LEASE, request, self._budget(context))
        remaining, phase = await self._plane.renew_lease(call)
        return pb.RenewLeaseResponse(
            participant=self._identity, lease_remaining=wire.duration(remaining), phase=wire.phase_to(phase)
        )

    async def ListEpisodes(
        self, request: pb.ListEpisodesRequest, context: Context
    ) -> AsyncIterator[pb.ListEpisodesResponse]:
        validate("ListEpisodes", request)
        batches = self._plane.list_episodes(EpisodeListKind(request.kind), request.checkpoint_id)
        async for batch in batches:
            yield pb.ListEpisodesResponse(participant=self._identity, episodes=wire.episode_list(batch))

    def _status(self, status: Status) -> pb.ParticipantStatus:
        running = status.running
        return pb.ParticipantStatus(
            participant=self._identity,
            phase=wire.phase_to(status.phase),
            active_checkpoint_id=status.active_checkpoint_id,
            controller_id=status.controller_id,
            highest_epoch=status.highest_epoch,
            lease_remaining=None if status.lease_remaining is None else wire.duration(status.lease_remaining),
            report=wire.report_to(status.report),
            writes_under_way=status.writes_under_way,
            marks_held=status.marks_held,
            oldest_mark_age=None if status.oldest_mark_age is None else wire.duration(status.oldest_mark_age),
            restored_pending=status.restored_pending,
            progress=pb.Progress(
                operation=running.operation,
                elapsed=wire.duration(running.elapsed),
                records_done=running.records_done,
                records_total=running.records_total,
                bytes_done=running.bytes_done,
                bytes_total=running.bytes_total,
            )
            if running
            else None,
            leases_expired=status.leases_expired,
            closed_for=None if status.closed_for is None else wire.duration(status.closed_for),
            extra=dict(status.extra),
        )


def _retire_outcome(episode: EpisodeId, problem: str | None) -> pb.RetireOutcome:
    state = pb.RETIRE_STATE_RETIRED if problem is None else pb.RETIRE_STATE_INCOMPLETE
    return pb.RetireOutcome(episode=wire.episode_to(episode), state=state, message=cut(problem or "", MAX_OUTCOME))
