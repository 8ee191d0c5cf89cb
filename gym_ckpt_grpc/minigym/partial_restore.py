"""A restore by hand that leaves a kind out: the negative control of the demo.

A coordinator restores everything or nothing. This drives the participants directly, as somebody with grpcurl
could, to show what a forgotten participant costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gym_ckpt_grpc.control import open_channel, wire
from gym_ckpt_grpc.coordinator import new_checkpoint_id
from gym_ckpt_grpc.minigym.access import access_as
from gym_ckpt_grpc.minigym.deployment import Deployment, ServerPlan
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, Found, read_episodes
from gymckpt.v1 import participant_pb2, participant_pb2_grpc

CALL_LIMIT = 30.0


async def restore_without(plan: Deployment, left_out: ParticipantKind) -> tuple[EpisodeId, ...]:
    """Restore the newest checkpoint everywhere but at one kind, then resume; gives the attempts to send."""
    root = CheckpointRoot(str(plan.root))
    found = await asyncio.to_thread(root.find)
    lists = await asyncio.to_thread(read_episodes, root.files, found.location, found.manifest)
    epoch = (await asyncio.to_thread(root.sequence.claim, "by-hand", found.manifest.run_id)).epoch
    context = participant_pb2.ControlContext(
        checkpoint_id=new_checkpoint_id("restore"), controller_id="by-hand", epoch=epoch
    )
    chosen = [s for s in plan.servers if s.kind and s.kind != left_out]
    await asyncio.gather(*(_restore(plan, server, found, lists.continued, context) for server in chosen))
    return tuple(episode.next() for episode in lists.continued)


async def _restore(
    plan: Deployment,
    server: ServerPlan,
    found: Found,
    episodes: Sequence[EpisodeId],
    context: participant_pb2.ControlContext,
) -> None:
    async with open_channel(server.control_address, **access_as("controller", plan)) as channel:
        stub = participant_pb2_grpc.ParticipantServiceStub(channel)
        request = participant_pb2.RestoreRequest(
            context=context,
            storage_uri=found.location.uri,
            source_checkpoint_id=found.manifest.checkpoint_id,
            scope=wire.episode_list(episodes),
        )
        await stub.Restore(request, timeout=CALL_LIMIT)
        await stub.Resume(participant_pb2.ResumeRequest(context=context), timeout=CALL_LIMIT)
