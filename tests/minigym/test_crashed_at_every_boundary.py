"""A rollout that is crashed at every boundary in turn ends as one that nothing ever interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.minigym.blackjack_server import BlackjackServer
from gym_ckpt_grpc.minigym.frozen_lake_server import FrozenLakeServer
from gym_ckpt_grpc.minigym.inbox_server import InboxServer
from gym_ckpt_grpc.minigym.office_server import OfficeServer
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer
from gym_ckpt_grpc.minigym.weather_server import WeatherServer
from tests.minigym.gated import Gated, Message, life, play, plays
from tests.participants.fakes import R

TURNS = 6
SERVERS: Mapping[str, tuple[Callable[[], ResourcesServer], dict[str, int]]] = {
    "blackjack": (BlackjackServer, {"seed": 5, "games": 4}),
    "office": (OfficeServer, {"seed": 5, "goal": 9}),
    "inbox": (InboxServer, {"seed": 5}),
    "weather": (WeatherServer, {"cities": 6}),
    "frozen_lake": (FrozenLakeServer, {"seed": 5}),
}


async def finished(gated: Gated, setup: dict[str, int], messages: list[Message]) -> Any:
    answer = await gated.post("/verify", {**setup, "messages": messages})
    assert answer.status == 200, answer.body
    assert gated.tracked == 0
    return answer.json()


@pytest.mark.behaviour("E28")
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_rollout_crashed_at_every_boundary_equals_its_twin(tmp_path: Path, name: str, seed: int) -> None:
    """Through real checkpoints: the transcript, the reward and the whole final state are the same."""
    build, setup = SERVERS[name]
    twin, told = Gated(build()), list[Message]()
    calls = plays(twin.server.tools, TURNS, seed)
    await twin.seed(setup)
    await play(twin, calls, told)
    expected = await finished(twin, setup, told)

    messages, episode = list[Message](), R
    for number in range(TURNS + 1):
        async with life(build(), tmp_path) as (gated, client):
            if number == 0:
                await gated.seed(setup)
            else:
                await client.restore(f"r{number}", [episode], source=f"c{number - 1}")
                await client.resume(f"r{number}")
                episode = episode.next()
                await play(gated, [calls[number - 1]], messages)
            if number == TURNS:
                assert (messages, await finished(gated, setup, messages)) == (told, expected)
                break
            await client.prepare(f"c{number}")
            assert (await client.commit(f"c{number}", [episode])).record_count == (gated.tracked > 0)
            await client.resume(f"c{number}")
            # The crash comes a little later: what was done after the checkpoint is in no restored state.
            await play(gated, plays(gated.server.tools, 1, number), list(messages))
    assert episode.attempt == TURNS


@pytest.mark.behaviour("E28")
@pytest.mark.parametrize("name", ["blackjack", "office", "inbox"])
async def test_a_rollout_that_lost_its_state_does_not(name: str) -> None:
    """The negative: what begins anew in the middle ends elsewhere."""
    build, setup = SERVERS[name]
    whole, half = Gated(build()), Gated(build())
    calls = plays(whole.server.tools, TURNS, 1)
    results = []
    for gated, played in ((whole, calls), (half, calls[TURNS // 2 :])):
        await gated.seed(setup)
        messages = list[Message]()
        await play(gated, played, messages)
        results.append((await finished(gated, setup, messages))["state"])
    assert results[0] != results[1]
