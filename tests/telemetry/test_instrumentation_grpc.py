"""What `opentelemetry-instrumentation-grpc` gets wrong for us, one test each, with ours right on the same call; and
what it gets right, which we use.

A test that fails here after an upgrade tells that a fault is mended: then ours may go.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, StatusCode

import gym_ckpt_grpc
from gym_ckpt_grpc.protocol.errors import InvalidPhase
from tests.control.scripted import eventually
from tests.telemetry.foreign import Foreign
from tests.telemetry.kept import Kept
from tests.telemetry.rpc_rig import (
    SERVICE,
    Echo,
    call,
    client_side,
    echoing,
    errors_side,
    finish,
    name_of,
    server_side,
    serving,
)

UNARY, STREAM = "unary_unary", "unary_stream"
CODE = "rpc.grpc.status_code"


async def reaches(
    kept: Kept, echo: Echo, client: Any, arity: str, leave: Callable[[asyncio.Task[Any], Any], None]
) -> bool:
    """Whether the cancelling of a call reaches the server."""
    echo.act = echo.hang
    async with echoing(echo, kept.telemetry, client=client) as channel:
        begun = call(channel, arity, timeout=30)
        waiting = asyncio.create_task(finish(begun, arity))
        await asyncio.wait_for(echo.entered.wait(), 10)
        leave(waiting, begun)
        await asyncio.gather(waiting, return_exceptions=True)
        for _ in range(100):
            if echo.cancelled.is_set():
                break
            await asyncio.sleep(0.005)
        return echo.cancelled.is_set()


# ---- wrong ----------------------------------------------------------------------------------------------------


async def test_their_client_keeps_cancellation_from_the_server() -> None:
    """It awaits the call's status inside the interceptor: a caller that goes away cancels that wait alone. Its span
    is never ended."""
    theirs, kept = Foreign(), Kept()

    def leave(waiting: asyncio.Task[Any], begun: Any) -> None:
        waiting.cancel()

    assert not await reaches(kept, Echo(), theirs.client(), UNARY, leave)
    gc.collect()
    assert theirs.spans == ()

    assert await reaches(kept, Echo(), client_side(kept.telemetry), UNARY, leave)
    await eventually(lambda: SpanKind.CLIENT in [span.kind for span in kept.spans])
    kept.all_ended()


async def test_their_client_calls_a_cancelled_stream_ok() -> None:
    """Its span ends with status 0 and no error."""
    theirs, kept = Foreign(), Kept()

    def leave(waiting: asyncio.Task[Any], begun: Any) -> None:
        waiting.cancel()

    await reaches(kept, Echo(), theirs.client(), STREAM, leave)
    assert [(span.attributes[CODE], span.status.status_code) for span in theirs.spans] == [(0, StatusCode.UNSET)]  # type: ignore[index]

    await reaches(kept, Echo(), client_side(kept.telemetry), STREAM, leave)
    await eventually(lambda: SpanKind.CLIENT in [span.kind for span in kept.spans])
    ours = next(span for span in kept.spans if span.kind is SpanKind.CLIENT)
    assert ours.attributes["rpc.response.status_code"] == "CANCELLED"  # type: ignore[index]
    assert ours.status.status_code is StatusCode.ERROR


async def served(interceptor: Any, act: Any, kept: Kept) -> None:
    """One call of a server with this interceptor, inside the errors interceptor."""
    echo = Echo()
    echo.act = act
    async with echoing(echo, kept.telemetry, server=[errors_side(kept.telemetry), interceptor]) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(channel, UNARY)


async def test_their_server_calls_abort_with_status_ok() -> None:
    """Only `abort` and `set_code` are looked at."""
    theirs, kept = Foreign(), Kept()

    class Status:
        code, details, trailing_metadata = grpc.StatusCode.DATA_LOSS, "half of it", ()

    async def abort(context: Any) -> None:
        await context.abort_with_status(Status())

    await served(theirs.server(), abort, kept)
    assert [span.attributes[CODE] for span in theirs.spans] == [0]  # type: ignore[index]
    assert [span.status.status_code for span in theirs.spans] == [StatusCode.UNSET]

    await served(server_side(kept.telemetry), abort, kept)
    server = next(span for span in kept.spans if span.kind is SpanKind.SERVER)
    assert server.attributes["rpc.response.status_code"] == "DATA_LOSS"  # type: ignore[index]
    assert server.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("error", [InvalidPhase("secret-text"), OSError("secret-text")])
async def test_their_server_calls_typed_errors_ok_and_tells_their_text(error: Exception) -> None:
    """Where an interceptor further out makes the status. The text of an error may quote what was sent."""
    theirs, kept = Foreign(), Kept()

    async def refuse(context: Any) -> None:
        raise error

    await served(theirs.server(), refuse, kept)
    assert theirs.spans[0].attributes[CODE] == 0  # type: ignore[index]
    assert "secret-text" in str([dict(event.attributes or {}) for event in theirs.spans[0].events])

    await served(server_side(kept.telemetry), refuse, kept)
    server = next(span for span in kept.spans if span.kind is SpanKind.SERVER)
    assert server.attributes["rpc.response.status_code"] != "OK"  # type: ignore[index]
    assert "secret-text" not in server.to_json()


async def test_their_server_calls_a_cancelled_call_ok() -> None:
    """The handler's cancellation is not looked at."""
    theirs, kept = Foreign(), Kept()

    async def leave_early(interceptor: Any) -> None:
        echo = Echo()
        echo.act = echo.hang
        async with echoing(echo, kept.telemetry, server=[interceptor]) as channel:
            begun = call(channel, UNARY)
            await echo.entered.wait()
            begun.cancel()
            await asyncio.wait_for(echo.cancelled.wait(), 10)

    await leave_early(theirs.server())
    assert [span.attributes[CODE] for span in theirs.spans] == [0]  # type: ignore[index]
    await leave_early(server_side(kept.telemetry))
    servers = [span for span in kept.spans if span.kind is SpanKind.SERVER]
    assert [span.attributes["rpc.response.status_code"] for span in servers] == ["CANCELLED"]  # type: ignore[index]


async def test_their_server_logs_streams_that_are_closed_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """grpc leaves a stream whose client has gone to the collector; the loop closes it in a task of its own, where
    the context of the first cannot be put back."""

    async def endless(request: Any, context: Any) -> AsyncIterator[int]:
        while True:
            yield 1

    async def continuation(details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(endless)

    class Details:
        method = f"/{SERVICE}/{STREAM}"
        invocation_metadata = ()

    class Context:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

    async def abandon(interceptor: Any) -> str:
        caplog.clear()
        handler = await interceptor.intercept_service(continuation, Details())

        async def read_one() -> None:
            await anext(handler.unary_stream(None, Context()))

        await asyncio.create_task(read_one())
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return caplog.text

    caplog.set_level(logging.DEBUG, "opentelemetry")
    assert "Failed to detach context" in await abandon(Foreign().server())
    kept = Kept()
    assert await abandon(server_side(kept.telemetry)) == ""
    kept.all_ended()


async def test_theirs_do_not_speak_the_stable_conventions() -> None:
    """Old attribute names, a number for the status, half a method name, no metrics; and a name with a slash."""
    theirs, kept = Foreign(), Kept()
    async with echoing(Echo(), kept.telemetry, server=[theirs.server()], client=theirs.client()) as channel:
        await call(channel, UNARY)
    await eventually(lambda: len(theirs.spans) == 2)
    for span in theirs.spans:
        assert span.attributes is not None
        assert span.name == f"/{SERVICE}/{UNARY}"
        assert (span.attributes["rpc.system"], span.attributes["rpc.method"]) == ("grpc", UNARY)
        assert not {"rpc.system.name", "rpc.response.status_code"} & set(span.attributes)

    async with echoing(Echo(), kept.telemetry) as channel:
        await call(channel, UNARY)
    await eventually(lambda: len(kept.of(name_of(UNARY))) == 2)
    for span in kept.spans:
        assert span.attributes == {
            "rpc.system.name": "grpc",
            "rpc.method": name_of(UNARY),
            "rpc.response.status_code": "OK",
        }


async def test_their_client_sends_what_the_global_propagator_says() -> None:
    """With it the baggage, which is the caller's own business."""
    theirs, kept, echo = Foreign(), Kept(), Echo()
    attached = otel_context.attach(baggage.set_baggage("account", "secret"))
    try:
        for client in (theirs.client(), client_side(kept.telemetry)):
            async with echoing(echo, kept.telemetry, client=client) as channel:
                await call(channel, UNARY)
    finally:
        otel_context.detach(attached)
    assert ["baggage" in sent for sent in echo.metadata] == [True, False]


# ---- right, and used ------------------------------------------------------------------------------------------


def sync_call(address: str, theirs: Foreign, arity: str = UNARY, metadata: Any = None) -> bytes:
    """One call of a synchronous client with their interceptor, as the page on telemetry shows it."""
    with grpc.insecure_channel(address) as plain:
        method = getattr(theirs.synchronous(plain), arity)(f"/{SERVICE}/{arity}")
        answer = method(b"ab", timeout=10, metadata=metadata)
        return b"".join(answer) if arity == STREAM else bytes(answer)


@pytest.mark.parametrize("arity", [UNARY, STREAM])
async def test_their_synchronous_client_continues_its_trace_in_our_servers(arity: str) -> None:
    """For trainers that call with a synchronous stub: one trace, statuses right, errors passed on."""
    theirs, kept, echo = Foreign(), Kept(), Echo()
    async with serving(echo, [errors_side(kept.telemetry), server_side(kept.telemetry)]) as address:
        await asyncio.to_thread(sync_call, address, theirs, arity)

        async def refuse(context: Any) -> None:
            raise InvalidPhase("no")

        echo.act = refuse
        with pytest.raises(grpc.RpcError) as failed:
            await asyncio.to_thread(sync_call, address, theirs, arity)
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await eventually(lambda: len(kept.spans) == 2)
    for client, server in zip(theirs.spans, kept.spans, strict=True):
        assert server.parent is not None
        assert server.parent.span_id == client.context.span_id
        assert server.parent.trace_id == client.context.trace_id
    assert [span.status.status_code for span in theirs.spans] == [StatusCode.UNSET, StatusCode.ERROR]
    assert [span.attributes[CODE] for span in theirs.spans] == [0, 9]  # type: ignore[index]


async def test_their_synchronous_client_loses_repeated_metadata() -> None:
    """One of two faults of it that we know: of two entries with one name it sends the last. None of ours repeats."""
    theirs, echo = Foreign(), Echo()
    got: list[Any] = []

    async def note(context: Any) -> None:
        got.extend(value for name, value in context.invocation_metadata() if name == "x")

    echo.act = note
    twice = (("x", "1"), ("x", "2"))
    async with serving(echo, []) as address:
        await asyncio.to_thread(sync_call, address, theirs, UNARY, twice)
    assert got == ["2"]
    got.clear()
    kept = Kept()
    async with echoing(echo, kept.telemetry) as channel:
        await call(channel, UNARY, metadata=twice)
    assert got == ["1", "2"]


async def test_their_synchronous_streams_are_bare_generators() -> None:
    """The other one: such a stream cannot be cancelled by its call. It ends where it is no longer read."""
    theirs, echo = Foreign(), Echo()

    def begin(address: str) -> None:
        with grpc.insecure_channel(address) as plain:
            channels: list[tuple[Any, str]] = [(plain, "cancel"), (theirs.synchronous(plain), "close")]
            for channel, end in channels:
                begun = channel.unary_stream(f"/{SERVICE}/{STREAM}")(b"ab", timeout=10)
                assert next(begun) == b"ab"
                assert hasattr(begun, "cancel") == (end == "cancel")
                getattr(begun, end)()

    async with serving(echo, []) as address:
        await asyncio.to_thread(begin, address)
    assert [span.name for span in theirs.spans] == [f"/{SERVICE}/{STREAM}"]


# ---- nothing is instrumented globally ---------------------------------------------------------------------------


def test_importing_and_using_us_changes_nothing_of_the_process() -> None:
    """grpc is as it was, no provider or propagator is set, no instrumentation is loaded."""
    program = """
import asyncio, sys
import grpc, grpc.aio
import opentelemetry.propagate as propagate
from opentelemetry import metrics, trace
names = ("server", "insecure_channel", "secure_channel", "intercept_channel")
def state():
    return (
        [getattr(grpc, name) for name in names],
        [getattr(grpc.aio, name) for name in names if hasattr(grpc.aio, name)],
        propagate.get_global_textmap(),
        trace._TRACER_PROVIDER, metrics._internal._METER_PROVIDER,
    )
before = state()
import gym_ckpt_grpc
from gym_ckpt_grpc import control, coordinator, participants, telemetry
from gym_ckpt_grpc.telemetry import default_telemetry
from tests.telemetry.rpc_rig import Echo, call, echoing
async def main():
    async with echoing(Echo(), default_telemetry()) as channel:
        assert await call(channel, "unary_unary") == b"ab"
asyncio.run(main())
assert state() == before, (state(), before)
assert not [name for name in sys.modules if name.startswith("opentelemetry.instrumentation")]
assert "opentelemetry.sdk.trace" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_global_instrumentor_is_nowhere_used() -> None:
    """No module of ours patches grpc, and no test has left a provider behind."""
    for path in Path(gym_ckpt_grpc.__path__[0]).rglob("*.py"):
        assert ".instrument(" not in path.read_text(), path
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)
