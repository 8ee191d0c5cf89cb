"""GenerationService over a real server: what is refused, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.auth import Authenticator, Role, TokenFile, TokenSource, TokenValue
from gym_ckpt_grpc.capture import GenerationServer, GrpcGenerationBackend, tokens_digest
from gym_ckpt_grpc.control import (
    Budget,
    CutDisposition,
    CutEvidence,
    error_from,
    open_channel,
)
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    InvalidArgument,
    OutOfTime,
    PermissionDenied,
    Unauthenticated,
    WorkerUnavailable,
)
from gymckpt.v1 import generation_pb2 as pb
from gymckpt.v1 import generation_pb2_grpc
from tests.capture.scripted_engine import DIGEST, Worker, sweep_of, worker


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Worker]:
    async with worker(tmp_path / "tokens") as served:
        yield served


async def refusal(call: Any) -> ControlError:
    """The typed error of a call that must fail."""

    async def ended() -> None:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ended()
    error = error_from(caught.value)
    assert error is not None, caught.value
    return error


def call_message(**changes: Any) -> pb.GenerationCall:
    values: dict[str, Any] = {"ticket_id": "t", "model_call_id": "c", "request_digest": DIGEST}
    return pb.GenerationCall(**{"episode": {"rollout_id": "r1"}, **values, **changes})


def cuts_message(*calls: pb.GenerationCall, **changes: Any) -> pb.CutGenerationsRequest:
    return pb.CutGenerationsRequest(
        **{"checkpoint_id": "ck", "service": "policy", "closing": 1, "sweep": 1, "calls": calls, **changes}
    )


def reference(**changes: Any) -> pb.CutReference:
    return pb.CutReference(**{"cut_id": "k", "staging_keys": ["a"], "prefix_digest": DIGEST, **changes})


BAD: list[tuple[Any, list[str]]] = [
    (cuts_message(closing=0, sweep=0), ["closing", "sweep"]),
    (cuts_message(checkpoint_id="a/b", service=""), ["checkpoint_id", "service"]),
    (cuts_message(call_message(), call_message(ticket_id="u"), call_message()), ["calls[2].ticket_id"]),
    (
        cuts_message(call_message(ticket_id="", model_call_id="é" * 65)),
        ["calls[0].ticket_id", "calls[0].model_call_id"],
    ),
    (cuts_message(call_message(), call_message(ticket_id="u", episode=None)), ["calls[1].episode"]),
    (cuts_message(call_message(episode={"rollout_id": "r-a1"})), ["calls[0].episode.rollout_id"]),
    (cuts_message(call_message(episode={"rollout_id": "r", "attempt": 2**32 - 1})), ["calls[0].episode.attempt"]),
    (cuts_message(call_message(request_digest="AB" * 32)), ["calls[0].request_digest"]),
    (cuts_message(call_message(age={"seconds": -1})), ["calls[0].age"]),
    (pb.CheckCutsRequest(cuts=[reference(), reference(cut_id="")]), ["cuts[1].cut_id"]),
    (pb.CheckCutsRequest(cuts=[reference(staging_keys=[])]), ["cuts[0].staging_keys"]),
    (
        pb.CheckCutsRequest(cuts=[reference(staging_keys=["a", "a"], prefix_digest="")]),
        ["cuts[0].prefix_digest", "cuts[0].staging_keys"],
    ),
    (pb.CheckCutsRequest(cuts=[reference()] * 4097), ["cuts"]),
    (pb.ReleaseCutsRequest(cut_ids=["a", "x" * 257]), ["cut_ids[1]"]),
    (pb.ReleaseCutsRequest(cut_ids=["a"] * 4097), ["cut_ids"]),
]


@pytest.mark.parametrize(
    ("request_", "fields"), BAD, ids=lambda value: "-".join(value) if isinstance(value, list) else ""
)
async def test_bad_fields_are_named_together(served: Worker, request_: Any, fields: list[str]) -> None:
    async with open_channel(served.server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        method = getattr(stub, type(request_).__name__.removesuffix("Request"))
        error = await refusal(method(request_, timeout=5))
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == fields
    assert served.engine.asked == []


async def test_a_call_that_changes_something_needs_a_deadline(served: Worker) -> None:
    async with open_channel(served.server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        for call in (stub.CutGenerations(cuts_message()), stub.ReleaseCuts(pb.ReleaseCutsRequest())):
            error = await refusal(call)
            assert isinstance(error, InvalidArgument)
            assert [violation.field for violation in error.violations] == ["deadline"]
        assert (await stub.CheckCuts(pb.CheckCutsRequest())).presences == []


async def test_a_slow_engine_is_out_of_time(served: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a typed error, before the caller's own deadline."""

    async def never(_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(served.engine, "check", never)
    monkeypatch.setattr(served.engine, "release", never)
    async with open_channel(served.server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        assert isinstance(
            await refusal(stub.CheckCuts(pb.CheckCutsRequest(cuts=[reference()]), timeout=0.3)), OutOfTime
        )
        assert isinstance(await refusal(stub.ReleaseCuts(pb.ReleaseCutsRequest(cut_ids=["k"]), timeout=0.3)), OutOfTime)


# ---- who may ask


async def stranger(token: str | None, served: Worker) -> None:
    """Ask for each RPC with this token; the first refusal is raised, and all must be alike."""
    source = None if token is None else TokenValue(token)
    backend = GrpcGenerationBackend("inference-0", served.server.address, token=source)
    sweep = backend.cut(sweep_of(["a"]), Budget(5))
    cut = CutEvidence("k", ("cuts/r1/c/k",), 0, tokens_digest(()), 1, 0)
    calls = (
        backend.describe(Budget(5)),
        backend.check([cut], Budget(5)),
        backend.release(["k"], Budget(5)),
        anext(sweep),
    )
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await sweep.aclose()
    await backend.close()
    refusals = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(refusals) in (0, 4)
    assert len({type(one) for one in refusals}) <= 1
    if refusals:
        raise refusals[0]


async def test_only_a_peer_may_ask(tmp_path: Path) -> None:
    """With a token from a file, which may be replaced while both run."""
    file = tmp_path / "peer.token"
    file.write_text("peer-token\n")
    peer = TokenFile(file)
    tokens: dict[Role, TokenSource] = {
        Role.PEER: peer,
        Role.CONTROLLER: TokenValue("do"),
        Role.OBSERVER: TokenValue("see"),
    }
    async with worker(tmp_path / "tokens", token=peer, authenticator=Authenticator(tokens)) as served:
        await served.engine.running("a")
        assert (await served.sweep(["a"]))["a"].disposition is CutDisposition.CUT
        file.write_text("another-token\n")
        await asyncio.to_thread(peer.refresh)
        with pytest.raises(Unauthenticated):
            await stranger("peer-token", served)
        await stranger("another-token", served)
        assert (await served.sweep(["a"]))["a"].disposition is CutDisposition.CUT
        for token in ("do", "see"):
            with pytest.raises(PermissionDenied):
                await stranger(token, served)
        with pytest.raises(Unauthenticated):
            await stranger(None, served)


async def test_a_unix_socket_serves_too(tmp_path: Path) -> None:
    async with worker(tmp_path / "tokens", address=f"unix:{tmp_path}/s") as served:
        await served.engine.running("a")
        assert (await served.sweep(["a"]))["a"].disposition is CutDisposition.CUT


async def test_a_new_process_at_the_address_is_found(tmp_path: Path) -> None:
    """By a client whose connection died with the old one."""
    path = f"unix:{tmp_path}/s"
    async with worker(tmp_path / "tokens", address=path) as first:
        backend = GrpcGenerationBackend("inference-0", path)
        assert (await backend.describe(Budget(5))).incarnation_id == "life-1"
        await first.server.stop(0)
        with pytest.raises(WorkerUnavailable):
            await backend.describe(Budget(5))
        second = GenerationServer(first.engine, path)
        await second.start()
        assert (await backend.describe(Budget(5))).incarnation_id == "life-1"
        await backend.close()
        await second.stop(0)
