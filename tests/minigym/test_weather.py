"""The weather: stateless, and verified from the transcript alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.minigym.tally_server import TallyServer
from gym_ckpt_grpc.minigym.weather_server import CITIES, WeatherServer, weather_in
from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode
from tests.minigym.gated import Gated, Message, life, play
from tests.participants.fakes import R1, R, close, exported, reopen, spin

SETUP = {"cities": 4}


def asked(*cities: str) -> list[tuple[str, dict[str, Any]]]:
    return [("get_weather", {"city": city}) for city in cities]


@pytest.mark.behaviour("P324")
async def test_it_is_stateless_and_its_verification_may_run_twice() -> None:
    """Twice with one body gives one answer, also from a process that never saw the session."""
    gated, other, messages = Gated(WeatherServer()), Gated(WeatherServer()), list[Message]()
    assert gated.owner.settings.mode is ResourcesMode.STATELESS
    seeded = await gated.seed(SETUP)
    assert seeded.headers["x-gymckpt-verify"] == "replay"
    await play(gated, asked("Cairo", "Cairo", "Bergen", "Quito"), messages)
    body = {**SETUP, "messages": messages}
    answers = [await each.post("/verify", body) for each in (gated, gated, other)]
    assert [(each.status, each.json()) for each in answers] == [
        (200, {"reward": 0.5, "state": {"found": ["Bergen", "Cairo"]}})
    ] * 3


@pytest.mark.behaviour("P324")
async def test_a_verification_runs_while_a_checkpoint_is_open_and_again_after_the_restore(tmp_path: Path) -> None:
    messages = list[Message]()
    async with life(WeatherServer(), tmp_path) as (gated, client):
        await gated.seed(SETUP)
        await play(gated, asked("Lima"), messages)
        body = {**SETUP, "messages": messages}
        await client.prepare("c")
        held = gated.call("/get_weather", {"city": "Lima"})
        first = await gated.post("/verify", body)
        assert (await client.commit("c", [R])).record_count == 1
        assert held.answer.status == 0
        await client.resume("c")
        await held.end()
        assert gated.tracked == 0
    async with life(WeatherServer(), tmp_path) as (gated, client):
        await client.restore("r", [R], source="c")
        await client.resume("r")
        assert gated.owner.restored_pending() == {R1}
        assert (
            (await gated.post("/verify", body)).json() == first.json() == {"reward": 0.25, "state": {"found": ["Lima"]}}
        )


class SlowJudge:
    """Scores when told to. asked: the transcripts."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: list[Any] = []

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> float:
        self.asked.append(messages)
        await self.go.wait()
        return 0.75


@pytest.mark.parametrize(("verify", "ready"), [(VerifyMode.REPLAY, True), (VerifyMode.WAIT, False)])
async def test_a_slow_verification_blocks_in_wait_mode_only(verify: VerifyMode, ready: bool) -> None:
    """It waits for a judge; replayable, it ends its session at Resume."""
    judge = SlowJudge()
    gated = Gated(WeatherServer(judge), verify=verify)
    await gated.seed(SETUP)
    verifying = gated.call("/verify", {**SETUP, "messages": []})
    await spin()
    await close(gated.owner)
    assert (gated.owner.is_ready(), len(judge.asked)) == (ready, 1)
    judge.go.set()
    assert (await verifying.end()).json()["reward"] == 0.75
    assert gated.owner.is_ready()
    assert [each.episode for each in await exported(gated.owner)] == ([R] if ready else [])
    await reopen(gated.owner)
    assert gated.tracked == 0


def test_the_weather_is_always_the_same() -> None:
    known = {"city": "Bergen", "sky": "clear", "degrees": 1}
    assert set(weather_in("Bergen")) == set(known)
    assert [weather_in(city) for city in CITIES] == [weather_in(city) for city in CITIES]
    assert len({(each["sky"], each["degrees"]) for each in map(weather_in, CITIES)}) == len(CITIES)


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/get_weather", {"city": "Atlantis"}, "city is 'Atlantis'"),
        ("/get_weather", {}, "no tool 'get_weather'"),
        ("/seed_session", {"cities": 7}, "cities is 7"),
        ("/seed_session", {}, "cities"),
        ("/verify", {"cities": 2}, "messages"),
        ("/verify", {"cities": True, "messages": []}, "cities is True"),
    ],
)
async def test_bad_requests_are_the_callers_fault(path: str, body: dict[str, Any], problem: str) -> None:
    gated = Gated(WeatherServer())
    await gated.seed(SETUP)
    answer = await gated.post(path, body, episode=R)
    assert (answer.status, problem in answer.json()["error"]) == (400, True)
    assert gated.tracked == 1


async def test_only_what_a_tool_said_is_a_report() -> None:
    gated = Gated(WeatherServer())
    told = orjson.dumps(weather_in("Bergen")).decode()
    messages = [{"role": "tool", "content": f"refused: {told}"}, {"role": "user", "content": told}]
    assert (await gated.post("/verify", {"cities": 1, "messages": messages})).json()["reward"] == 0.0


async def test_the_tally_is_a_counter_that_starts_over() -> None:
    """Restart-only: its sessions are restarts, its calls run while closed, and nothing is exported."""
    gated = Gated(TallyServer())
    seeded = await gated.seed({"target": 10})
    assert (seeded.headers["x-gymckpt-restart"], seeded.headers["x-gymckpt-verify"]) == ("1", "wait")
    await close(gated.owner)
    assert (await gated.post("/increment", {"by": 5})).json() == {"count": 5}
    assert (gated.owner.is_ready(), gated.owner.report(9).restarts) == (True, (R,))
    assert await exported(gated.owner) == []
    await reopen(gated.owner)
    assert (await gated.post("/verify", {"target": 10})).json()["reward"] == 0.5
