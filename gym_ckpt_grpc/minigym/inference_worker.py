"""The inference worker: a server that generates token by token and writes down what it generated.

It speaks a small internal protocol to the policy model server: OpenAI chat completions plus the rollout's
name, so that its log can say for whom each token was made. It is no participant: a crash costs it nothing
but the calls it was at.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_ckpt_grpc.minigym.engine import Engine
from gym_ckpt_grpc.minigym.generation import (
    MAX_SEED,
    Generation,
    assistant_message,
    offered_calls,
    request_digest,
    seed_of_rollout,
    text_of,
)
from gym_ckpt_grpc.minigym.inference_log import PROGRESS_EVERY, InferenceLog, ids_digest

LOG_NAME = "inference.jsonl"
"""The log's usual file name."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one life of a worker.

    log: file appended to over all lives. life: number of this one, from 1. tick: seconds per token.
    """

    log: Path
    life: int = 1
    tick: float = 0.004
    weight_version: int = 0


class CompletionRequest(BaseModel):
    """What the policy model server sends. seed: None takes the rollout's; max_tokens: most tokens to make."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rollout_id: str = Field(min_length=1)
    attempt: int = Field(ge=0)
    messages: list[dict[str, Any]]
    tools: list[Any] = []
    model: str = "minigym"
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    max_tokens: int = Field(default=256, ge=1)


class InferenceWorker:
    """State of the server: engine, log and current weights. `app` is what uvicorn serves."""

    def __init__(self, config: WorkerConfig) -> None:
        self.weight_version = config.weight_version
        self._config = config
        self._engine = Engine(tick=config.tick)
        self._log: InferenceLog | None = None
        self.app = FastAPI(title="minigym inference worker", lifespan=self._lifespan, openapi_url=None)
        self.app.add_api_route("/health", self._health, methods=["GET"])
        self.app.add_api_route("/v1/chat/completions", self._completions, methods=["POST"])

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._log = InferenceLog(self._config.log, life=self._config.life)
        try:
            async with self._engine:
                yield
        finally:
            self._log.close()

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "inference", "pid": os.getpid(), "active": self._engine.active}

    async def _completions(self, request: Request) -> Response:
        try:
            asked = CompletionRequest.model_validate_json(await request.body())
            offered_calls(asked.tools)
        except (ValidationError, ValueError) as error:
            return _json({"error": {"code": "INVALID_ARGUMENT", "detail": str(error)}}, status=400)
        return await self._while_connected(request, asked)

    async def _while_connected(self, request: Request, asked: CompletionRequest) -> Response:
        """Generate until done or the caller goes away: nobody wants the tokens of a caller who left."""
        work = asyncio.create_task(self.complete(asked))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            return _json(work.result()) if work.done() else Response(status_code=499)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def complete(self, asked: CompletionRequest) -> dict[str, Any]:
        """Make one reply and log it. Cancelling the caller stops the tokens and is logged too."""
        assert self._log is not None, "the lifespan opens the log"
        seed = seed_of_rollout(asked.rollout_id) if asked.seed is None else asked.seed
        digest = request_digest(asked.messages, asked.tools, model=asked.model, seed=seed)
        generation = Generation(digest, seed, limit=asked.max_tokens)
        log = _CallLog(self._log, asked)
        log.start(digest)

        def advance() -> bool:
            generation.advance(self.weight_version)
            log.progress(len(generation.ids))
            return generation.finish_reason is not None

        try:
            await self._engine.run(advance)
        except asyncio.CancelledError:
            log.cancelled(generation)
            raise
        log.end(generation)
        return _reply(log.call_id, asked, generation)


class _CallLog:
    """The log lines of one call."""

    def __init__(self, log: InferenceLog, asked: CompletionRequest) -> None:
        self.call_id = uuid.uuid4().hex
        self._log = log
        self._messages = asked.messages
        turn = sum(message.get("role") == "assistant" for message in asked.messages)
        self._common = {
            "call_id": self.call_id,
            "rollout_id": asked.rollout_id,
            "attempt": asked.attempt,
            "turn": turn,
        }

    def start(self, digest: bytes) -> None:
        self._log.write("start", **self._common, messages=len(self._messages), context_digest=digest.hex())

    def progress(self, tokens: int) -> None:
        if tokens % PROGRESS_EVERY == 0:
            self._log.write("tokens", **self._common, tokens=tokens)

    def cancelled(self, generation: Generation) -> None:
        self._log.write("cancelled", **self._common, **_made(generation))

    def end(self, generation: Generation) -> None:
        self._log.write("end", **self._common, **_made(generation), finish_reason=generation.finish_reason)


def _made(generation: Generation) -> dict[str, Any]:
    return {"tokens": len(generation.ids), "ids_digest": ids_digest(generation.ids)}


def _reply(call_id: str, asked: CompletionRequest, generation: Generation) -> dict[str, Any]:
    ids = generation.ids
    message = assistant_message(generation.digest, ids, asked.tools)
    reason = "tool_calls" if "tool_calls" in message else generation.finish_reason
    return {
        "id": call_id,
        "model": asked.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "text": text_of(ids),
        "token_ids": ids,
        "logprobs": generation.logprobs,
        "finish_reason": reason,
        "weight_version": generation.weight_version,
        "usage": {"completion_tokens": len(ids)},
    }


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: dict[str, Any], *, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
