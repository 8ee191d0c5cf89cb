"""Requests that outlive the session they are in: closed under them, and still to be retired."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import OutOfTime, RetireIncomplete
from tests.participants.fakes import R1, Call, R, close, retire, spin
from tests.participants.resources_rig import ResourcesRig


@pytest.fixture
def rig() -> ResourcesRig:
    return ResourcesRig()


async def orphaned(rig: ResourcesRig) -> Call:
    """A verification under way whose session its client has closed, as an environment's cleanup does."""
    await rig.seed("k", R)
    verifying = rig.call("/verify", "k", R)
    await spin()
    assert (await rig.call("/close_session", "k", R).end()).status == 200
    assert rig.sessions() == 0
    return verifying


@pytest.mark.behaviour("P226")
async def test_a_retire_ends_a_request_whose_session_was_closed_meanwhile(rig: ResourcesRig) -> None:
    """Else it would hold up every later checkpoint. Its answer is the refusal."""
    rig.gates["/verify"] = asyncio.Event()
    verifying = await orphaned(rig)
    await close(rig.owner)
    assert not rig.owner.is_ready()
    await retire(rig.owner, rig.port, R)
    answer = await verifying.end()
    assert (answer.status, answer.json()["error"]["code"]) == (409, "STALE_ATTEMPT")
    assert rig.owner.is_ready()


@pytest.mark.behaviour("P226")
async def test_a_retire_waits_until_such_a_request_has_ended(rig: ResourcesRig) -> None:
    """It is cancelled once; until it has ended the retire is not complete and cannot be forgotten."""
    cleaned, cancels = asyncio.Event(), []

    async def slow_to_end(scope: Any, body: bytes) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancels.append(1)
            await cleaned.wait()
            raise

    rig.app.routes["/verify"] = slow_to_end
    verifying = await orphaned(rig)
    for _ in range(2):
        with pytest.raises(OutOfTime):
            await retire(rig.owner, rig.port, R, seconds=0.01)
    with pytest.raises(RetireIncomplete):
        rig.owner.check_forget(R.rollout_id, R.attempt)
    cleaned.set()
    await retire(rig.owner, rig.port, R)
    rig.owner.check_forget(R.rollout_id, R.attempt)
    assert ((await verifying.end()).status, cancels) == (409, [1])


@pytest.mark.behaviour("P226")
async def test_such_a_request_of_a_later_attempt_goes_on(rig: ResourcesRig) -> None:
    """A retire covers an attempt and those before it."""
    gate = rig.gates["/verify"] = asyncio.Event()
    await orphaned(rig)
    await rig.seed("m", R1)
    later = rig.call("/verify", "m", R1)
    await spin()
    await retire(rig.owner, rig.port, R)
    gate.set()
    assert (await later.end()).status == 200
