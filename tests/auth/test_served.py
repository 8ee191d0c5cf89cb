"""Authentication of a served participant: first of all checks, and in front of everything that is served."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gym_ckpt_grpc.auth import ROLES, Authenticator, Caller, Role, TokenFile, TokenSource, TokenValue, files
from gym_ckpt_grpc.auth import tokens as tokens_module
from gym_ckpt_grpc.control import error_from, open_channel
from gym_ckpt_grpc.protocol.errors import PermissionDenied, Unauthenticated
from gymckpt.v1 import participant_pb2
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Participant, context, eventually, typed

SEE, DO = "marker-observer", "marker-controller"
TOKENS: dict[Role, TokenSource] = {Role.OBSERVER: TokenValue(SEE), Role.CONTROLLER: TokenValue(DO)}
ELSEWHERE = ("Coordinator", "Generation", "reflection.v1.Server")
SERVED = sorted(method for method in ROLES if not any(word in method for word in ELSEWHERE))
MUTATING = [
    "/gymckpt.v1.ParticipantService/" + method.name
    for method in participant_pb2.DESCRIPTOR.services_by_name["ParticipantService"].methods
    if method.GetOptions().idempotency_level == 2
]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Participant]:
    """A participant behind tokens, with a controller's channel."""
    async with Participant(tmp_path, authenticator=Authenticator(TOKENS), token=TokenValue(DO)) as p:
        yield p


async def call(p: Participant, method: str, metadata: Any = (), body: bytes = b"") -> grpc.aio.AioRpcError | None:
    """Call any method with raw bytes; None if it succeeded, else how it failed."""
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(p.server.address, options=options) as channel:
        multi: Any = channel.unary_stream(method)
        calling = multi(body, metadata=metadata, timeout=5)
        try:
            async for _ in calling:
                return None
        except grpc.aio.AioRpcError as failure:
            return failure
        return None


async def code_of(p: Participant, method: str, metadata: Any = (), body: bytes = b"") -> grpc.StatusCode:
    failure = await call(p, method, metadata, body)
    return grpc.StatusCode.OK if failure is None else failure.code()


def bearer(token: str) -> Any:
    return (("authorization", f"Bearer {token}"),)


@pytest.mark.behaviour("C312", "C313", "C319", "C321")
@pytest.mark.parametrize("method", [*SERVED, "/gymckpt.v1.ParticipantService/Unknown", "/a.B/C"])
async def test_every_method_is_behind_the_check(served: Participant, method: str) -> None:
    """Without a token, or with a wrong one: UNAUTHENTICATED, before the request is read, telling nothing."""
    await served.prepare()
    for metadata in ((), bearer("wrong"), bearer("")):
        failure = await call(served, method, metadata, b"\xff\xffnot a message")
        assert failure is not None
        assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
        assert failure.details() == "no valid credentials"
        known = error_from(failure)
        assert isinstance(known, Unauthenticated)
        assert (known.phase, known.active_checkpoint_id, known.participant, known.episodes) == ("", "", "", ())
    assert await served.phase() == "PREPARED"


@pytest.mark.behaviour("C312")
async def test_a_wrong_token_in_the_ordinary_client(served: Participant) -> None:
    """Unary and streaming calls alike."""
    channel = open_channel(served.server.address, token=TokenValue("wrong"))
    stub: Any = type(served.stub)(channel)
    with pytest.raises(Unauthenticated):
        await typed(stub.GetStatus(pb.GetStatusRequest(), timeout=5))
    with pytest.raises(Unauthenticated):
        await typed(anext(aiter(stub.WatchStatus(pb.WatchStatusRequest(), timeout=5))))
    await channel.close()


@pytest.mark.behaviour("C316")
@pytest.mark.parametrize("method", SERVED)
async def test_an_observer_reads(served: Participant, method: str) -> None:
    """PERMISSION_DENIED on every mutating RPC, before the request is read; everything else passes the check."""
    denied = method in MUTATING
    code = await code_of(served, method, bearer(SEE), b"\xff\xff" if denied else b"")
    assert (code is grpc.StatusCode.PERMISSION_DENIED) is denied
    assert code is not grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.behaviour("C316")
async def test_a_method_without_a_role_is_denied(served: Participant, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the controller too: a new method fails until it is listed."""
    assert await code_of(served, "/a.B/C", bearer(DO)) is grpc.StatusCode.PERMISSION_DENIED
    method = "/gymckpt.v1.ParticipantService/GetStatus"
    monkeypatch.delitem(ROLES, method)
    with pytest.raises(PermissionDenied):
        await typed(served.stub.GetStatus(pb.GetStatusRequest(), timeout=5))


@pytest.mark.behaviour("C319")
async def test_reflection_health_and_channelz_with_a_token(served: Participant) -> None:
    """They answer to an observer."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert await code_of(served, method, bearer(SEE), ask) is grpc.StatusCode.OK
    for service in ("", "gymckpt.v1.ParticipantService"):
        check = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        assert await code_of(served, "/grpc.health.v1.Health/Check", bearer(SEE), check) is grpc.StatusCode.OK
    assert await code_of(served, "/grpc.channelz.v1.Channelz/GetServers", bearer(SEE)) is grpc.StatusCode.OK


@pytest.mark.behaviour("C319")
async def test_health_opened_by_setting(tmp_path: Path) -> None:
    """For probes that have no token; nothing else is opened with it."""
    async with Participant(tmp_path, authenticator=Authenticator(TOKENS, open_health=True)) as p:
        assert await code_of(p, "/grpc.health.v1.Health/Check") is grpc.StatusCode.OK
        assert await code_of(p, "/gymckpt.v1.ParticipantService/GetStatus") is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.behaviour("C314")
async def test_odd_authorization_values(served: Participant) -> None:
    """On the wire; the server keeps serving."""
    odd: list[Any] = [
        (("authorization", ""),),
        (("authorization", DO),),
        (("authorization", "Bearer"),),
        (*bearer(DO), *bearer(DO)),
        (("authorization-bin", b"Bearer " + DO.encode()),),
    ]
    for metadata in odd:
        code = await code_of(served, "/gymckpt.v1.ParticipantService/GetStatus", metadata)
        assert code is grpc.StatusCode.UNAUTHENTICATED, metadata
    assert await served.phase() == "IDLE"


async def test_tokens_change_while_serving(tmp_path: Path) -> None:
    """Without a restart and without a failed call: first the server's file, then the client's."""
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    source = TokenFile(secret)
    async with Participant(tmp_path, authenticator=Authenticator({Role.CONTROLLER: TokenFile(secret)})) as p:
        assert p.channel is not None
        await p.channel.close()
        p.channel = open_channel(p.server.address, token=source)
        p.stub = type(p.stub)(p.channel)
        assert await p.phase() == "IDLE"
        for number in range(5):
            new = tmp_path / "new"
            new.write_text(f"token-{number}\n")
            os.replace(new, secret)
            source.refresh()
            assert await p.phase() == "IDLE"
        old = open_channel(p.server.address, token=TokenValue("first"))
        with pytest.raises(Unauthenticated):
            await typed(type(p.stub)(old).GetStatus(pb.GetStatusRequest(), timeout=5))
        await old.close()


async def test_an_old_token_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced token is refused once the file is looked at again."""
    secret = tmp_path / "secret"
    secret.write_text("old")
    async with Participant(
        tmp_path, authenticator=Authenticator({Role.CONTROLLER: TokenFile(secret)}), token=TokenValue("old")
    ) as p:
        assert await p.phase() == "IDLE"
        secret.write_text("new-token")
        monkeypatch.setattr(tokens_module, "REFRESH_SECONDS", 0.0)
        with pytest.raises(Unauthenticated):
            await typed(p.stub.GetStatus(pb.GetStatusRequest(), timeout=5))


@pytest.mark.behaviour("C320")
async def test_no_token_is_written_anywhere(
    served: Participant, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the most verbose level, failing authentication and failing calls included."""
    caplog.set_level(logging.DEBUG)
    method = "/gymckpt.v1.ParticipantService/GetStatus"
    for token in (DO, SEE, DO + "x"):
        await call(served, method, bearer(token))
        await call(served, "/gymckpt.v1.ParticipantService/Prepare", bearer(token), b"\xff")
    served.owner.restored_pending = None  # type: ignore[method-assign,assignment]
    failure = await call(served, method, bearer(DO))
    assert failure is not None
    told = caplog.text + "".join(capfd.readouterr()) + repr(failure) + repr(served.token)
    assert "incident" in told
    assert "marker" not in told


@pytest.mark.behaviour("C319")
async def test_a_channel_sends_its_token_with_calls_of_every_arity(served: Participant) -> None:
    """Reflection takes a stream of requests; a unary method takes one from a stream as well."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
    channel: Any = served.channel
    call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(iter([ask]), timeout=5)
    assert b"gymckpt.v1.ParticipantService" in await call.read()
    method = channel.stream_unary("/grpc.health.v1.Health/Check")
    assert health_pb2.HealthCheckResponse.FromString(await method(iter([b""]), timeout=5)).status


async def test_refused_callers_do_not_take_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files lie on a disk that hangs: one thread waits for it, whatever strangers send, and however often they
    go away. Each of them is answered by a look that began after it came."""
    secret = tmp_path / "secret"
    secret.write_text("token")
    source = TokenFile(secret)
    authenticator = Authenticator({Role.CONTROLLER: source})
    hangs, looks, checked = threading.Event(), list[None](), list[None]()
    check = authenticator.check

    def refresh() -> None:
        looks.append(None)
        hangs.wait(10)
        TokenFile.refresh(source)

    def checking(method: str, metadata: Any, peer: Any = None) -> Caller:
        if bearer("wrong")[0] not in metadata:
            checked.append(None)
        return check(method, metadata, peer)

    monkeypatch.setattr(source, "refresh", refresh)
    monkeypatch.setattr(authenticator, "check", checking)
    monkeypatch.setattr(files, "HANGS_SECONDS", 60.0)
    async with Participant(tmp_path, authenticator=authenticator) as p, open_channel(p.server.address) as channel:
        status = "/gymckpt.v1.ParticipantService/GetStatus"
        method: Any = channel.unary_unary(status)
        gone = [method(b"", metadata=bearer("wrong"), timeout=20) for _ in range(50)]
        await eventually(lambda: bool(looks))
        for left in gone:
            left.cancel()
        stay = [asyncio.ensure_future(code_of(p, status, bearer(f"new-{n % 2}"))) for n in range(50)]
        await eventually(lambda: len(checked) == len(stay))
        assert len(looks) == 1
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5) == "free"
        secret.write_text("new-1")
        hangs.set()
        codes = await asyncio.gather(*stay)
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK] * 25
    assert len(looks) < 10


@pytest.mark.parametrize("side", ["server", "client"])
async def test_a_disk_that_hangs_holds_up_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """Its last token serves, in one thread's wait for it; with the disk back, files are read again."""
    secret = tmp_path / "secret"
    secret.write_text("token")
    at_server, at_client = TokenFile(secret), TokenFile(secret)
    source = at_server if side == "server" else at_client
    hangs, looks = threading.Event(), list[None]()

    def refresh() -> None:
        looks.append(None)
        hangs.wait(20)
        TokenFile.refresh(source)

    monkeypatch.setattr(files, "HANGS_SECONDS", 0.01)
    monkeypatch.setattr(source, "stale", lambda: True)
    monkeypatch.setattr(source, "refresh", refresh)
    authenticator = Authenticator({Role.CONTROLLER: at_server})
    async with Participant(tmp_path, authenticator=authenticator, token=at_client) as p:
        assert {await asyncio.wait_for(p.phase(), 5) for _ in range(20)} == {"IDLE"}
        assert len(looks) == 1
        hangs.set()
        while len(looks) < 2:
            await p.phase()


async def test_credentials_come_before_every_other_check(served: Participant) -> None:
    """A request that is wrong in each way is told of its credentials only."""
    request = pb.PrepareRequest(context=context("a b", epoch=0))
    channel = open_channel(served.server.address)
    stub: Any = type(served.stub)(channel)
    with pytest.raises(Unauthenticated):
        await typed(stub.Prepare(request))
    await channel.close()
