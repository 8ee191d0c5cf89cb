"""The judge: asks an auxiliary model how good a transcript is. It keeps nothing, so it is no participant.

It asks through the policy model server, without a rollout prefix: such a call belongs to no episode, is never held,
and answers while a checkpoint is open. So a verification that waits for the judge can end, and does not hold it up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.minigym.peers import PeerFailed, Peers, answer_peer_failure
from gym_ckpt_grpc.minigym.resources_server import answer, body_of, choice_tool

BEST = 5
"""The highest grade; the lowest is 0."""
GRADE = choice_tool("grade", "Grade the transcript.", "points", list(range(BEST + 1)))
MODEL = "minigym"


class JudgeServer:
    """`/judge`: {"messages": transcript, "seed": of sampling} -> {"score": 0 to 1}, the same for the same transcript.

    policy_url: base of the policy model server's routes.
    """

    def __init__(self, peers: Peers, policy_url: str) -> None:
        self._peers = peers
        self._url = f"{policy_url}/v1/chat/completions"

    def build_app(self) -> FastAPI:
        """The application, without lifespan."""
        app = FastAPI(title="minigym judge", openapi_url=None)
        app.add_exception_handler(PeerFailed, answer_peer_failure)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/judge", self._judge, methods=["POST"])
        return app

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "judge", "pid": os.getpid()}

    async def _judge(self, request: Request) -> Response:
        asked = await body_of(request)
        return answer({"score": await self._grade(asked["messages"], asked.get("seed", 0)) / BEST})

    async def _grade(self, messages: Sequence[Mapping[str, Any]], seed: int) -> int:
        transcript = orjson.dumps(messages, option=orjson.OPT_SORT_KEYS).decode()
        question = {"role": "user", "content": f"Grade this transcript from 0 to {BEST}: {transcript}"}
        body = {"model": MODEL, "messages": [question], "tools": [GRADE], "seed": seed}
        reply = await self._peers.post(self._url, body)
        calls = reply.body["choices"][0]["message"].get("tool_calls") or []
        if not calls:
            return 0
        points: int = orjson.loads(calls[0]["function"]["arguments"])["points"]
        return points


class HttpJudge:
    """A judge as a resources server asks it. judge_url: base of the judge's routes."""

    def __init__(self, peers: Peers, judge_url: str) -> None:
        self._peers = peers
        self._url = f"{judge_url}/judge"

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> float:
        """0 to 1. Raises PeerFailed, or the refusal of a gate as itself."""
        score: float = (await self._peers.post(self._url, {"messages": list(messages)})).body["score"]
        return score
