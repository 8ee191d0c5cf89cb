"""The client of GenerationService against servers that misbehave, and the mirrors of its enums."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.capture import CutOutcome, GrpcGenerationBackend
from gym_ckpt_grpc.capture.generation_wire import NOBODY, ack_from, ack_to
from gym_ckpt_grpc.control import (
    Budget,
    Capability,
    CutAck,
    CutDisposition,
    CutEvidence,
    CutPresence,
    GenerationBackend,
    SweepHeader,
)
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    InternalError,
    OutOfTime,
    UsageError,
    WorkerUnavailable,
)
from gymckpt.v1 import episode_pb2, generation_pb2_grpc
from gymckpt.v1 import generation_pb2 as pb
from tests.capture.scripted_engine import DIGEST, identity, sweep_of

HEADER = pb.CutGenerationsResponse(header=pb.CutHeader(backend_id="b", incarnation_id="i", snapshot_id="s"))
EVIDENCE = CutEvidence("k", ("cuts/r1/c/k",), 2, DIGEST, 20, 3)
CUT = CutOutcome.of(EVIDENCE)
Answer = Callable[[Any, Any], AsyncIterator[pb.CutGenerationsResponse]]


def acks(*some: pb.CutAck) -> pb.CutGenerationsResponse:
    return pb.CutGenerationsResponse(acks=pb.CutAcks(acks=some))


@asynccontextmanager
async def rogue(**methods: Any) -> AsyncIterator[GrpcGenerationBackend]:
    """A server whose RPCs are these functions, and a client of it."""
    rpcs = [method.name for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods]
    servicer: Any = SimpleNamespace(**{**dict.fromkeys(rpcs), **methods})
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    backend = GrpcGenerationBackend("inference-0", f"127.0.0.1:{port}")
    yield backend
    await backend.close()
    await server.stop(0)


def saying(*parts: pb.CutGenerationsResponse, status: grpc.StatusCode | None = None) -> Answer:
    async def answer(request: Any, context: Any) -> AsyncIterator[pb.CutGenerationsResponse]:
        for part in parts:
            yield part
        if status is not None:
            await context.abort(status, "as the test wants it")

    return answer


async def sweep(backend: GrpcGenerationBackend) -> tuple[list[Any], ControlError | None]:
    """What a sweep gave, and how it ended."""
    parts: list[SweepHeader | Sequence[CutAck]] = []
    try:
        async for part in backend.cut(sweep_of(["c"]), Budget(5)):
            parts.append(part)
    except ControlError as error:
        return parts, error
    return parts, None


@pytest.mark.parametrize(
    ("name", "mirror"),
    [
        ("GenerationCapability", Capability),
        ("CutDisposition", CutDisposition),
        ("CutPresence", CutPresence),
    ],
)
def test_enums_mirror_the_contract(name: str, mirror: type[enum.IntEnum]) -> None:
    """The same words and numbers, without their prefix."""
    prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name).lstrip("_") + "_"
    values = pb.DESCRIPTOR.enum_types_by_name[name].values
    assert {value.name: value.number for value in values} == {prefix + one.name: one.value for one in mirror}


def test_the_client_is_a_generation_backend() -> None:
    backend: GenerationBackend = GrpcGenerationBackend("inference-0", "127.0.0.1:1")
    assert backend.name == "inference-0"


def test_an_ack_survives_the_wire() -> None:
    for outcome in (CUT, CutOutcome.not_found(), CutOutcome.uncuttable("bent"), CutOutcome.failed("full")):
        message = pb.CutAck.FromString(ack_to(identity("c"), outcome).SerializeToString())
        assert ack_from(message) == CutAck(identity("c"), outcome.disposition, outcome.reason, outcome.evidence)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: CutOutcome(CutDisposition.CUT),
        lambda: CutOutcome(CutDisposition.FINISHED, evidence=EVIDENCE),
        lambda: CutOutcome(CutDisposition.NOT_FOUND, evidence=EVIDENCE),
        lambda: CutOutcome(CutDisposition.NOT_FOUND, "why"),
        lambda: CutOutcome(CutDisposition.UNCUTTABLE),
        lambda: CutOutcome(CutDisposition.FAILED),
        lambda: CutOutcome(CutDisposition.UNSPECIFIED),
    ],
)
def test_an_outcome_is_whole(wrong: Callable[[], CutOutcome]) -> None:
    with pytest.raises(ValueError, match="with"):
        wrong()


@pytest.mark.behaviour("P129")
async def test_an_ack_that_cannot_be_read_fails_alone() -> None:
    """It comes through under its ticket as one that matches no call; those beside it are whole."""
    bad = ack_to(identity("bad"), CUT)
    bad.call.episode.CopyFrom(episode_pb2.EpisodeId(rollout_id="../r1", attempt=2**32 - 1))
    nameless = ack_to(identity("nameless"), CUT)
    nameless.ClearField("call")
    newer = ack_to(identity("newer"), CUT)
    newer.disposition = 77  # type: ignore[assignment]
    good = ack_to(identity("good"), CUT)
    async with rogue(CutGenerations=saying(HEADER, acks(bad, good, nameless, newer))) as backend:
        parts, error = await sweep(backend)
    assert error is None
    first, second, third, fourth = parts[1]
    assert (first.call.ticket_id, first.call.episode, first.call.request_digest) == ("t-bad", NOBODY, "")
    assert second == CutAck(identity("good"), CutDisposition.CUT, "", EVIDENCE)
    assert (third.call.ticket_id, third.call.request_digest) == ("", "")
    assert fourth.disposition is CutDisposition.UNSPECIFIED


@pytest.mark.behaviour("P130")
async def test_what_came_before_a_break_stands() -> None:
    """The parts are given, then the failure, by its status."""
    good = acks(ack_to(identity("c"), CUT))
    kinds = {
        grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: OutOfTime,
        grpc.StatusCode.UNKNOWN: InternalError,
    }
    for status, kind in kinds.items():
        async with rogue(CutGenerations=saying(HEADER, good, status=status)) as backend:
            parts, error = await sweep(backend)
        assert parts == [SweepHeader("b", "i", "s"), [CutAck(identity("c"), CutDisposition.CUT, "", EVIDENCE)]]
        assert type(error) is kind
        assert error.participant == "inference-0"


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ((), 0),
        ((acks(), HEADER), 0),
        ((HEADER, HEADER), 1),
        ((pb.CutGenerationsResponse(),), 0),
        ((HEADER, pb.CutGenerationsResponse()), 1),
    ],
)
async def test_a_stream_out_of_order_is_an_error(said: tuple[pb.CutGenerationsResponse, ...], given: int) -> None:
    async with rogue(CutGenerations=saying(*said)) as backend:
        parts, error = await sweep(backend)
    assert len(parts) == given
    assert type(error) is InternalError


@pytest.mark.behaviour("P132")
async def test_a_hung_backend_costs_its_budget() -> None:
    """And no more: the budget is the deadline that travels."""
    left: list[float] = []
    hung = asyncio.Event()

    async def hang(request: Any, context: Any) -> Any:
        left.append(context.time_remaining())
        await hung.wait()

    async def hang_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        left.append(context.time_remaining())
        yield HEADER
        await hung.wait()

    async with rogue(CutGenerations=hang_stream, GetBackend=hang, CheckCuts=hang, ReleaseCuts=hang) as backend:
        calls: list[Callable[[Budget], Any]] = [
            lambda budget: backend.describe(budget),
            lambda budget: backend.check([EVIDENCE], budget),
            lambda budget: backend.release(["k"], budget),
            lambda budget: _all(backend.cut(sweep_of(["c"]), budget)),
        ]
        for call in calls:
            with pytest.raises(OutOfTime):
                await call(Budget(0.4))
    assert len(left) == 4
    assert all(0 < seconds <= 0.4 for seconds in left)


async def _all(parts: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in parts]


async def test_a_spent_budget_asks_nobody() -> None:
    spent = Budget(0)
    backend = GrpcGenerationBackend("inference-0", "127.0.0.1:1")
    for call in (
        backend.describe(spent),
        backend.check([EVIDENCE], spent),
        backend.release(["k"], spent),
        anext(backend.cut(sweep_of(["c"]), spent)),
    ):
        with pytest.raises(OutOfTime, match="inference-0"):
            await call
    await backend.close()


@pytest.mark.behaviour("P132", "P156")
async def test_an_unreachable_backend_is_said_to_be_so() -> None:
    """Within about a second, however much time there is."""
    backend = GrpcGenerationBackend("inference-0", "127.0.0.1:1")
    async with asyncio.timeout(20):
        for call in (backend.describe(Budget(600)), backend.release(["k"], Budget(600))):
            with pytest.raises(WorkerUnavailable) as caught:
                await call
            assert caught.value.participant == "inference-0"
        with pytest.raises(WorkerUnavailable):
            await anext(backend.cut(sweep_of(["c"]), Budget(600)))
    await backend.close()


async def test_answers_for_other_cuts_than_asked_are_an_error() -> None:
    async def answer(request: Any, context: Any) -> pb.CheckCutsResponse:
        return pb.CheckCutsResponse(presences=[1, 99])  # type: ignore[list-item]

    async with rogue(CheckCuts=answer) as backend:
        with pytest.raises(InternalError, match="2 of 1"):
            await backend.check([EVIDENCE], Budget(5))
        assert await backend.check([EVIDENCE, EVIDENCE], Budget(5)) == [CutPresence.PRESENT, CutPresence.UNSPECIFIED]


async def test_plain_text_beyond_this_host_is_asked_for() -> None:
    with pytest.raises(UsageError, match="not local"):
        await GrpcGenerationBackend("inference-0", "10.0.0.1:1").describe(Budget(5))
