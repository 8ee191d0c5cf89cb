"""The released agent of Gymnasium-style servers: its `/run` asks the policy itself, and makes ids for its steps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from responses_api_agents.gymnasium_agent.app import GymnasiumAgent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gym_ckpt_grpc.integrations.nemo_gym import NAMES
from tests.nemo_gym.agent_rig import Model, Rig, World
from tests.nemo_gym.servers import text
from tests.participants.fakes import close, exported

CALLS = ["/reset", "/step", "/step", "/close"]


class Game(World):
    """Adds up what it is told, up to 3. A step with an id that it knows is answered again, and not made again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, str] = {}

    async def _answer(self, request: Request) -> Response:
        episode, path = NAMES.split(request.url.path)
        body, session = json.loads(await request.body()), request.cookies.get("world")
        await self.passed(path)
        self.calls.append((None if episode is None else episode.capture_key, path, session, body))
        if path == "/close":
            return JSONResponse({})
        if path == "/reset":
            session = f"s-{len(self.counters)}"
            self.counters[session] = 0
            able = {"supports_step_idempotency": True, "supports_explicit_close": True}
            answer = JSONResponse({"observation": "0", "info": able}, headers={NAMES.verify_header: "wait"})
            answer.set_cookie("world", session)
            return answer
        assert session is not None
        self.counters[session] += int(body["response"]["output"][0]["content"][0]["text"])
        self.steps[body["_ng_step_request_id"]] = session
        found = self.counters[session]
        return JSONResponse(
            {
                "observation": str(found),
                "reward": float(found),
                "terminated": found >= 3,
                "truncated": False,
                "info": {},
            }
        )


class Player(Model):
    """Says 1, then 2."""

    def items(self, conversation: Any, done: int) -> list[Mapping[str, Any]]:
        return [text(str(sum(each.get("role") == "assistant" for each in conversation) + 1))]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig(GymnasiumAgent, world=Game(), model=Player(()), max_steps=9) as rig:
        yield rig


AT = {
    ("/reset", 1): (CALLS, 2),
    ("model", 1): (CALLS[1:], 2),
    ("/step", 1): (CALLS[2:], 1),
    ("model", 2): (CALLS[2:], 1),
    ("/step", 2): (CALLS[3:], 0),
    ("/close", 1): ([], 0),
}
"""Which call a checkpoint finds under way -> what is called after a restore: of the world, and how often the model."""


@pytest.mark.parametrize("at", AT, ids=str)
async def test_a_game_goes_on_wherever_the_checkpoint_found_it(rig: Rig, at: tuple[str, int]) -> None:
    """A policy call of the run itself does not hold up a checkpoint; a step does, and keeps its id."""
    call, number = at
    held = rig.model if call == "model" else rig.world
    held.hold(call, number)
    life = await rig.life()
    running = life.run()
    await held.at(call, number)
    await close(life.owner)
    assert life.owner.is_ready() == (call in ("/reset", "model"))
    if call in ("/step", "/close"):
        held.release()
    await life.port.until(life.owner.is_ready)
    records = await exported(life.owner)
    picture = rig.picture()
    await life.resume()
    held.release()
    status, twin = await running
    assert (status, twin["reward"], twin["terminated"]) == (200, 4.0, True)

    rig.set_back(picture)
    called, asked = len(rig.world.calls), len(rig.model.asked)
    after = await rig.life()
    await after.restore(records)
    status, restored = await after.run(1)
    assert (status, restored) == (200, twin)
    assert (rig.world.paths(called), len(rig.model.asked) - asked) == AT[at]
    assert {each[0] for each in rig.world.calls[called:] + rig.model.asked[asked:]} <= {"r-a1"}


async def test_a_policy_reply_that_arrives_while_closed_is_not_asked_for_again(rig: Rig) -> None:
    rig.model.hold("model", 2)
    life = await rig.life()
    running = life.run()
    await rig.model.at("model", 2)
    await close(life.owner)
    rig.model.release()
    session = life.owner._sessions.get("run:r")
    await life.port.until(lambda: session.kept)
    records = await exported(life.owner)
    running.cancel()
    after = await rig.life()
    await after.restore(records)
    asked = len(rig.model.asked)
    status, result = await after.run(1)
    assert (status, result["reward"], len(rig.model.asked) - asked) == (200, 4.0, 0)
