"""The policy model server: OpenAI chat completions in front of the inference worker.

It only passes calls on; its gate holds new calls and undelivered replies while a checkpoint is open.
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.integrations import episode_of
from gym_ckpt_grpc.minigym.peers import Peers
from gym_ckpt_grpc.minigym.resources_server import answer, body_of


class PolicyServer:
    """Routes of the policy model. inference_url: base of the worker's routes."""

    def __init__(self, peers: Peers, inference_url: str) -> None:
        self._peers = peers
        self._worker = f"{inference_url}/v1/chat/completions"

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title="minigym policy model", openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/v1/chat/completions", self._completions, methods=["POST"])
        return app

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "policy_model", "pid": os.getpid()}

    async def _completions(self, request: Request) -> Response:
        episode = episode_of(request.scope)
        asked = await body_of(request)
        named = {**asked, "rollout_id": episode.rollout_id, "attempt": episode.attempt}
        reply = await self._peers.request("POST", self._worker, named)
        return answer(reply.body, status=reply.status)
