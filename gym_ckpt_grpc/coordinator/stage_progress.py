"""Telling how a stage of Prepare goes on while it runs. Never what is decided."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fanout import until_done
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.session import Session
from gym_ckpt_grpc.protocol.phases import Phase
from gymckpt.v1 import participant_pb2

QUIET = 0.2
"""Seconds that a stage runs untold: most are over by then, and cost no further call."""


@asynccontextmanager
async def told(session: Session, stage: Sequence[Member], checkpoint_id: str) -> AsyncIterator[None]:
    """Event after event for as long as the block runs: how many are prepared, how many blockers are left."""
    task = asyncio.get_running_loop().create_task(
        _Telling(session, stage, checkpoint_id).run(), name=f"tell of a stage of {checkpoint_id}"
    )
    try:
        yield
    finally:
        task.cancel()
        await until_done([task])


class _Telling:
    """One stage. Participants send their changes by themselves, at most ten a second each."""

    def __init__(self, session: Session, stage: Sequence[Member], checkpoint_id: str) -> None:
        self._session = session
        self._stage = stage
        self._checkpoint_id = checkpoint_id
        self._prepared: dict[str, bool] = {}
        self._blockers: dict[str, int] = {}
        self._last = ""

    async def run(self) -> None:
        await asyncio.sleep(QUIET)
        tasks = [asyncio.ensure_future(self._watch(member)) for member in self._stage]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await until_done(tasks)

    async def _watch(self, member: Member) -> None:
        try:
            async for reply in member.stub.WatchStatus(participant_pb2.WatchStatusRequest()):
                self._hear(member, reply.status)
        except grpc.aio.AioRpcError:
            return  # what its Prepare call says of it counts

    def _hear(self, member: Member, status: participant_pb2.ParticipantStatus) -> None:
        ours = status.active_checkpoint_id == self._checkpoint_id
        self._prepared[member.name] = ours and wire.phase_from(status.phase) is Phase.PREPARED
        self._blockers[member.name] = status.report.blocker_count if ours else 0
        kinds = "/".join(dict.fromkeys(member.kind.value for member in self._stage))
        ready, left = sum(self._prepared.values()), sum(self._blockers.values())
        text = f"{kinds}: {ready} of {len(self._stage)} prepared so far, {left} blockers left"
        if text != self._last:
            self._last = text
            self._session.events.add(EventKind.STAGE, text, checkpoint_id=self._checkpoint_id)
