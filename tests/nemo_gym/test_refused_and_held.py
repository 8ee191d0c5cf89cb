"""What a server of the framework counts on its data plane: through its own middlewares, routes and handlers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry.catalogue import ADMISSION_HELD, ADMISSION_REFUSED
from tests.nemo_gym.servers import Participant, client_of, held, rows
from tests.participants.fakes import close, reopen, retire
from tests.telemetry.kept import Kept

SEED = {**rows("example_session_state_mgmt")[0], "_ng_task_index": 7, "_ng_rollout_index": 0}


@pytest.mark.behaviour("C300")
async def test_refusals_and_holds_of_a_released_server_count_once_each() -> None:
    """A late call of a retired session, and one whose rollout is illegal, which never reaches the gate."""
    kept, counter = Kept(), Participant(StatefulCounterResourcesServer)
    counter.port.telemetry = kept.telemetry
    async with client_of(counter.app) as client:
        assert (await client.post("/seed_session", json=SEED)).status_code == 200
        await close(counter.owner)
        waits: asyncio.Task[Any] = asyncio.create_task(client.post("/increment_counter", json={"count": 1}))
        await held(counter)
        await reopen(counter.owner)
        assert (await waits).status_code == 200
        await retire(counter.owner, counter.port, EpisodeId("7-0"))
        late = await client.post("/increment_counter", json={"count": 1})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "STALE_ATTEMPT")
        illegal = await client.post("/seed_session", json={**SEED, "_ng_rollout_id": "-bad"})
        assert illegal.status_code == 400
    refused = {str(labels["error_code"]): value for labels, value in kept.points(ADMISSION_REFUSED)}
    assert refused == {"STALE_ATTEMPT": 1, "INVALID_ARGUMENT": 1}
    assert kept.value(ADMISSION_HELD, participant_kind="resources") == 1
    kept.check_declared()
