"""The inference worker: a server that generates token by token and writes down what it generated.

It speaks a small internal protocol to the policy model server: OpenAI chat completions plus the rollout's name, so
that its log can say for whom each token was made, and the capture admission. With a token store it stages every
captured call, and serves `GenerationService` on a port of its own, so that a checkpoint can cut what runs. It is no
participant: a crash costs it the calls it was at, but for what was cut.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from gym_ckpt_grpc.auth import Authenticator, ServerTls
from gym_ckpt_grpc.capture import AsyncTokenStore, FileTokenStore, GenerationServer, coordinates_to_json
from gym_ckpt_grpc.control import BackendInfo, Capability
from gym_ckpt_grpc.integrations import answer_refusal
from gym_ckpt_grpc.minigym.engine import Engine
from gym_ckpt_grpc.minigym.event_stream import DONE, EventStream, event, while_connected
from gym_ckpt_grpc.minigym.generation import text_of
from gym_ckpt_grpc.minigym.inference_log import InferenceLog
from gym_ckpt_grpc.minigym.resources_server import answer
from gym_ckpt_grpc.minigym.vocabulary import VOCABULARY
from gym_ckpt_grpc.minigym.worker_calls import WorkerCall, WorkerRequest, make_call
from gym_ckpt_grpc.minigym.worker_controls import WorkerControls
from gym_ckpt_grpc.minigym.worker_cuts import WorkerCuts
from gym_ckpt_grpc.minigym.worker_routes import add_control_routes
from gym_ckpt_grpc.protocol import ControlError
from gym_ckpt_grpc.protocol.errors import InvalidArgument

LOG_NAME = "inference.jsonl"
"""The log's usual file name."""
MODEL_ID = "minigym"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one life of a worker.

    log: file appended to over all lives. life: number of this one, from 1. tick: seconds per token. name: among the
    backends of a policy model server. staged: directory of the token store; None stages nothing. control_address:
    where GenerationService is served, empty for nowhere; authenticator: who may call it, None for anyone on this
    machine; tls, audit_log: as GenerationServer has them. controls: whether the routes for tests exist.
    """

    log: Path
    life: int = 1
    tick: float = 0.004
    weight_version: int = 0
    name: str = "inference"
    staged: Path | None = None
    control_address: str = ""
    authenticator: Authenticator | None = None
    tls: ServerTls | None = None
    audit_log: Path | None = None
    controls: bool = False

    def __post_init__(self) -> None:
        if self.control_address and self.staged is None:
            raise ValueError("a worker without a token store can cut nothing")


class InferenceWorker:
    """State of the server: engine, log, calls and current weights. `app` is what uvicorn serves."""

    def __init__(self, config: WorkerConfig) -> None:
        self.weight_version = config.weight_version
        self.incarnation_id = uuid.uuid4().hex
        self.controls = WorkerControls()
        self.engine = Engine(tick=config.tick)
        self.cuts = WorkerCuts(self.describe, self.controls, listed=config.controls)
        self.calls: list[WorkerCall] = []
        """Every call in the order they began; kept only with controls."""
        self._config = config
        self._tokens: AsyncTokenStore | None = None
        self._log: InferenceLog | None = None
        self.app = FastAPI(title="minigym inference worker", lifespan=self._lifespan, openapi_url=None)
        self.app.add_exception_handler(ControlError, answer_refusal)
        self.app.add_api_route("/health", self._health, methods=["GET"])
        self.app.add_api_route("/v1/chat/completions", self._completions, methods=["POST"])
        if config.controls:
            add_control_routes(self.app, self)

    def describe(self) -> BackendInfo:
        """Who this worker is to a checkpoint."""
        config = self._config
        can = frozenset({Capability.CUT, Capability.CONTINUE, Capability.FINISHED}) if config.staged else frozenset()
        return BackendInfo(config.name, self.incarnation_id, MODEL_ID, self.weight_version, can)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with self.serving():
            yield

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Open the log and the token store, run the engine, and serve GenerationService."""
        config = self._config
        self._log = InferenceLog(config.log, life=config.life)
        async with AsyncExitStack() as stack:
            stack.callback(self._log.close)
            if config.staged is not None:
                self._tokens = AsyncTokenStore(await asyncio.to_thread(FileTokenStore, config.staged))
                stack.push_async_callback(self._tokens.close)
                self.cuts.open(self._tokens)
            await stack.enter_async_context(self.engine)
            if config.control_address:
                server = GenerationServer(
                    self.cuts,
                    config.control_address,
                    authenticator=config.authenticator,
                    allow_insecure=config.authenticator is None,
                    tls=config.tls,
                    audit_log=config.audit_log,
                )
                await stack.enter_async_context(server)
            yield

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "inference", "pid": os.getpid(), "active": self.engine.active}

    async def _completions(self, request: Request) -> Response:
        try:
            call = await self.begin(WorkerRequest.model_validate_json(await request.body()))
        except (ValidationError, ValueError) as error:
            raise InvalidArgument(str(error)) from error
        if call.asked.stream:
            return EventStream(self.events(call), closed=lambda: self._left(call))
        try:
            await while_connected(request.receive, self.run(call))
        finally:
            self._leave(call)
        return answer(_reply(call)) if call.state == "end" else Response(status_code=499)

    async def begin(self, asked: WorkerRequest) -> WorkerCall:
        """Make a call known to cuts and log. Raises ValueError or ControlError, and begins nothing."""
        assert self._log is not None, "the lifespan opens the log"
        call = await make_call(asked, tokens=self._tokens, weight_version=self.weight_version, log=self._log)
        self.cuts.add(call)
        if self._config.controls:
            self.calls.append(call)
        call.begin()
        return call

    async def run(self, call: WorkerCall) -> None:
        """Generate what is left of a call and stage it. Cancelling stops the tokens and is logged too."""
        try:
            await asyncio.gather(
                *(
                    self.engine.run(call.advances(choice, lambda: self.weight_version, self.controls))
                    for choice, generation in enumerate(call.generations)
                    if generation.finish_reason is None
                )
            )
            await call.stage()
        except asyncio.CancelledError:
            self._leave(call)
            raise
        call.finish("end")
        self.cuts.ended(call)

    async def _left(self, call: WorkerCall) -> None:
        self._leave(call)

    def _leave(self, call: WorkerCall) -> None:
        """Its caller has gone; nothing happens if it has ended."""
        call.finish("cancelled")
        self.cuts.ended(call)

    async def events(self, call: WorkerCall) -> AsyncGenerator[bytes, None]:
        """One event a token, reused ones at once; the last but DONE tells how it ended. Several choices interleave."""
        running = asyncio.create_task(self.run(call))
        running.add_done_callback(lambda _: call.moved.set())
        sent = [0] * len(call.generations)
        done = False
        try:
            while not done:
                await call.moved.wait()
                call.moved.clear()
                done = running.done()  # looked at before the tokens are: none may come between
                for choice, generation in enumerate(call.generations):
                    for token in generation.ids[sent[choice] :]:
                        sent[choice] += 1
                        yield event(_chunk(call, choice, {"content": VOCABULARY[token]}))
            running.result()
            for choice in range(len(call.generations)):
                yield event(_last_chunk(call, choice))
            yield DONE
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _reply(call: WorkerCall) -> dict[str, Any]:
    choices = []
    for index in range(len(call.generations)):
        message = call.message(index)
        choices.append({"index": index, "message": message, "finish_reason": _reason(call, index, message)})
    return {
        "id": call.response_id,
        "model": call.asked.model,
        "choices": choices,
        "text": text_of(call.generations[0].ids),
        "finish_reason": choices[0]["finish_reason"],
        **_generated(call),
    }


def _generated(call: WorkerCall) -> dict[str, Any]:
    """What the policy model server and evidence want to know of a finished call's first choice."""
    first = call.generations[0]
    reply = {
        "token_ids": first.ids,
        "logprobs": first.logprobs,
        "weight_version": first.weight_version,
        "usage": {"completion_tokens": sum(len(generation.ids) for generation in call.generations)},
    }
    if call.coordinates is not None:
        reply["capture"] = coordinates_to_json(call.coordinates)
    return reply


def _reason(call: WorkerCall, choice: int, message: dict[str, Any]) -> str | None:
    return "tool_calls" if "tool_calls" in message else call.generations[choice].finish_reason


def _chunk(call: WorkerCall, choice: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {
        "id": call.response_id,
        "object": "chat.completion.chunk",
        "model": call.asked.model,
        "choices": [{"index": choice, "delta": delta, "finish_reason": reason}],
    }


def _last_chunk(call: WorkerCall, choice: int) -> dict[str, Any]:
    """The end of a choice: its tool calls; that of the first has the coordinates."""
    message = call.message(choice)
    calls = [{"index": index, **each} for index, each in enumerate(message.get("tool_calls", ()))]
    chunk = _chunk(call, choice, {"tool_calls": calls} if calls else {}, _reason(call, choice, message))
    return {**chunk, **_generated(call), "message": message} if choice == 0 else chunk
