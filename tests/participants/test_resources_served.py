"""Resources servers behind a real control plane: what is missed, and what nobody claimed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.participants import ResourcesMode
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.testing import serve
from gym_ckpt_grpc.testing.client import ParticipantClient
from tests.participants.fakes import R1, R2, R, S
from tests.participants.resources_rig import ResourcesRig

S1 = EpisodeId("s", 1)


@asynccontextmanager
async def life(root: Path, rig: ResourcesRig | None = None) -> AsyncIterator[tuple[ResourcesRig, ParticipantClient]]:
    rig = rig or ResourcesRig()
    rig.owner.admission._port = None  # the rig attached a fake one; here the control plane gives its own
    async with serve(rig.owner, roots=[root]) as served:
        yield rig, served.client


async def checkpoint(client: ParticipantClient, name: str, *episodes: EpisodeId) -> tuple[int, list[EpisodeId]]:
    """(records, episodes left out) of a whole checkpoint."""
    await client.prepare(name)
    captured = await client.capture(name, episodes)
    reply = await client.commit(name, episodes)
    await client.resume(name)
    left_out = list(wire.episodes_from(reply.left_out))
    assert list(wire.episodes_from(captured.left_out)) in ([], left_out)
    return reply.record_count, left_out


@pytest.mark.behaviour("P237")
@pytest.mark.parametrize("mode", [ResourcesMode.EXPORTED, ResourcesMode.STATELESS])
async def test_restored_sessions_nobody_claimed_are_in_the_next_checkpoint_and_continue(
    tmp_path: Path, mode: ResourcesMode
) -> None:
    """Under attempt N+1, with the same state; the next restore installs N+2, and the old cookie goes on."""
    async with life(tmp_path, ResourcesRig(mode)) as (rig, client):
        await rig.seed("k", R)
        await rig.add("k")
        assert await checkpoint(client, "c0", R) == (1, [])
    for number, (source, target) in enumerate([(R, R1), (R1, R2)]):
        async with life(tmp_path, ResourcesRig(mode)) as (rig, client):
            await client.restore(f"r{number}", [source], source=f"c{number}")
            await client.resume(f"r{number}")
            assert rig.owner.restored_pending() == {target}
            assert await checkpoint(client, f"c{number + 1}", target) == (1, [])
            assert rig.owner.restored_pending() == {target}
            if target == R2:
                counted = await rig.add("k")
                assert (counted, rig.owner.restored_pending()) == (
                    2 if mode is ResourcesMode.EXPORTED else 1,
                    frozenset(),
                )


@pytest.mark.behaviour("P223")
async def test_a_missed_session_is_named_in_the_replies_and_the_commit_succeeds(tmp_path: Path) -> None:
    """Live, and restored but unused; the episode that is left out is not exported again, nor pending."""
    async with life(tmp_path) as (rig, client):
        await rig.seed("k", R)
        await rig.seed("m", S)
        assert await checkpoint(client, "c0", R, S) == (2, [])
        del rig.counters["k"]
        assert await checkpoint(client, "c1", R, S) == (1, [R])
        assert (rig.sessions(), await checkpoint(client, "c2", R, S)) == (1, (1, []))
    async with life(tmp_path) as (rig, client):
        await client.restore("r", [R, S], source="c0")
        await client.resume("r")
        del rig.counters["k"]
        assert await checkpoint(client, "c3", R1, S1) == (1, [R1])
        assert (rig.sessions(), rig.owner.restored_pending()) == (1, frozenset({S1}))
