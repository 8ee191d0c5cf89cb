"""From a retire to its Forget, and after it: what a late request is told, over a served participant."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.control import ControlPlane, ParticipantServer, open_channel
from gym_ckpt_grpc.integrations.asgi import CheckpointMiddleware
from gym_ckpt_grpc.participants import ResourcesOwner
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.testing.client import ParticipantClient
from tests.participants.fakes import R1, R, S
from tests.participants.resources_rig import ResourcesRig


@pytest.mark.behaviour("C65")
async def test_a_late_request_is_stale_until_forget_and_served_after_it(tmp_path: Path) -> None:
    """Of the retired attempt and no other: neither of a later one, nor of another rollout."""
    rig = ResourcesRig()
    rig.owner = ResourcesOwner(rig)  # of the control plane here, not of the rig's port
    rig.served = CheckpointMiddleware(rig.app, rig.owner.gate())
    plane = ControlPlane(rig.owner, ParticipantIdentity(ParticipantKind.RESOURCES, "res"), roots=[str(tmp_path)])
    async with ParticipantServer(plane) as server, open_channel(server.address) as channel:
        client = ParticipantClient(channel)
        await rig.seed("k", R)
        await client.retire([R])
        for _ in range(2):
            late = await rig.call("/seed_session", "late", R).end()
            assert (late.status, late.code) == (409, "STALE_ATTEMPT")
        assert (await rig.call("/seed_session", "next", R1).end()).status == 200
        assert (await rig.call("/seed_session", "other", S).end()).status == 200
        await client.forget({"r": 0})
        assert (await rig.call("/seed_session", "after", R).end()).status == 200
        assert (await client.status()).marks_held == 0
