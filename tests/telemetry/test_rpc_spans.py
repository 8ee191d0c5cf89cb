"""RPC spans: one per side and call, whatever becomes of the call, by the stable RPC conventions."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue, token_interceptors
from gym_ckpt_grpc.auth.roles import ROLES
from gym_ckpt_grpc.control import error_from
from gym_ckpt_grpc.control.authenticating import AuthServerInterceptor
from gym_ckpt_grpc.protocol.errors import ERRORS, InvalidPhase, StateNotFound, Unauthenticated
from gym_ckpt_grpc.telemetry import catalogue
from tests.control.scripted import eventually
from tests.telemetry.foreign import Foreign
from tests.telemetry.kept import Kept
from tests.telemetry.rpc_rig import (
    ARITIES,
    SERVICE,
    Echo,
    call,
    client_side,
    echoing,
    errors_side,
    finish,
    name_of,
    server_side,
)


def side(kept: Kept, kind: SpanKind) -> list[ReadableSpan]:
    """The ended RPC spans of one side."""
    return [span for span in kept.spans if span.kind is kind]


async def two_sides(kept: Kept, count: int = 1) -> tuple[ReadableSpan, ReadableSpan]:
    """The last (client, server) spans of so many calls."""
    for kind in (SpanKind.CLIENT, SpanKind.SERVER):
        await eventually(lambda kind=kind: len(side(kept, kind)) >= count)  # type: ignore[misc]
    clients, servers = side(kept, SpanKind.CLIENT), side(kept, SpanKind.SERVER)
    assert len(clients) == len(servers) == count
    return clients[-1], servers[-1]


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_call_that_succeeds(arity: str) -> None:
    """A client span, a server span under it, and the handler inside that."""
    kept, echo = Kept(), Echo()
    async with echoing(echo, kept.telemetry) as channel:
        assert len(await finish(call(channel, arity), arity)) >= 2
        client, server = await two_sides(kept)
    for span in (client, server):
        assert span.name == name_of(arity)
        assert span.attributes == {
            "rpc.system.name": "grpc",
            "rpc.method": name_of(arity),
            "rpc.response.status_code": "OK",
        }
        assert span.status.status_code is StatusCode.UNSET
    assert server.parent is not None
    assert server.parent.is_remote
    assert server.parent.span_id == client.context.span_id
    assert client.parent is None
    assert echo.seen[0].span_id == server.context.span_id
    kept.all_ended()
    kept.check_declared()
    for which in ("server", "client"):
        assert kept.value(catalogue.RPC_DURATION[which], **{"rpc.response.status_code": "OK"}) == 1


@pytest.mark.behaviour("C305")
@pytest.mark.parametrize("arity", ARITIES)
@pytest.mark.parametrize(
    ("error", "status", "server_fault"),
    [(InvalidPhase("no"), "FAILED_PRECONDITION", False), (OSError("secret-text"), "INTERNAL", True)],
)
async def test_a_call_that_fails(arity: str, error: Exception, status: str, server_fault: bool) -> None:
    """An error of the client for every status, of the server where the conventions say so; its text is not told."""
    kept, echo = Kept(), Echo()

    async def refuse(context: Any) -> None:
        raise error

    echo.act = refuse
    async with echoing(echo, kept.telemetry) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await finish(call(channel, arity), arity)
        client, server = await two_sides(kept)
    assert client.attributes is not None
    assert server.attributes is not None
    assert client.attributes["rpc.response.status_code"] == server.attributes["rpc.response.status_code"] == status
    assert client.status.status_code is StatusCode.ERROR
    assert client.attributes["error.type"] == status
    assert (server.status.status_code is StatusCode.ERROR) == server_fault
    assert server.attributes.get("error.type") == (status if server_fault else None)
    assert "secret" not in repr([(s.attributes, s.status.description, s.events) for s in kept.spans])
    kept.all_ended()
    kept.check_declared()
    failed = {"rpc.response.status_code": status, "error.type": status}
    assert kept.value(catalogue.RPC_DURATION["client"], **failed) == 1
    assert kept.value(catalogue.RPC_DURATION["server"], **failed) == server_fault
    assert kept.value(catalogue.CONTROL_ERRORS) == 1


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_caller_that_goes_away(arity: str) -> None:
    """CANCELLED on both sides, and the handler is cancelled."""
    kept, echo = Kept(), Echo()
    echo.act = echo.hang
    async with echoing(echo, kept.telemetry) as channel:
        waiting = asyncio.create_task(finish(call(channel, arity), arity))
        await asyncio.wait_for(echo.entered.wait(), 10)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(echo.cancelled.wait(), 10)
        client, server = await two_sides(kept)
    for span in (client, server):
        assert span.attributes is not None
        assert span.attributes["rpc.response.status_code"] == "CANCELLED"
    assert client.status.status_code is StatusCode.ERROR
    kept.all_ended()


async def test_a_thousand_calls_half_of_which_are_cancelled() -> None:
    """Each span that began has ended, each cancel reaches the server, and nothing of a call is kept."""
    kept, echo = Kept(), Echo()

    async def every_other(context: Any) -> None:
        if len(echo.seen) % 2:
            await echo.hang(context)

    echo.act = every_other
    async with echoing(echo, kept.telemetry) as channel:
        for index in range(1000):
            arity = ("unary_unary", "unary_stream")[index // 2 % 2]
            begun = call(channel, arity)
            waiting = asyncio.create_task(finish(begun, arity))
            if index % 2 == 0:
                echo.entered.clear()
                await asyncio.wait_for(echo.entered.wait(), 10)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            else:
                await waiting
            del begun, waiting
        await eventually(lambda: echo.calls_cancelled == 500)
        await two_sides(kept, 1000)
        kept.all_ended()
        gc.collect()
        ours = [found for found in gc.get_objects() if type(found).__name__ == "_Call"]
        assert len(ours) <= 2, "calls are kept after their end"
    statuses = [span.attributes["rpc.response.status_code"] for span in kept.spans if span.attributes]
    assert (statuses.count("OK"), statuses.count("CANCELLED")) == (1000, 1000)


async def test_a_caller_that_goes_away_before_its_call_began() -> None:
    """While an interceptor further in still works: the span ends, as cancelled."""
    kept, echo = Kept(), Echo()
    reached = asyncio.Event()

    class Slow(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            reached.set()
            await asyncio.Event().wait()

    async with echoing(echo, kept.telemetry, client=[*client_side(kept.telemetry), Slow()]) as channel:
        waiting = asyncio.create_task(finish(call(channel, "unary_unary"), "unary_unary"))
        await reached.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await eventually(lambda: len(side(kept, SpanKind.CLIENT)) == 1)
    assert side(kept, SpanKind.CLIENT)[0].attributes["rpc.response.status_code"] == "CANCELLED"  # type: ignore[index]
    assert echo.seen == []
    kept.all_ended()


async def test_an_interceptor_further_in_that_fails() -> None:
    """Such as one that has no credentials to send: the span ends, as an error."""
    kept, echo = Kept(), Echo()

    class Failing(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            raise StateNotFound("nothing to send")

    async with echoing(echo, kept.telemetry, client=[*client_side(kept.telemetry), Failing()]) as channel:
        with pytest.raises(StateNotFound):
            await call(channel, "unary_unary")
    assert side(kept, SpanKind.CLIENT)[0].attributes["error.type"] == "NOT_FOUND"  # type: ignore[index]
    kept.all_ended()


async def test_an_interceptor_further_in_that_answers_by_itself() -> None:
    """It awaits the call and gives the bare reply, which takes no callbacks: the span ends all the same."""
    kept, echo = Kept(), Echo()

    class Awaiting(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return await (await continuation(details, request))

    async with echoing(echo, kept.telemetry, client=[*client_side(kept.telemetry), Awaiting()]) as channel:
        assert await call(channel, "unary_unary") == b"ab"
        client, _ = await two_sides(kept)
    assert client.attributes["rpc.response.status_code"] == "OK"  # type: ignore[index]


async def test_a_stream_that_nobody_reads_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """grpc keeps it until its channel closes; then its spans end, and none says that its context is of another
    task."""
    kept, echo = Kept(), Echo()
    caplog.set_level(logging.DEBUG)
    async with echoing(echo, kept.telemetry) as channel:
        begun = call(channel, "stream_stream")
        await anext(aiter(begun))
        del begun
        gc.collect()
    await two_sides(kept)
    kept.all_ended()
    assert "different Context" not in caplog.text
    assert "Failed to detach" not in caplog.text


async def test_a_stream_that_the_loop_closes_in_a_task_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """As grpc leaves it to the collector when its client goes away: nothing is logged, and the span ends."""
    kept = Kept()
    closed = asyncio.Event()

    async def endless(request: Any, context: Any) -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    async def continuation(details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(endless)

    class Details:
        method = f"/{SERVICE}/unary_stream"
        invocation_metadata = ()

    handler: Any = await server_side(kept.telemetry).intercept_service(continuation, Details())  # type: ignore[arg-type]

    async def read_one() -> None:
        context: Any = None
        await anext(handler.unary_stream(None, context))  # and let go of it

    await asyncio.create_task(read_one())
    gc.collect()
    await asyncio.wait_for(closed.wait(), 10)
    await eventually(lambda: len(kept.spans) == 1)
    kept.all_ended()
    assert caplog.text == ""


async def test_a_stream_that_is_closed_early() -> None:
    """Its handler is closed there and then, in the same task: the spans inside end before the call's own."""
    kept = Kept()
    tasks: list[Any] = []

    async def endless(request: Any, context: Any) -> AsyncIterator[int]:
        try:
            with kept.telemetry.span(catalogue.READ):
                while True:
                    yield 1
        finally:
            tasks.append(asyncio.current_task())

    async def continuation(details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(endless)

    class Details:
        method = f"/{SERVICE}/unary_stream"
        invocation_metadata = ()

    handler: Any = await server_side(kept.telemetry).intercept_service(continuation, Details())  # type: ignore[arg-type]
    stream = handler.unary_stream(None, None)
    await anext(stream)
    await stream.aclose()
    assert tasks == [asyncio.current_task()]
    assert [span.name for span in kept.spans] == [catalogue.READ.name, name_of("unary_stream")]
    kept.all_ended()


async def test_each_try_of_a_call_has_a_span_of_its_own() -> None:
    """A retry is another call on the wire."""
    kept, echo = Kept(), Echo()

    async def once(context: Any) -> None:
        if len(echo.seen) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "again")

    echo.act = once
    async with echoing(echo, kept.telemetry) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(channel, "unary_unary")
        await call(channel, "unary_unary")
        await two_sides(kept, 2)
    assert [s.attributes["rpc.response.status_code"] for s in side(kept, SpanKind.CLIENT)] == ["UNAVAILABLE", "OK"]  # type: ignore[index]


async def test_a_server_that_is_not_there() -> None:
    """The client's span alone, as an error."""
    kept = Kept()
    async with grpc.aio.insecure_channel("127.0.0.1:1", interceptors=client_side(kept.telemetry)) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await call(channel, "unary_unary", timeout=5)
    assert kept.only(name_of("unary_unary")).attributes["error.type"] == "UNAVAILABLE"  # type: ignore[index]


# ---- with the other interceptors ------------------------------------------------------------------------------


def chains(kept: Kept) -> dict[str, list[Any]]:
    """Every order of the server interceptors, with and without each, and a foreign one at each place of ours."""
    made: dict[str, Any] = {
        "errors": errors_side(kept.telemetry),
        "auth": AuthServerInterceptor(Authenticator({Role.CONTROLLER: TokenValue("good")})),
        "telemetry": server_side(kept.telemetry),
        "foreign": Foreign().server(),
    }
    ours = tuple(made)[:3]
    orders = [order for count in (1, 2, 3) for order in itertools.permutations(ours, count) if "errors" in order]
    orders += [(*ours[:place], "foreign", *ours[place:]) for place in range(4)]
    return {">".join(order): [made[name] for name in order] for order in orders}


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for arity in ARITIES:
        monkeypatch.setitem(ROLES, f"/{SERVICE}/{arity}", frozenset({Role.CONTROLLER}))


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("arity", ["unary_unary", "unary_stream"])
async def test_refusals_keep_their_status_in_every_order(arity: str) -> None:
    """Field case 142: code, text and details are the same with and without auth, telemetry and foreign interceptors,
    on both sides."""
    kept, echo = Kept(), Echo()
    refusals = [row.exception("why not") for row in ERRORS.values()]
    told: dict[str, set[Any]] = {}
    for order, chain in chains(kept).items():
        ours, theirs = client_side(kept.telemetry), Foreign().client()
        token = token_interceptors(TokenValue("good"))
        clients = {"none": token, "ours": [*ours, *token]}
        if order == "errors>auth>telemetry":
            clients |= {"theirs": [*theirs, *ours, *token], "inside": [*token, *ours, *theirs]}
        for which, client in clients.items():
            async with echoing(echo, kept.telemetry, server=chain, client=client) as channel:
                for refusal in refusals:

                    async def refuse(context: Any, refusal: Exception = refusal) -> None:
                        raise refusal

                    echo.act = refuse
                    with pytest.raises(grpc.aio.AioRpcError) as failed:
                        await finish(call(channel, arity), arity)
                    typed = error_from(failed.value)
                    found = (failed.value.code(), failed.value.details(), type(typed), str(typed))
                    told.setdefault(type(refusal).__name__, set()).add(found)
                    assert type(typed) is type(refusal), (order, which)
    assert {len(found) for found in told.values()} == {1}, told
    kept.all_ended()


@pytest.mark.usefixtures("allowed")
async def test_refused_credentials_make_no_server_span() -> None:
    """They are one control error; the caller's own span is an error."""
    kept, echo = Kept(), Echo()
    chain = chains(kept)["errors>auth>telemetry"]
    async with echoing(echo, kept.telemetry, server=chain) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary_unary")
        assert isinstance(error_from(failed.value), Unauthenticated)
    assert side(kept, SpanKind.SERVER) == []
    assert side(kept, SpanKind.CLIENT)[0].attributes["error.type"] == "UNAUTHENTICATED"  # type: ignore[index]
    assert kept.value(catalogue.CONTROL_ERRORS, error_code="UNAUTHENTICATED") == 1
    assert kept.value(catalogue.RPC_DURATION["server"]) == 0
    kept.all_ended()


async def test_trailers_survive() -> None:
    """What a handler sets itself arrives."""
    kept, echo = Kept(), Echo()

    async def trail(context: Any) -> None:
        context.set_trailing_metadata((("x-trail", "1"),))
        context.set_code(grpc.StatusCode.DATA_LOSS)
        context.set_details("half of it")

    echo.act = trail
    async with echoing(echo, kept.telemetry) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary_unary")
        client, server = await two_sides(kept)
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.DATA_LOSS, "half of it")
    assert ("x-trail", "1") in [tuple(pair) for pair in failed.value.trailing_metadata()]
    for span in (client, server):
        assert span.attributes["error.type"] == "DATA_LOSS"  # type: ignore[index]
