"""W3C trace context in metadata: one trace over both sides, and over what is between them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry import baggage, propagate
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, get_current_span, use_span

from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.arity import wrap_handler
from gym_ckpt_grpc.telemetry.propagation import extracted, injected
from tests.control.scripted import eventually
from tests.telemetry.kept import Kept
from tests.telemetry.rpc_rig import Echo, call, echoing, finish, name_of, server_side

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"
RUBBISH = [
    "",
    " ",
    "rubbish",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{SPAN}-01",
    f"00-{TRACE.upper()}-{SPAN}-01",
    f"00-{TRACE}-{SPAN}-01-more",
    "0" * 100_000,
    "00-\u0661-x-01",
]
UNARY = "unary_unary"


@pytest.fixture
def outside() -> Any:
    """A tracer of somebody else, such as a trainer's."""
    return TracerProvider(shutdown_on_exit=False).get_tracer("trainer")


# ---- metadata and contexts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", RUBBISH)
def test_rubbish_replaces_nothing(value: str, outside: Any) -> None:
    """Field case 149: the current context stays as it was."""
    with outside.start_as_current_span("current"):
        current = otel_context.get_current()
        assert extracted([("traceparent", value), ("tracestate", "a=b")], current) is current
    assert extracted([("traceparent", value)], Context()) == {}


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (),
        [("authorization", "x")],
        [("tracestate", "a=b")],
        [("traceparent", b"bytes")],
        [("traceparent", GIVEN), ("traceparent", GIVEN.replace("b7", "b8"))],
    ],
)
def test_no_context_replaces_nothing(metadata: Any, outside: Any) -> None:
    """Nor one that is there twice, and is not the same."""
    with outside.start_as_current_span("current"):
        current = otel_context.get_current()
        assert extracted(metadata, current) is current


def test_a_context_that_is_there() -> None:
    """Is taken, with its state, and sent on in place of any other; what else there is stays."""
    metadata = [("x", "1"), ("traceparent", GIVEN), ("x", "2"), ("tracestate", "a=b"), ("tracestate", "c=d")]
    found = extracted(metadata, Context())
    span = get_current_span(found).get_span_context()
    assert (f"{span.trace_id:032x}", f"{span.span_id:016x}", span.is_remote) == (TRACE, SPAN, True)
    sent = injected([("x", "1"), ("x", "2"), ("traceparent", "other"), ("tracestate", "e=f"), ("b-bin", b"\0")], found)
    assert sent is not None
    assert [tuple(pair) for pair in sent] == [
        ("x", "1"),
        ("x", "2"),
        ("b-bin", b"\0"),
        ("traceparent", GIVEN),
        ("tracestate", "a=b,c=d"),
    ]
    assert injected(metadata, Context()) is None


# ---- on the wire ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["none", "checkpoint"])
async def test_a_trace_of_the_caller_goes_through(groups: str, outside: Any) -> None:
    """Whether or not our spans are on; what a handler calls in its turn is of the same trace."""
    kept, first, second = Kept(groups), Echo(), Echo()
    async with echoing(second, kept.telemetry) as onward:

        async def ask_on(context: Any) -> None:
            await call(onward, UNARY)

        first.act = ask_on
        async with echoing(first, kept.telemetry) as channel:
            with outside.start_as_current_span("training") as training:
                await call(channel, UNARY)
            assert not get_current_span().get_span_context().is_valid
    trace = training.get_span_context().trace_id
    assert [span.trace_id for span in first.seen + second.seen] == [trace, trace]
    if groups == "none":
        assert [span.span_id for span in first.seen + second.seen] == [training.get_span_context().span_id] * 2
        assert kept.spans == []
    else:
        await eventually(lambda: len(kept.spans) == 4)
        assert {span.context.trace_id for span in kept.spans if span.context} == {trace}
        parents = sorted(kept.parent(span) for span in kept.spans)
        assert parents == ["?", *[name_of(UNARY)] * 3]
    kept.all_ended()


async def test_nothing_is_sent_where_there_is_no_trace() -> None:
    """With our spans off and no span of the caller's."""
    kept, echo = Kept("none"), Echo()
    async with echoing(echo, kept.telemetry) as channel:
        await call(channel, UNARY, metadata=(("x", "1"),))
    assert not {"traceparent", "tracestate", "baggage"} & set(echo.metadata[0])
    assert echo.metadata[0]["x"] == "1"


@pytest.mark.parametrize("groups", ["none", "checkpoint"])
async def test_metadata_that_the_caller_set(groups: str, outside: Any) -> None:
    """Its context goes before the current span; ours, where they are on, are of its trace."""
    kept, echo = Kept(groups), Echo()
    metadata = grpc.aio.Metadata(("traceparent", GIVEN), ("tracestate", "a=b"), ("x", "1"))
    async with echoing(echo, kept.telemetry) as channel:
        with outside.start_as_current_span("training"):
            await call(channel, UNARY, metadata=metadata)
    assert f"{echo.seen[0].trace_id:032x}" == TRACE
    assert echo.metadata[0]["tracestate"] == "a=b"
    assert echo.metadata[0]["x"] == "1"
    assert list(metadata) == [("traceparent", GIVEN), ("tracestate", "a=b"), ("x", "1")]
    if groups == "none":
        assert echo.metadata[0]["traceparent"] == GIVEN
    else:
        client = next(span for span in kept.spans if span.kind is SpanKind.CLIENT)
        assert client.parent is not None
        assert f"{client.parent.span_id:016x}" == SPAN
        assert echo.metadata[0]["traceparent"].startswith(f"00-{TRACE}-{client.context.span_id:016x}")


@pytest.mark.parametrize("value", [v for v in RUBBISH if len(v) < 1000 and v.isascii()])
async def test_rubbish_on_the_wire(value: str, outside: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server makes a root of it, a client sends its own in its place; neither fails nor logs what it got."""
    kept, echo = Kept(), Echo()
    caplog.set_level(logging.INFO)
    async with echoing(echo, kept.telemetry, client=()) as channel:
        await call(channel, UNARY, metadata=(("traceparent", value),))
    await eventually(lambda: len(kept.spans) == 1)
    assert kept.only(name_of(UNARY)).parent is None
    async with echoing(echo, kept.telemetry) as channel:
        with outside.start_as_current_span("training") as training:
            await call(channel, UNARY, metadata=(("traceparent", value),))
    assert echo.seen[1].trace_id == training.get_span_context().trace_id
    assert caplog.text == ""


async def test_an_empty_context_does_not_replace_a_current_one(outside: Any) -> None:
    """Field case 149: another interceptor's span, with nothing in the metadata, stays the parent."""
    kept, echo = Kept(), Echo()

    class Foreign(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            @contextlib.asynccontextmanager
            async def around(context: Any) -> AsyncIterator[None]:
                with outside.start_as_current_span("foreign") as span:
                    parents.append(span.get_span_context())
                    yield

            return wrap_handler(await continuation(details), around)

    parents: list[Any] = []
    async with echoing(echo, kept.telemetry, server=[Foreign(), server_side(kept.telemetry)], client=()) as channel:
        await call(channel, UNARY)
    await eventually(lambda: len(kept.spans) == 1)
    assert kept.spans[0].parent == parents[0]
    assert echo.seen[0].trace_id == parents[0].trace_id


@pytest.mark.parametrize("groups", ["none", "checkpoint"])
async def test_a_server_that_is_started_in_a_span(groups: str, outside: Any) -> None:
    """Its calls inherit the context, but are not of that trace: it may have ended long ago."""
    kept, echo = Kept(groups), Echo()
    with outside.start_as_current_span("starting") as starting:
        async with echoing(echo, kept.telemetry, client=()) as channel:
            await call(channel, UNARY)
            await call(channel, UNARY, metadata=(("traceparent", GIVEN),))
    assert starting.get_span_context().trace_id not in [seen.trace_id for seen in echo.seen]
    assert echo.seen[0].is_valid == (groups == "checkpoint")
    assert f"{echo.seen[1].trace_id:032x}" == TRACE


async def test_calls_at_once_keep_to_their_traces(outside: Any) -> None:
    """Each handler sees its own caller's."""
    kept, echo = Kept(), Echo()
    seen: dict[str, int] = {}

    async def note(context: Any) -> None:
        name = dict(context.invocation_metadata())["x"]
        await asyncio.sleep(0)
        seen[name] = get_current_span().get_span_context().trace_id

    echo.act = note
    sent: dict[str, int] = {}

    async def one(channel: Any, name: str) -> None:
        with outside.start_as_current_span(name) as span:
            sent[name] = span.get_span_context().trace_id
            arity = ("unary_unary", "stream_stream")[len(name) % 2]
            await finish(call(channel, arity, metadata=(("x", name),)), arity)

    async with echoing(echo, kept.telemetry) as channel:
        await asyncio.gather(*(one(channel, str(number)) for number in range(50)))
    assert seen == sent
    kept.all_ended()


class Strange(TextMapPropagator):
    """A global propagator that speaks another format."""

    def extract(self, carrier: Any, context: Context | None = None, getter: Any = None) -> Context:
        raise AssertionError("the global propagator was used")

    def inject(self, carrier: Any, context: Context | None = None, setter: Any = None) -> None:
        raise AssertionError("the global propagator was used")

    @property
    def fields(self) -> set[str]:
        return set()


async def test_the_global_propagator_is_not_asked(outside: Any) -> None:
    """It is W3C's whatever the process has set up, and baggage is not sent."""
    kept, echo = Kept(), Echo()
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(Strange())
    attached = otel_context.attach(baggage.set_baggage("account", "secret"))
    try:
        async with echoing(echo, kept.telemetry) as channel:
            with outside.start_as_current_span("training") as training:
                await call(channel, UNARY)
    finally:
        otel_context.detach(attached)
        propagate.set_global_textmap(before)
    assert echo.seen[0].trace_id == training.get_span_context().trace_id
    assert "secret" not in repr(echo.metadata)


async def test_a_sampled_out_trace_stays_out(outside: Any) -> None:
    """The decision of the first process holds for all."""
    kept, echo = Kept(), Echo()
    async with echoing(echo, kept.telemetry) as channel:
        await call(channel, UNARY, metadata=(("traceparent", GIVEN[:-1] + "0"),))
    assert kept.spans == []
    assert f"{echo.seen[0].trace_id:032x}" == TRACE
    assert not echo.seen[0].trace_flags.sampled
    assert kept.value(catalogue.RPC_DURATION["server"]) == 1


async def test_work_of_a_call_that_was_cancelled_keeps_its_trace(outside: Any) -> None:
    """A task of the server's own goes on, in the trace of the call that began it."""
    kept, echo = Kept(), Echo()
    go, tasks = asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        with kept.telemetry.span(catalogue.WRITE):
            pass

    async def begin(context: Any) -> None:
        tasks.append(asyncio.create_task(work()))
        await echo.hang(context)

    echo.act = begin
    async with echoing(echo, kept.telemetry) as channel:
        waiting = asyncio.create_task(finish(call(channel, UNARY), UNARY))
        await echo.entered.wait()
        waiting.cancel()
        await echo.cancelled.wait()
        go.set()
        await tasks[0]
        await eventually(lambda: len(kept.spans) == 3)
    write = kept.only(catalogue.WRITE)
    assert kept.parent(write) == name_of(UNARY)
    assert len({span.context.trace_id for span in kept.spans if span.context}) == 1
    kept.all_ended()


async def test_a_span_that_is_current_is_not_ended_by_a_call(outside: Any) -> None:
    """The caller's span is its own business."""
    kept, echo = Kept(), Echo()
    span = outside.start_span("training")
    async with echoing(echo, kept.telemetry) as channel:
        with use_span(span, end_on_exit=False):
            await call(channel, UNARY)
            assert get_current_span() is span
    assert span.is_recording()
    span.end()
