"""The policy model server: OpenAI chat completions in front of one or more inference workers.

Its gate holds new calls and undelivered replies while a checkpoint is open. With a ledger every tagged call is
captured, and a call that was cut goes on from its cut.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from gym_ckpt_grpc.auth import TokenSource
from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.integrations import episode_of, visit_of
from gym_ckpt_grpc.integrations.ledger_routes import PREFIX, LedgerRoutes
from gym_ckpt_grpc.minigym.chat_request import ChatRequest
from gym_ckpt_grpc.minigym.event_stream import EventStream, while_connected
from gym_ckpt_grpc.minigym.peers import Peers
from gym_ckpt_grpc.minigym.policy_calls import PATH, PolicyCall, Relay, Worker, ask
from gym_ckpt_grpc.minigym.resources_server import answer
from gym_ckpt_grpc.participants import GenerationCall, PolicyModelOwner
from gym_ckpt_grpc.protocol import EpisodeId
from gym_ckpt_grpc.protocol.errors import InvalidArgument, RolloutIdRequired

CALLER_LEFT = 499
"""Status of a reply that nobody reads any more."""


class PolicyServer:
    """Routes of the policy model.

    workers: at least one. The calls of a rollout all go to the same one, in every life, where the staged tokens of its
    earlier calls are; untagged calls take turns. ledger: None captures nothing. ledger_token: what callers of its own
    routes present, None admits everyone.
    """

    def __init__(
        self,
        peers: Peers,
        workers: Sequence[Worker],
        *,
        owner: PolicyModelOwner | None,
        ledger: CaptureLedger | None = None,
        ledger_token: TokenSource | None = None,
    ) -> None:
        self.owner = owner
        self._peers = peers
        self._workers = tuple(workers)
        self._turns = itertools.cycle(self._workers)
        self._ledger = ledger
        self._ledger_token = ledger_token

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title="minigym policy model", openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route(PATH, self._completions, methods=["POST"])
        if self._ledger is not None:
            routes = LedgerRoutes(self._ledger, closed=self._closed, token=self._ledger_token, inner=app)
            app.mount(PREFIX, routes)
        return app

    def worker_of(self, rollout_id: str) -> Worker:
        """The worker that serves a rollout."""
        number = int.from_bytes(hashlib.sha256(rollout_id.encode()).digest()[:8], "big")
        return self._workers[number % len(self._workers)]

    def _closed(self) -> bool:
        return self.owner is not None and self.owner.admission.closed

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "policy_model", "pid": os.getpid()}

    async def _completions(self, request: Request) -> Response:
        try:
            asked = ChatRequest.model_validate_json(await request.body())
            asked.callable_tools()
        except (ValidationError, ValueError) as error:
            raise InvalidArgument(str(error)) from error
        episode = _tagged(request)
        worker = self.worker_of(episode.rollout_id) if episode else next(self._turns)
        call = self._begin(request, asked, episode, worker)
        await call.admit()
        if asked.stream:
            return await self._stream(worker, call)
        reply = await while_connected(request.receive, ask(self._peers, worker, call))
        return answer(reply.body, status=reply.status) if reply else Response(status_code=CALLER_LEFT)

    def _begin(self, request: Request, asked: ChatRequest, episode: EpisodeId | None, worker: Worker) -> PolicyCall:
        effective = asked.with_defaults(episode.rollout_id if episode else "")
        if self.owner is None:
            call = GenerationCall(uuid.uuid4().hex)
        else:
            visit = visit_of(request.scope)
            call = self.owner.begin_generation(visit, effective, backend=worker.name, model=asked.model)
        return PolicyCall(call, effective, episode=episode, ledger=self._ledger)

    async def _stream(self, worker: Worker, call: PolicyCall) -> Response:
        relay = Relay(self._peers, worker, call)
        try:
            refused = await relay.refused()
        except BaseException:
            await relay.close()
            raise
        if refused is not None:
            await relay.close()
            return answer(refused.body, status=refused.status)
        return EventStream(relay.events(), closed=relay.close)


def _tagged(request: Request) -> EpisodeId | None:
    """The episode of a call; None for one of a judge or a health evaluation."""
    try:
        return episode_of(request.scope)
    except RolloutIdRequired:
        return None
