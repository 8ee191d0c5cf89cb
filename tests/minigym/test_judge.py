"""The judge asks through the policy model server, untagged, and keeps nothing."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.minigym.judge_server import BEST, HttpJudge, JudgeServer
from gym_ckpt_grpc.minigym.peers import PeerFailed, Reply
from gym_ckpt_grpc.minigym.resources_server import answer, body_of
from gym_ckpt_grpc.minigym.weather_server import WeatherServer
from gym_ckpt_grpc.participants import PolicyModelOwner, VerifyMode
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from tests.minigym.gated import Gated
from tests.participants.fakes import FakePort, R, call, close, exported, reopen, spin

TRANSCRIPT = [{"role": "user", "content": "how is it?"}, {"role": "tool", "content": "{}"}]


class Wire:
    """Calls between applications without a network, in the form of `Peers`. asked: (url, body)."""

    def __init__(self, apps: dict[str, Any]) -> None:
        self._apps = apps
        self.asked: list[tuple[str, Any]] = []

    async def post(self, url: str, body: Any) -> Reply:
        self.asked.append((url, body))
        host, _, path = url.removeprefix("http://").partition("/")
        replied = await call(self._apps[host], f"/{path}", body, headers={"content-type": "application/json"}).end()
        if replied.status >= 300:
            raise PeerFailed(url, replied.status, replied.json())
        return Reply(replied.status, replied.json(), replied.headers)


class Model:
    """A policy model server whose gate is the real one; the model grades `points`, or says nothing for None."""

    def __init__(self, points: int | None = 3) -> None:
        self.points = points
        self.owner = PolicyModelOwner()
        self.owner.attach(FakePort(ParticipantKind.POLICY_MODEL))
        app = FastAPI()
        app.add_api_route("/v1/chat/completions", self._completions, methods=["POST"])
        self.app = CheckpointMiddleware(app, self.owner.gate())

    async def _completions(self, request: Request) -> Response:
        [tool] = (await body_of(request))["tools"]
        function = {"name": tool["function"]["name"], "arguments": orjson.dumps({"points": self.points}).decode()}
        calls = {"tool_calls": [{"function": function}]} if self.points is not None else {}
        return answer({"choices": [{"message": {"role": "assistant", **calls}}]})


def joined(model: Model) -> tuple[Wire, HttpJudge]:
    """A judge in front of a model, as a resources server asks it."""
    wire = Wire({"policy": model.app})
    wire._apps["judge"] = JudgeServer(wire, "http://policy").build_app()  # type: ignore[arg-type]
    return wire, HttpJudge(wire, "http://judge")  # type: ignore[arg-type]


@pytest.mark.parametrize(("points", "score"), [(0, 0.0), (3, 0.6), (BEST, 1.0), (None, 0.0)])
async def test_the_grade_of_the_model_is_the_score(points: int | None, score: float) -> None:
    """Untagged: the URL names no rollout. The question holds the transcript; the seed is explicit."""
    wire, judge = joined(Model(points))
    assert await judge.score(TRANSCRIPT) == score
    url, body = wire.asked[-1]
    assert (url, body["seed"]) == ("http://policy/v1/chat/completions", 0)
    assert orjson.dumps(TRANSCRIPT, option=orjson.OPT_SORT_KEYS).decode() in body["messages"][0]["content"]


@pytest.mark.behaviour("P100")
@pytest.mark.parametrize("verify", list(VerifyMode))
async def test_a_verification_that_asks_the_judge_completes_while_everything_is_closed(verify: VerifyMode) -> None:
    """In wait mode it blocks until the judge has answered, and the judge's call passes the closed policy gate."""
    model = Model()
    _, judge = joined(model)
    gated = Gated(WeatherServer(judge), verify=verify)
    await gated.seed({"cities": 1})
    await close(model.owner)
    verifying = gated.call("/verify", {"cities": 1, "messages": TRANSCRIPT})
    await spin(1)
    await close(gated.owner)
    assert (await verifying.end()).json()["reward"] == 0.6
    assert (gated.owner.is_ready(), model.owner.is_ready()) == (True, True)
    assert len(await exported(gated.owner)) == (verify is VerifyMode.REPLAY)
    await reopen(gated.owner)
    await reopen(model.owner)


async def test_a_model_that_fails_is_no_verdict() -> None:
    wire, judge = joined(Model())
    wire._apps["policy"] = FastAPI()
    gated = Gated(WeatherServer(judge))
    await gated.seed({"cities": 1}, episode=R)
    with pytest.raises(PeerFailed, match="answered 502"):
        await gated.post("/verify", {"cities": 1, "messages": []})
    assert gated.tracked == 1
