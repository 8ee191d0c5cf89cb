"""Whatever is sent to a participant is answered with a typed refusal or a legal reply, and it keeps serving."""

from __future__ import annotations

import gc
import itertools
import os
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from gym_ckpt_grpc.control import error_from, wire
from gym_ckpt_grpc.protocol import EpisodeId
from gym_ckpt_grpc.protocol.errors import ERRORS
from gym_ckpt_grpc.protocol.ids import EpisodeScope
from gym_ckpt_grpc.testing import FakeOwner, Served, serve
from gymckpt.v1 import participant_pb2 as pb
from tests.fuzz.requests import DEADLINES, odd_bytes, odd_metadata

SHORT, LONG = int(os.environ.get("GYM_CKPT_FUZZ", "1000")), 20_000
MAX_TEXT, MAX_DETAILS = 1024, 6 * 1024
CORE_REFUSALS = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
"""What the core says by itself: a call without time, or headers over its limit."""
GROWTH = 1.05
"""Memory after the second half, over that after the first."""
MAY_GROW = 200_000
"""Bytes below which a difference is noise of the interpreter: caches, interned strings, the test itself."""

SERVICE = pb.DESCRIPTOR.services_by_name["ParticipantService"]
_numbers = itertools.count()
METHODS = sorted(method.name for method in SERVICE.methods)


def valid_request(method: str, served: Served) -> Message:
    """A request that is legal in some phase."""
    context = pb.ControlContext(checkpoint_id="c1", controller_id="fuzz", epoch=1)
    episodes = wire.episode_list([EpisodeId("a"), EpisodeId("b")])
    scope = wire.scope_to(EpisodeScope.of([EpisodeId("a")]))
    uri = served.client.uri("c1")
    requests: dict[str, Message] = {
        "GetStatus": pb.GetStatusRequest(),
        "WatchStatus": pb.WatchStatusRequest(),
        "Prepare": pb.PrepareRequest(context=context, ready_within=wire.duration(0.01), lease_ttl=wire.duration(30)),
        "Capture": pb.CaptureRequest(context=context, scope=scope),
        "Commit": pb.CommitRequest(context=context, scope=scope, storage_uri=uri),
        "Resume": pb.ResumeRequest(context=context),
        "Restore": pb.RestoreRequest(
            context=context, storage_uri=uri, source_checkpoint_id="c1", scope=episodes, lease_ttl=wire.duration(30)
        ),
        "Retire": pb.RetireRequest(context=context, episodes=episodes),
        "Forget": pb.ForgetRequest(context=context, rollouts=[pb.ForgetRollout(rollout_id="a")]),
        "RenewLease": pb.RenewLeaseRequest(context=context),
        "ListEpisodes": pb.ListEpisodesRequest(kind=pb.EPISODE_LIST_KIND_RETIRED),
    }
    return requests[method]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    owner = FakeOwner()
    async with serve(owner, roots=[tmp_path]) as running:
        yield running


async def send_once(served: Served, method: str, rng: random.Random) -> None:
    """Send one odd request and judge its answer."""
    path = f"/{SERVICE.full_name}/{method}"
    raw = odd_bytes(lambda: valid_request(method, served), rng)
    timeout = rng.choice(DEADLINES)
    if timeout is None and method == "WatchStatus":
        timeout = 0.05  # a watch without a deadline lasts for ever, as it should
    metadata = odd_metadata(rng)
    try:
        if SERVICE.methods_by_name[method].server_streaming:
            call: Any = served.channel.unary_stream(path)(raw, timeout=timeout, metadata=metadata)
            async for _ in call:
                if method == "WatchStatus":
                    call.cancel()
                    break
        else:
            await served.channel.unary_unary(path)(raw, timeout=timeout, metadata=metadata)
    except grpc.aio.AioRpcError as failure:
        judge(failure, raw)


def judge(failure: grpc.aio.AioRpcError, raw: bytes) -> None:
    """A refusal is typed and small, or it is one of the core's own."""
    text, details = failure.details() or "", b""
    for key, value in failure.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            details = value if isinstance(value, bytes) else value.encode()
    assert len(text.encode()) <= MAX_TEXT, text[:200]
    assert len(details) <= MAX_DETAILS
    assert "Traceback" not in text
    error = error_from(failure)
    if error is None:
        assert failure.code() in CORE_REFUSALS, (failure, raw[:200])
        return
    assert failure.code().name == ERRORS[error.code].grpc_status
    assert error.code.name != "INTERNAL", (failure, raw[:200])


async def run(served: Served, method: str, count: int, rng: random.Random) -> None:
    """Send so many, with a checkpoint open half of the time."""
    for number in range(count):
        if number % 20 == 0:
            await settle(served, f"between-{next(_numbers)}", leave_open=number % 40 == 0)
        await send_once(served, method, rng)


async def settle(served: Served, id: str, *, leave_open: bool) -> None:
    """Resume whatever is open under its own epoch, and open a checkpoint of ours or none."""
    status = await served.client.status()
    epoch = status.highest_epoch
    if status.active_checkpoint_id:
        await served.client.resume(status.active_checkpoint_id, epoch=epoch, controller="fuzz")
    if leave_open:
        await served.client.prepare(id, epoch=epoch, controller="fuzz", within=0.01)


async def still_works(served: Served) -> None:
    """It answers, opens, and takes a whole checkpoint."""
    await settle(served, "", leave_open=False)
    epoch = (await served.client.status()).highest_epoch
    assert (await served.client.status()).phase == pb.PHASE_IDLE
    reply = await served.client.prepare("after-all", epoch=epoch, within=2.0)
    assert reply.phase == pb.PHASE_PREPARED
    await served.client.commit("after-all", [], epoch=epoch)
    await served.client.resume("after-all", epoch=epoch)


async def fuzz(served: Served, method: str, count: int, rng: random.Random) -> None:
    """Two halves; the second must not have made it grow."""
    seed = rng.randrange(2**32)
    print(f"{method}: seed {seed}")
    measured: list[int] = []
    tracemalloc.start()
    try:
        for half in range(2):
            await run(served, method, count // 2, random.Random(seed + half))
            await settle(served, "", leave_open=False)
            gc.collect()
            measured.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert measured[1] <= measured[0] * GROWTH + MAY_GROW, measured
    await still_works(served)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("method", METHODS)
async def test_every_answer_is_typed_and_it_keeps_serving(method: str, served: Served, rng: random.Random) -> None:
    """A thousand odd requests of each RPC."""
    await fuzz(served, method, SHORT, rng)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS)
async def test_every_answer_is_typed_for_long(method: str, served: Served, rng: random.Random) -> None:
    """Twenty thousand of each."""
    await fuzz(served, method, LONG, rng)


async def test_a_message_over_the_limit_is_refused_by_the_core_with_the_limit(served: Served) -> None:
    """64 MiB and a little: a bare RESOURCE_EXHAUSTED whose text has the limit."""
    send: Callable[..., Any] = served.channel.unary_unary(f"/{SERVICE.full_name}/Forget")
    options_limit = 64 * 1024 * 1024
    async with grpc.aio.insecure_channel(served.address, options=(("grpc.max_send_message_length", -1),)) as wide:
        send = wide.unary_unary(f"/{SERVICE.full_name}/Forget")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await send(b"\0" * (options_limit + 1), timeout=30)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(options_limit) in (refused.value.details() or "")
    assert error_from(refused.value) is None
    await still_works(served)
