"""The metrics hook: one record per call on each side, whatever becomes of the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue
from gym_ckpt_grpc.control import HookFailed, open_channel
from gym_ckpt_grpc.protocol.errors import ControlError, ErrorCode
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry import CallRecord, CallServerInterceptor, MetricsObserver, catalogue
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc
from tests.control.scripted import Participant, ScriptedOwner, context, eventually, running, typed
from tests.telemetry.kept import Kept

PREFIX = "/gymckpt.v1.ParticipantService/"


class Recording:
    """Keeps what it is told; raises afterwards if it is told to."""

    def __init__(self, raising: bool = False) -> None:
        self.records: list[CallRecord] = []
        self.errors: list[tuple[str, ErrorCode]] = []
        self.raising = raising

    def call_ended(self, record: CallRecord) -> None:
        self.records.append(record)
        if self.raising:
            raise ValueError("a bad observer")

    def control_error(self, method: str, code: ErrorCode) -> None:
        self.errors.append((method, code))
        if self.raising:
            raise ValueError("a bad observer")

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(record.method.removeprefix(PREFIX), record.status) for record in self.records]


class Both:
    """A participant whose server and client each have an observer."""

    def __init__(self, p: Participant, server: Recording, client: Recording) -> None:
        self.p, self.server, self.client = p, server, client

    async def told(self, *expected: tuple[str, str]) -> None:
        """Both sides were told exactly this, once each."""
        await eventually(lambda: len(self.server.records) >= len(expected) <= len(self.client.records))
        assert self.client.told == list(expected)
        assert self.server.told == list(expected)
        assert {record.side for record in self.server.records} == {"server"}
        assert {record.side for record in self.client.records} == {"client"}
        assert all(0 <= record.seconds < 10 for record in self.server.records + self.client.records)


async def observed(tmp_path: Path, owner: ScriptedOwner | None = None, *, raising: bool = False) -> AsyncIterator[Both]:
    server, client = Recording(raising), Recording(raising)
    async with Participant(tmp_path, owner=owner, observer=server) as p:
        assert p.channel is not None
        await p.channel.close()
        p.channel = open_channel(p.server.address, observer=client, token=TokenValue("unused"))
        p.stub = participant_pb2_grpc.ParticipantServiceStub(p.channel)
        yield Both(p, server, client)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Both]:
    async for made in observed(tmp_path):
        yield made


async def test_calls_that_succeed(both: Both) -> None:
    """Unary and streaming."""
    await both.p.prepare()
    both.p.owner.restarts.add(EpisodeId("a"))
    await both.p.listed(pb.EPISODE_LIST_KIND_RESTART)
    await both.told(("Prepare", "OK"), ("ListEpisodes", "OK"))
    assert both.server.errors == []


async def test_calls_that_are_refused(both: Both) -> None:
    """With the status of the typed error; the control error is told once, where its status is made."""
    with pytest.raises(ControlError):
        await both.p.renew()
    with pytest.raises(ControlError):
        await both.p.listed(pb.EPISODE_LIST_KIND_COMMITTED, "nothing")
    await both.told(("RenewLease", "FAILED_PRECONDITION"), ("ListEpisodes", "NOT_FOUND"))
    assert both.server.errors == [
        (PREFIX + "RenewLease", ErrorCode.INVALID_PHASE),
        (PREFIX + "ListEpisodes", ErrorCode.STATE_NOT_FOUND),
    ]


async def test_calls_that_fail_unexpectedly(tmp_path: Path) -> None:
    """INTERNAL on both sides."""
    owner = ScriptedOwner()
    owner.restored_pending = lambda: {}[0]  # type: ignore[method-assign,index]
    async for both in observed(tmp_path, owner):
        with pytest.raises(ControlError):
            await typed(both.p.stub.GetStatus(pb.GetStatusRequest(), timeout=5))
        with pytest.raises(ControlError):
            await typed(anext(aiter(both.p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=5))))
        await both.told(("GetStatus", "INTERNAL"), ("WatchStatus", "INTERNAL"))
        assert [code for _, code in both.server.errors] == [ErrorCode.INTERNAL] * 2


async def test_a_unary_call_that_is_cancelled(both: Both) -> None:
    """CANCELLED on both sides."""
    both.p.add("a", running=True)
    async with running(both.p.prepare(within=20, timeout=25)):
        await eventually(lambda: both.p.plane.status().phase.name == "PREPARING")
    await both.told(("Prepare", "CANCELLED"))
    assert both.server.errors == []


@pytest.mark.parametrize("flood", [False, True])
async def test_a_stream_that_is_cancelled(both: Both, flood: bool) -> None:
    """CANCELLED on both sides, whether the server was waiting or writing."""
    watch = both.p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=10)
    told = aiter(watch)
    await anext(told)
    if flood:
        both.p.owner.restarts = {EpisodeId(f"{i:04}" + "x" * 200) for i in range(1000)}
        for _ in range(20):  # nobody reads: the server comes to wait for the window
            both.p.plane._core.touch()
            await asyncio.sleep(0.02)
    watch.cancel()
    await both.told(("WatchStatus", "CANCELLED"))


async def test_a_call_that_runs_out_of_time(both: Both) -> None:
    """Ours, typed; and the client's own, where a hook blocks the answer."""
    both.p.owner.closes.hold()
    with pytest.raises(ControlError):
        await both.p.prepare(within=0.05, timeout=0.3)
    await both.told(("Prepare", "DEADLINE_EXCEEDED"))
    both.p.owner.closes.error = HookFailed("end")
    both.p.owner.closes.open.set()
    await eventually(lambda: both.p.plane.status().phase.name == "IDLE")
    watch = both.p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in watch:
            pass
    await eventually(lambda: len(both.server.records) == 2)
    assert both.client.told[1] == ("WatchStatus", "DEADLINE_EXCEEDED")
    assert both.server.told[1][0] == "WatchStatus"
    assert both.server.told[1][1] != "OK"


async def test_statuses_that_a_foreign_servicer_sets(both: Both) -> None:
    """Health aborts by itself: its status is told, not a guess."""
    stub: Any = health_pb2_grpc.HealthStub(both.p.channel)  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=5)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=5)
    await anext(aiter(watch))
    watch.cancel()
    await both.told(("/grpc.health.v1.Health/Check", "NOT_FOUND"), ("/grpc.health.v1.Health/Watch", "CANCELLED"))


async def test_an_observer_that_raises_harms_nothing(tmp_path: Path) -> None:
    """Neither a reply nor an error is changed by it."""
    async for both in observed(tmp_path, raising=True):
        assert (await both.p.prepare()).phase == pb.PHASE_PREPARED
        with pytest.raises(ControlError):
            await both.p.prepare("c2")
        await both.p.listed(pb.EPISODE_LIST_KIND_RESTART)
        await both.told(("Prepare", "OK"), ("Prepare", "ABORTED"), ("ListEpisodes", "OK"))


async def test_refused_credentials_are_control_errors_only(tmp_path: Path) -> None:
    """A stranger makes no call records, and is counted all the same."""
    server = Recording()
    authenticator = Authenticator({Role.CONTROLLER: TokenValue("t")})
    async with Participant(tmp_path, observer=server, authenticator=authenticator) as p:
        with pytest.raises(ControlError):
            await typed(p.stub.Prepare(pb.PrepareRequest(context=context()), timeout=5))
    assert server.records == []
    assert server.errors == [(PREFIX + "Prepare", ErrorCode.UNAUTHENTICATED)]


def test_metrics() -> None:
    """Names and attributes of the stable RPC conventions."""
    kept = Kept()
    observer = MetricsObserver(kept.telemetry)
    observer.call_ended(CallRecord("server", PREFIX + "Prepare", "OK", 0.5))
    observer.call_ended(CallRecord("client", PREFIX + "Prepare", "ABORTED", 0.5))
    observer.control_error(PREFIX + "Prepare", ErrorCode.INVALID_PHASE)
    method = {"rpc.method": "gymckpt.v1.ParticipantService/Prepare"}
    common = {"rpc.system.name": "grpc", **method}
    assert kept.points(catalogue.RPC_DURATION["server"]) == [({**common, "rpc.response.status_code": "OK"}, 1)]
    assert kept.points(catalogue.RPC_DURATION["client"]) == [
        ({**common, "rpc.response.status_code": "ABORTED", "error.type": "ABORTED"}, 1)
    ]
    assert kept.points(catalogue.CONTROL_ERRORS) == [({**method, "error_code": "INVALID_PHASE"}, 1)]


async def test_an_own_observer_is_told_beside_the_metrics(tmp_path: Path) -> None:
    """It takes nothing away: spans and metrics are made as without it, on both sides, whatever it raises."""
    kept, server, client = Kept(), Recording(raising=True), Recording(raising=True)
    async with Participant(tmp_path, observer=server, telemetry=kept.telemetry) as p:
        assert p.channel is not None
        await p.channel.close()
        p.channel = open_channel(p.server.address, observer=client, telemetry=kept.telemetry)
        p.stub = participant_pb2_grpc.ParticipantServiceStub(p.channel)
        await p.status()
        with pytest.raises(ControlError):
            await p.renew()
        await Both(p, server, client).told(("GetStatus", "OK"), ("RenewLease", "FAILED_PRECONDITION"))
    for side in ("server", "client"):
        assert kept.value(catalogue.RPC_DURATION[side]) == 2
    assert kept.value(catalogue.CONTROL_ERRORS, error_code="INVALID_PHASE") == 1
    assert len(server.errors) == 1
    assert sorted(span.name for span in kept.spans if span.name.startswith("gymckpt.")) == [
        PREFIX.lstrip("/") + name for name in ("GetStatus", "GetStatus", "RenewLease", "RenewLease")
    ]
    kept.check_declared()
    kept.all_ended()


@pytest.mark.behaviour("C305")
async def test_what_calls_are_measured_by(tmp_path: Path) -> None:
    """GetStatus and RenewLease by the RPC instruments, with their code; an operation by its own as well."""
    kept = Kept("none")
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await p.status()
        with pytest.raises(ControlError):
            await p.renew()
        p.add("a", running=True)
        await p.prepare(within=0.05)
        await p.renew()
        with pytest.raises(ControlError):
            await p.commit()
        await eventually(lambda: kept.value(catalogue.RPC_DURATION["server"]) == 5)
    measured = {
        (str(labels["rpc.method"]).rpartition("/")[2], labels["rpc.response.status_code"]): count
        for labels, count in kept.points(catalogue.RPC_DURATION["server"])
    }
    refused = "FAILED_PRECONDITION"
    assert measured == {
        ("GetStatus", "OK"): 1,
        ("RenewLease", refused): 1,
        ("Prepare", "OK"): 1,
        ("RenewLease", "OK"): 1,
        ("Commit", refused): 1,
    }
    outcomes = {(labels["operation"], labels["outcome"]) for labels, _ in kept.points(catalogue.OPERATION_DURATION)}
    assert {("prepare", "not_ready"), ("commit", "INVALID_PHASE")} == outcomes


async def test_a_method_that_no_server_has(tmp_path: Path) -> None:
    """A stranger may ask for any name: it makes no series of its own."""
    kept = Kept()
    authenticator = Authenticator({Role.CONTROLLER: TokenValue("t")})
    async with Participant(tmp_path, telemetry=kept.telemetry, authenticator=authenticator) as p:
        assert p.channel is not None
        for name in ("/a.B/c", "/gymckpt.v1.ParticipantService/Nothing", "/x" * 100):
            unknown: Any = p.channel.unary_unary(name)
            with pytest.raises(grpc.aio.AioRpcError):
                await unknown(b"", timeout=5)
        with pytest.raises(grpc.aio.AioRpcError):
            await p.status()
    methods = {labels["rpc.method"]: count for labels, count in kept.points(catalogue.CONTROL_ERRORS)}
    assert methods == {"_OTHER": 3, "gymckpt.v1.ParticipantService/GetStatus": 1}
    assert kept.points(catalogue.RPC_DURATION["server"]) == []


async def measured(behaviour: Any, context: Any) -> tuple[Any, Recording]:
    """A streaming behaviour behind the server's interceptor, and what its observer is told."""
    observer = Recording()

    async def continuation(details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(behaviour)

    details: Any = SimpleNamespace(method=PREFIX + "WatchStatus", invocation_metadata=())
    handler = await CallServerInterceptor(observer).intercept_service(continuation, details)
    return handler.unary_stream(None, context), observer


async def test_a_stream_that_is_closed_while_it_writes() -> None:
    """Nothing is cancelled inside it then: the core lets go of it, and it is closed."""

    async def endless(request: Any, context: Any) -> AsyncIterator[int]:
        while True:
            yield 1

    stream, observer = await measured(endless, SimpleNamespace(code=lambda: None))
    await anext(stream)
    assert observer.records == []
    await stream.aclose()
    assert observer.told == [("WatchStatus", "CANCELLED")]


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.NOT_FOUND.value[0]])
async def test_a_status_that_is_set_and_not_raised(code: Any) -> None:
    """A servicer may set its status and return: that status is told, as member or as number."""

    async def empty(request: Any, context: Any) -> AsyncIterator[int]:
        nothing: list[int] = []
        for message in nothing:
            yield message

    stream, observer = await measured(empty, SimpleNamespace(code=lambda: code))
    assert [message async for message in stream] == []
    assert observer.told == [("WatchStatus", "NOT_FOUND")]
