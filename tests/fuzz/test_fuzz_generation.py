"""Fuzzed requests of GenerationService: typed refusals or legal replies, and a worker that is as good as new."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue
from gym_ckpt_grpc.control import CutDisposition
from gymckpt.v1 import generation_pb2 as pb
from tests.capture.scripted_engine import DIGEST, Worker, worker
from tests.conftest import SEED_VARIABLE
from tests.fuzz.answers import MAX_REPLY, check_failure
from tests.fuzz.requests import BIG, TOKEN, Fuzzer, Request

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
METHODS = [method.name for method in SERVICE.methods]
REQUESTS = int(os.environ.get("GYM_CKPT_FUZZ_REQUESTS", "1000"))
AT_ONCE = 16
KNOWN = 6
"""Calls that the worker has, half of them finished."""
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0)]


class GenerationFuzzer(Fuzzer):
    """Requests about a few calls that there are and a few that are not."""

    def _valid(self, method: str) -> Message:
        request: Any = getattr(pb, f"{method}Request")()
        names = self.random.sample([f"c{number}" for number in range(2 * KNOWN)], self.random.randrange(1, 5))
        if method == "CutGenerations":
            request.checkpoint_id, request.service, request.closing, request.sweep = self.current, "policy", 1, 1
            for name in names:
                request.calls.add(ticket_id=name, model_call_id=name, request_digest=DIGEST).episode.rollout_id = "r1"
        elif method == "CheckCuts":
            for name in names:
                request.cuts.add(cut_id=name, staging_keys=[f"r1/{name}"], prefix_tokens=2, prefix_digest=DIGEST)
        elif method == "ReleaseCuts":
            request.cut_ids.extend(names)
        return request  # type: ignore[no-any-return]

    def _swell(self, message: Any) -> None:
        if hasattr(message, "calls"):
            for number in range(BIG // 10):
                message.calls.add(ticket_id=f"b{number}", model_call_id="c1", request_digest=DIGEST)
        for name in ("cuts", "cut_ids"):
            for number in range(BIG if hasattr(message, name) else 0):
                getattr(message, name).append(pb.CutReference(cut_id="k") if name == "cuts" else f"k{number}")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check_stream(request: Request, bodies: list[bytes]) -> None:
    """A header, then one acknowledgement for each call, at most 256 in a message."""
    sent = pb.CutGenerationsRequest.FromString(request.body)
    parts = [pb.CutGenerationsResponse.FromString(body) for body in bodies]
    assert [part.WhichOneof("part") for part in parts] == ["header", *["acks"] * (len(parts) - 1)]
    assert all(1 <= len(part.acks.acks) <= 256 for part in parts[1:])
    acks = [ack for part in parts for ack in part.acks.acks]
    assert sorted(ack.call.ticket_id for ack in acks) == sorted(call.ticket_id for call in sent.calls)
    for ack in acks:
        durable = CutDisposition(ack.disposition) in (CutDisposition.CUT, CutDisposition.FINISHED)
        assert ack.HasField("evidence") is durable


def check_reply(request: Request, body: bytes) -> None:
    sent: Any = getattr(pb, f"{request.method}Request").FromString(request.body)
    reply: Any = getattr(pb, f"{request.method}Response").FromString(body)
    assert len(body) <= MAX_REPLY
    if request.method == "CheckCuts":
        assert len(reply.presences) == len(sent.cuts)
    if request.method == "ReleaseCuts":
        assert request.timeout is not None
        assert len(reply.states) == len(sent.cut_ids)


async def send(channel: grpc.aio.Channel, request: Request) -> str:
    """Make one call; gives what it came to."""
    path = f"/{SERVICE.full_name}/{request.method}"
    try:
        if request.method == "CutGenerations":
            stream: Any = channel.unary_stream(path)
            bodies = stream(request.body, timeout=request.timeout, metadata=request.metadata)
            check_stream(request, [body async for body in bodies])
            assert request.timeout is not None
        else:
            unary: Any = channel.unary_unary(path)
            check_reply(request, await unary(request.body, timeout=request.timeout, metadata=request.metadata))
    except grpc.aio.AioRpcError as failure:
        return check_failure(request, failure, "")
    assert request.valid, f"{request.method} was obeyed without credentials"
    return "ok"


async def storm(served: Worker, fuzzer: GenerationFuzzer, method: str) -> collections.Counter[str]:
    """All requests of one RPC, a few at a time."""
    numbers, seen = iter(range(REQUESTS)), collections.Counter[str]()
    async with grpc.aio.insecure_channel(served.server.address, options=OPTIONS) as channel:

        async def sender() -> None:
            for number in numbers:
                seen[await send(channel, fuzzer.request(method, number))] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(sender())
    return seen


@pytest.mark.behaviour("P157")
@pytest.mark.parametrize("method", METHODS)
async def test_fuzzed_requests(method: str, tmp_path: Path) -> None:
    peer = TokenValue(TOKEN)
    authenticator = Authenticator({Role.PEER: peer})
    fuzzer = GenerationFuzzer(f"{os.environ[SEED_VARIABLE]} {method}", tmp_path)
    async with worker(tmp_path / "tokens", token=peer, authenticator=authenticator) as served:
        for number in range(KNOWN):
            await (served.engine.running if number % 2 else served.engine.finished)(f"c{number}")
        seen = await storm(served, fuzzer, method)
        assert seen["ok"] > 0
        assert seen["UNAUTHENTICATED"] > 0
        assert method == "GetBackend" or seen["INVALID_ARGUMENT"] > 0
        acks = await served.sweep([f"c{number}" for number in range(KNOWN + 1)])
        kinds = [acks[f"c{number}"].disposition.name for number in range(KNOWN + 1)]
        assert kinds == ["FINISHED", "CUT"] * (KNOWN // 2) + ["NOT_FOUND"]
