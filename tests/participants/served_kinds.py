"""A real owner of each kind behind a real control plane, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_ckpt_grpc.control import EpisodeListKind, RecordBatch
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.testing import Served, serve
from gymckpt.v1 import participant_pb2 as pb
from tests.participants.kinds import KINDS, AgentKind, KindRig, ResourcesKind

ALL = list(KINDS)
WITH_RECORDS = [name for name in ALL if name != "policy_model"]
"""Kinds whose records are asked for here; those of a policy model have tests of their own."""
S1 = EpisodeId("s", 1)
END_WITHIN = 10.0


@dataclass
class Kind:
    """A rig whose owner is served: `p.client` calls its control plane."""

    rig: KindRig
    p: Served

    @property
    def owner(self) -> Any:
        return self.rig.owner

    async def commit(self, id: str, *episodes: EpisodeId) -> str:
        """A whole checkpoint of these episodes; gives the manifest's digest."""
        assert (await self.p.client.prepare(id)).phase == pb.PHASE_PREPARED
        reply = await self.p.client.commit(id, episodes)
        await self.p.client.resume(id)
        return reply.manifest_digest

    async def pending(self) -> set[EpisodeId]:
        return set(await self.p.client.listed(EpisodeListKind.RESTORED_PENDING))


@asynccontextmanager
async def served(name: str, root: Path, **options: Any) -> AsyncIterator[Kind]:
    rig = KINDS[name]()
    rig.owner.admission._port = None  # the rig attached a fake one; here the control plane gives its own
    async with serve(rig.owner, roots=[root], **options) as p:
        try:
            yield Kind(rig, p)
        finally:
            async with asyncio.timeout(END_WITHIN):  # a failed test must not wait for what it never let go
                await rig.end()


async def started(kind: Kind, *episodes: EpisodeId) -> None:
    """Live state of these episodes that a checkpoint can take: parked, or a session."""
    if isinstance(kind.rig, AgentKind | ResourcesKind):
        for episode in episodes:
            await kind.rig.rig.seed(f"key-{episode}", episode)


async def written(name: str, root: Path, *episodes: EpisodeId) -> str:
    """A checkpoint `source` with these episodes, of a server that is gone; gives its digest."""
    records = await KINDS[name]().records(*episodes)
    async with served(name, root) as kind:
        export_these(kind.owner, records)
        return await kind.commit("source", *episodes)


def export_these(owner: Any, records: Sequence[Record]) -> None:
    async def export(scope: Any) -> AsyncIterator[Any]:
        yield RecordBatch([each for each in records if each.episode in scope])

    owner.export = export


async def restored(kind: Kind, *episodes: EpisodeId) -> None:
    """Restore these episodes from `source` and resume; they are pending then."""
    await kind.p.client.restore("restore", list(episodes), source="source")
    await kind.p.client.resume("restore")
