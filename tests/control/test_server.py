"""Serving: addresses, deadlines, and many calls at once."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue
from gym_ckpt_grpc.control import ControlSettings, ParticipantServer, error_from, open_channel, wire
from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.channel import is_local
from gym_ckpt_grpc.protocol.errors import (
    InvalidArgument,
    OutOfTime,
    UsageError,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.machine import Call, CommitArguments
from gym_ckpt_grpc.protocol.phases import Operation
from gym_ckpt_grpc.storage import CheckpointLocation
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc
from tests.control.scripted import (
    Participant,
    context,
    eventually,
    failure,
    running,
    scope_message,
    typed,
)

A = EpisodeId("a")


def requests(p: Participant) -> dict[str, Any]:
    """A legal request of every mutating RPC."""
    return {
        "Prepare": pb.PrepareRequest(context=context()),
        "Capture": pb.CaptureRequest(context=context(), scope=scope_message(None)),
        "Commit": pb.CommitRequest(context=context(), scope=scope_message(None), storage_uri=p.uri("c1")),
        "Resume": pb.ResumeRequest(context=context()),
        "Restore": pb.RestoreRequest(
            context=context("r1"), storage_uri=p.uri("c1"), source_checkpoint_id="c1", scope=wire.episode_list([A])
        ),
        "Retire": pb.RetireRequest(context=context(""), episodes=wire.episode_list([A])),
        "Forget": pb.ForgetRequest(context=context(""), rollouts=[pb.ForgetRollout(rollout_id="a")]),
        "RenewLease": pb.RenewLeaseRequest(context=context()),
    }


MUTATING = ("Prepare", "Capture", "Commit", "Resume", "Restore", "Retire", "Forget", "RenewLease")


# ---- deadlines ------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("C7")
@pytest.mark.parametrize("method", MUTATING)
async def test_a_mutating_call_needs_a_deadline(tmp_path: Path, method: str) -> None:
    """INVALID_ARGUMENT naming the flags to set; nothing happened."""
    async with Participant(tmp_path) as p:
        with pytest.raises(InvalidArgument, match="-max-time in grpcurl, --timeout in buf curl") as caught:
            await typed(getattr(p.stub, method)(requests(p)[method]))
        assert [violation.field for violation in caught.value.violations] == ["deadline"]
        status = await p.status()
        assert (status.phase, status.highest_epoch, status.marks_held) == (pb.PHASE_IDLE, 0, 0)


@pytest.mark.behaviour("C7")
async def test_a_long_deadline_is_clamped(tmp_path: Path) -> None:
    """The answer comes by max_deadline, whatever the caller's own; absurd ones harm nothing."""
    async with Participant(tmp_path, settings=ControlSettings(max_deadline=0.3)) as p:
        p.owner.closes.hold()
        async with asyncio.timeout(2):
            with pytest.raises(OutOfTime):
                await p.prepare(within=0.1, timeout=1e9)
    with pytest.raises(UsageError):
        ControlSettings(max_deadline=3601)


@pytest.mark.behaviour("C8")
@pytest.mark.parametrize(("within", "legal"), [(5.1, False), (6.0, False), (4.5, True)])
async def test_ready_within_is_below_the_deadline(tmp_path: Path, within: float, legal: bool) -> None:
    """Else INVALID_ARGUMENT, and admission stays open. gRPC rounds a deadline of 5 s up on its way."""
    async with Participant(tmp_path) as p:
        if legal:
            await p.prepare(within=within, timeout=5)
        else:
            with pytest.raises(InvalidArgument, match="below the call's deadline"):
                await p.prepare(within=within, timeout=5)
            assert p.is_open()


@pytest.mark.behaviour("C6", "C149")
@pytest.mark.parametrize("method", MUTATING)
async def test_a_bad_request_changes_nothing(tmp_path: Path, method: str) -> None:
    """Every violation in one BadRequest; no lease extended, no epoch obeyed."""
    async with Participant(tmp_path) as p:
        request = requests(p)[method]
        request.context.checkpoint_id = "a b"
        request.context.controller_id = ""
        error = await failure(getattr(p.stub, method)(request, timeout=5))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        known = error_from(error)
        assert known is not None
        assert [v.field for v in known.violations] == ["context.checkpoint_id", "context.controller_id"]
        assert (await p.status()).highest_epoch == 0


@pytest.mark.behaviour("C149", "C76", "C150")
async def test_no_step_without_time(tmp_path: Path) -> None:
    """A call whose time is over when its turn comes closes, marks, captures, writes and forgets nothing."""
    async with Participant(tmp_path) as p:
        p.add("a")

        def late(operation: Operation, id: str = "c1", arguments: Any = None) -> dict[str, Any]:
            budget = Budget(0.0)
            return {"call": Call(operation, id, "t", 3, arguments, left=budget.left()), "budget": budget}

        place = CheckpointLocation(str(tmp_path), "c1")
        plane = p.plane
        scope = EpisodeScope.all()
        attempts: list[Any] = [
            lambda: plane.prepare(**late(Operation.PREPARE, arguments=30.0), ready_within=0, lease_ttl=30),
            lambda: plane.capture(**late(Operation.CAPTURE, arguments=scope), scope=scope),
            lambda: plane.commit(
                **late(Operation.COMMIT), arguments=CommitArguments(scope, p.uri("c1")), location=place
            ),
            lambda: plane.restore(
                **late(Operation.RESTORE, "r1"),
                scope=RestoreScope.plan([A]),
                location=place,
                expected_digest="",
                lease_ttl=30,
            ),
            lambda: plane.retire(**late(Operation.RETIRE, ""), episodes=[A]),
            lambda: plane.forget(**late(Operation.FORGET, ""), rollouts=[("z", 0)]),
            lambda: plane.renew_lease(late(Operation.RENEW_LEASE)["call"]),
        ]
        await p.retire([EpisodeId("z")])
        for prepared in (False, True):
            if prepared:
                await p.prepare()
            for attempt in attempts:
                with pytest.raises(OutOfTime, match="no time was left to begin"):
                    await attempt()
            status = await p.status()
            assert (status.marks_held, status.highest_epoch) == (1, 1)
            assert status.phase == (pb.PHASE_PREPARED if prepared else pb.PHASE_IDLE)
        assert p.owner.exports.count == 0
        assert p.files.calls == []
        reply, _ = await plane.resume(**late(Operation.RESUME), keep_write=False)
        assert reply.phase.name == "RESUMING" or p.is_open()


def test_a_budget_names_the_step() -> None:
    """And keeps a margin in which the typed answer still arrives: a tenth of the time, at most a second."""
    now = [0.0]
    budget = Budget(2.0, lambda: now[0])
    assert budget.left() == pytest.approx(1.8)
    assert budget.require("x") == pytest.approx(1.8)
    assert Budget(100.0, lambda: now[0]).left() == pytest.approx(99.0)
    assert Budget(float("inf"), lambda: now[0]).left() == pytest.approx(3599.0)
    now[0] = 1.81
    assert budget.left() == 0.0
    with pytest.raises(OutOfTime, match="the big step"):
        budget.require("the big step")


@pytest.mark.behaviour("C325", "C150")
@pytest.mark.parametrize("timeout", [1.0, 3.0])
async def test_the_typed_answer_comes_before_the_deadline(tmp_path: Path, timeout: float) -> None:
    """Each operation that hangs is answered with our error, not with the client's own."""
    async with Participant(tmp_path) as p:
        p.add("a")
        p.owner.closes.hold()
        with pytest.raises(OutOfTime):
            await p.prepare(within=0.1, timeout=timeout)
        p.owner.closes.open.set()
        await p.prepare()
        p.owner.exports.hold()
        for call in (p.capture, p.commit):
            with pytest.raises(OutOfTime):
                await call(timeout=timeout)
        p.owner.opens.hold()
        with pytest.raises(OutOfTime):
            await p.resume(timeout=timeout)
        p.owner.opens.open.set()
        await p.resume()
        p.owner.retires.hold()
        reply = await p.retire([A], timeout=timeout)
        assert reply.outcomes[0].state == pb.RETIRE_STATE_INCOMPLETE


# ---- addresses ------------------------------------------------------------------------------------------------


def another(p: Participant, address: str, **more: Any) -> ParticipantServer:
    return ParticipantServer(p.plane, address, **more)


async def test_a_second_server_on_the_port_fails(tmp_path: Path) -> None:
    """At once, naming the address; the first one keeps its calls."""
    async with Participant(tmp_path) as p:
        assert not p.server.address.endswith(":0")
        with pytest.raises(UsageError, match=p.server.address):
            await another(p, p.server.address).start()
        assert await p.phase() == "IDLE"


@pytest.mark.behaviour("C318")
async def test_plain_text_stays_on_this_host(tmp_path: Path) -> None:
    """Beyond it a server needs credentials and allow_insecure, a channel allow_insecure."""
    authenticator = Authenticator({Role.CONTROLLER: TokenValue("t")})
    async with Participant(tmp_path) as p:
        for address in ("0.0.0.0:0", "[::]:0", "10.0.0.1:0", "example.org:0", "::1:5"):
            assert not is_local(address)
            for more in ({}, {"authenticator": authenticator}, {"allow_insecure": True}):
                with pytest.raises(UsageError, match="is not local"):
                    another(p, address, **more)
            another(p, address, authenticator=authenticator, allow_insecure=True)
            with pytest.raises(UsageError, match="is not local"):
                open_channel(address)
    for address in ("127.0.0.1:0", "127.9.9.9:1", "localhost:0", "[::1]:0", "unix:/x", "unix-abstract:x"):
        assert is_local(address)


async def test_unix_sockets(tmp_path: Path) -> None:
    """A living owner is refused and goes on, a stale file is replaced, what is no socket or too long is refused."""
    path = tmp_path / "s"
    async with Participant(tmp_path, address=f"unix:{path}") as p:
        with pytest.raises(UsageError, match="another process serves"):
            await another(p, f"unix:{path}").start()
        await asyncio.sleep(0)
        assert await p.phase() == "IDLE"
    if path.exists():
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with Participant(tmp_path, address=f"unix://{path}") as p:
        assert await p.phase() == "IDLE"
    plain = tmp_path / "file"
    plain.write_text("mine")
    async with Participant(tmp_path) as p:
        with pytest.raises(UsageError, match="is no socket"):
            await another(p, f"unix:{plain}").start()
        assert plain.read_text() == "mine"
        with pytest.raises(UsageError, match="longer than 100 bytes"):
            await another(p, f"unix:{tmp_path / ('x' * 100)}").start()


async def test_abstract_sockets(tmp_path: Path) -> None:
    """Served under the name that was asked for."""
    name = f"unix-abstract:gymckpt-{os.getpid()}"
    async with Participant(tmp_path, address=name) as p:
        assert p.server.address == name
        assert await p.phase() == "IDLE"


async def test_proxies_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """http_proxy would be obeyed even for loopback."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with Participant(tmp_path) as p:
        assert await p.phase() == "IDLE"


@pytest.mark.behaviour("C152")
def test_settings() -> None:
    """Negative limits and unknown names are refused by name, zero concurrent calls means no limit."""
    assert ControlSettings(max_concurrent_calls=0).max_concurrent_calls == 0
    assert ControlSettings.from_mapping({"cleanup_limit": 3}).cleanup_limit == 3
    with pytest.raises(UsageError, match="max_concurrent_calls"):
        ControlSettings(max_concurrent_calls=-1)
    with pytest.raises(UsageError, match="deletion_wait must be above 0"):
        ControlSettings(deletion_wait=0)
    with pytest.raises(UsageError, match="unknown setting 'cleanup_limt'; did you mean 'cleanup_limit'"):
        ControlSettings.from_mapping({"cleanup_limt": 3})


async def test_too_many_calls_are_refused_by_code(tmp_path: Path) -> None:
    """Where a limit is set, the one too many is RESOURCE_EXHAUSTED and the others go on."""
    async with Participant(tmp_path, settings=ControlSettings(max_concurrent_calls=1)) as p:
        watch = p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=10)
        await anext(aiter(watch))
        error = await failure(p.stub.GetStatus(pb.GetStatusRequest(), timeout=5))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watch.cancel()


@pytest.mark.behaviour("C153", "C105")
async def test_many_long_calls_hold_up_nobody(tmp_path: Path) -> None:
    """500 waiting Prepares on one participant: status, renewal and Resume answer within a second."""
    async with Participant(tmp_path) as p:
        p.add("a", running=True)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(p.prepare(within=25, timeout=30)) for _ in range(500)]
            await p.until("PREPARING")
            lease = p.plane._core.machine.open.lease  # type: ignore[union-attr]
            await eventually(lambda: lease._holders == 500)
            dedicated = open_channel(p.server.address, dedicated=True)
            async with running(p.status()):
                stub: Any = participant_pb2_grpc.ParticipantServiceStub(dedicated)
                await stub.GetStatus(pb.GetStatusRequest(), timeout=1)
                await stub.RenewLease(pb.RenewLeaseRequest(context=context()), timeout=1)
                await stub.Resume(pb.ResumeRequest(context=context()), timeout=1)
            await dedicated.close()
        replies = [await call for call in calls]
        assert {reply.phase for reply in replies} <= {pb.PHASE_IDLE}


async def test_stop_ends_what_runs(tmp_path: Path) -> None:
    """Health says so first; a watch under way ends; no task is left."""
    async with Participant(tmp_path) as p:
        p.add("a", running=True)
        await p.prepare(within=0)
        assert p.channel is not None
        stub: Any = health_pb2_grpc.HealthStub(p.channel)
        check = health_pb2.HealthCheckRequest(service="gymckpt.v1.ParticipantService")
        assert (await stub.Check(check, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
        watch = p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=10)
        told = aiter(watch)
        await anext(told)
        await p.server.stop(0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in watch:
                pass
        assert not p.plane._core.tasks._tasks
