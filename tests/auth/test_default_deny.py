"""Every method of every server against a written table: a new method fails until it is listed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc.aio import _server

from gym_ckpt_grpc.auth import ROLES, Authenticator, Role, TokenValue, is_reading
from gym_ckpt_grpc.capture.generation_servicer import GenerationServer
from gym_ckpt_grpc.control import ControlPlane, ParticipantServer, open_channel
from gym_ckpt_grpc.control.serving import HostedService
from gym_ckpt_grpc.coordinator import Coordinator, Fleet
from gym_ckpt_grpc.coordinator.served import CoordinatorServer
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from tests.auth.secured import Pki, by_certificates, code_of
from tests.control.scripted import ScriptedOwner

READ, WRITE, PEER = {"observer", "controller"}, {"controller"}, {"peer"}

DEBUGGING = {
    "/grpc.health.v1.Health/Check": READ,
    "/grpc.health.v1.Health/List": READ,
    "/grpc.health.v1.Health/Watch": READ,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": READ,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": READ,
    "/grpc.channelz.v1.Channelz/GetTopChannels": READ,
    "/grpc.channelz.v1.Channelz/GetServers": READ,
    "/grpc.channelz.v1.Channelz/GetServer": READ,
    "/grpc.channelz.v1.Channelz/GetServerSockets": READ,
    "/grpc.channelz.v1.Channelz/GetChannel": READ,
    "/grpc.channelz.v1.Channelz/GetSubchannel": READ,
    "/grpc.channelz.v1.Channelz/GetSocket": READ,
}
PARTICIPANT = {
    "/gymckpt.v1.ParticipantService/GetStatus": READ,
    "/gymckpt.v1.ParticipantService/WatchStatus": READ,
    "/gymckpt.v1.ParticipantService/ListEpisodes": READ,
    "/gymckpt.v1.ParticipantService/Prepare": WRITE,
    "/gymckpt.v1.ParticipantService/Capture": WRITE,
    "/gymckpt.v1.ParticipantService/Commit": WRITE,
    "/gymckpt.v1.ParticipantService/Resume": WRITE,
    "/gymckpt.v1.ParticipantService/Restore": WRITE,
    "/gymckpt.v1.ParticipantService/Retire": WRITE,
    "/gymckpt.v1.ParticipantService/Forget": WRITE,
    "/gymckpt.v1.ParticipantService/RenewLease": WRITE,
}
COORDINATOR = {
    "/gymckpt.v1.CoordinatorService/ListParticipants": READ,
    "/gymckpt.v1.CoordinatorService/GetCheckpoint": READ,
    "/gymckpt.v1.CoordinatorService/ListCheckpoints": READ,
    "/gymckpt.v1.CoordinatorService/ListCheckpointEpisodes": READ,
    "/gymckpt.v1.CoordinatorService/VerifyCheckpoint": READ,
    "/gymckpt.v1.CoordinatorService/WatchEvents": READ,
    "/gymckpt.v1.CoordinatorService/PrepareCheckpoint": WRITE,
    "/gymckpt.v1.CoordinatorService/CommitCheckpoint": WRITE,
    "/gymckpt.v1.CoordinatorService/PublishCheckpoint": WRITE,
    "/gymckpt.v1.CoordinatorService/ResumeCheckpoint": WRITE,
    "/gymckpt.v1.CoordinatorService/RestoreCheckpoint": WRITE,
    "/gymckpt.v1.CoordinatorService/RenewCheckpoint": WRITE,
    "/gymckpt.v1.CoordinatorService/RetireEpisodes": WRITE,
    "/gymckpt.v1.CoordinatorService/ForgetRollouts": WRITE,
    "/gymckpt.v1.CoordinatorService/DeleteCheckpoint": WRITE,
    "/gymckpt.v1.CoordinatorService/RunCheckpoint": WRITE,
}
GENERATION = {
    "/gymckpt.v1.GenerationService/GetBackend": PEER,
    "/gymckpt.v1.GenerationService/CutGenerations": PEER,
    "/gymckpt.v1.GenerationService/CheckCuts": PEER,
    "/gymckpt.v1.GenerationService/ReleaseCuts": PEER,
}
SERVERS = {"participant": PARTICIPANT, "coordinator": COORDINATOR, "generation": GENERATION}
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
CALLERS = ("", "stranger", "observer", "controller", "peer")


@asynccontextmanager
async def serving(name: str, root: Path, **options: Any) -> AsyncIterator[HostedService]:
    """One of our servers; nothing is behind those that no call of the test gets through to."""
    server: HostedService
    plane = None
    if name == "participant":
        identity = ParticipantIdentity(ParticipantKind.RESOURCES, "scripted")
        plane = ControlPlane(ScriptedOwner(), identity, roots=[str(root)])
        server = ParticipantServer(plane, **options)
    elif name == "coordinator":
        fleet = Fleet.from_mapping(
            {"servers": [{"kind": "agent", "service": "a", "address": "127.0.0.1:1"}], "require_kinds": []}
        )
        server = CoordinatorServer(Coordinator(fleet, root=str(root)), **options)
    else:
        engine: Any = None
        server = GenerationServer(engine, **options)
    async with server:
        yield server


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Full names of all methods that any server registers from now on."""
    names: set[str] = set()
    kind: Any = _server.Server
    real = kind.add_generic_rpc_handlers

    def noting(self: Any, handlers: Any) -> None:
        for handler in handlers:
            names.update(handler._method_handlers)
        real(self, handlers)

    monkeypatch.setattr(kind, "add_generic_rpc_handlers", noting)
    return names


def expected(roles: set[str], caller: str) -> str:
    if caller in ("", "stranger"):
        return "UNAUTHENTICATED"
    return "" if caller in roles else "PERMISSION_DENIED"


@pytest.mark.behaviour("C316")
def test_the_table_of_roles_is_the_written_one() -> None:
    """Method by method."""
    written = {**PARTICIPANT, **COORDINATOR, **GENERATION, **DEBUGGING}
    assert {method: set(map(str, roles)) for method, roles in ROLES.items()} == written


def test_what_changes_nothing() -> None:
    """What a reader may call, and what a peer only asks; all else is audited, also what is in no table."""
    asked = {"/gymckpt.v1.GenerationService/GetBackend", "/gymckpt.v1.GenerationService/CheckCuts"}
    written = {**PARTICIPANT, **COORDINATOR, **GENERATION, **DEBUGGING}
    for method, roles in written.items():
        assert is_reading(method) is (roles == READ or method in asked), method
    assert not is_reading("/gymckpt.v1.ParticipantService/New")


@pytest.mark.behaviour("C312", "C316", "C319", "C321")
@pytest.mark.parametrize("way", ["token", "certificate"])
@pytest.mark.parametrize("name", SERVERS)
async def test_every_method_and_every_caller(
    name: str, way: str, tmp_path: Path, pki: Pki, registered: set[str]
) -> None:
    """No, wrong, observer's, controller's and peer's credentials; the request is no message, so that none is done."""
    options: dict[str, Any] = {"tls": pki.server(clients=way == "certificate")}
    tokens = {role: TokenValue(f"token-of-{role}") for role in Role}
    options["authenticator"] = by_certificates() if way == "certificate" else Authenticator(tokens)
    table = {**SERVERS[name], **DEBUGGING}
    wrong = []
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(name, tmp_path, **options))
        assert registered == set(table)
        for caller in CALLERS:
            if way == "certificate" and not caller:
                continue  # it does not connect: test_mtls
            source = TokenValue(f"token-of-{caller}") if way == "token" and caller else None
            tls = pki.client(caller if way == "certificate" else "")
            channel = await stack.enter_async_context(open_channel(server.address, token=source, tls=tls))
            for method, roles in {**table, "/a.B/C": set[str]()}.items():
                code = await code_of(channel, method, b"\xff")
                due = expected(roles, caller)
                if (code if code in REFUSED else "") != due:
                    wrong.append((caller, method, code, due or "let in"))
    assert wrong == []


@pytest.mark.behaviour("C319")
@pytest.mark.parametrize("way", ["token", "certificate"])
async def test_open_health_opens_health_only(way: str, tmp_path: Path, pki: Pki) -> None:
    """To callers without credentials: of the table, three methods."""
    tokens = {role: TokenValue(f"token-of-{role}") for role in Role}
    authenticator = by_certificates(open_health=True)
    if way == "token":
        authenticator = Authenticator(tokens, open_health=True)
    tls = pki.server(clients=way == "certificate")
    client = pki.client("stranger" if way == "certificate" else "")
    async with (
        serving("participant", tmp_path, authenticator=authenticator, tls=tls) as server,
        open_channel(server.address, tls=client) as channel,
    ):
        codes = {method: await code_of(channel, method, b"\xff") for method in (*PARTICIPANT, *DEBUGGING, "/a.B/C")}
        opened = {method for method, code in codes.items() if code not in REFUSED}
        assert opened == {method for method in DEBUGGING if ".Health/" in method}
        assert await code_of(channel, "/grpc.health.v1.Health/Check") == "OK"


@pytest.mark.behaviour("C319")
async def test_both_names_of_reflection(tmp_path: Path) -> None:
    """The released one answers as the old one does."""
    from grpc_reflection.v1alpha import reflection_pb2

    ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="gymckpt.v1.ParticipantService")
    answers = []
    async with serving("participant", tmp_path) as server, open_channel(server.address) as channel:
        for version in ("v1", "v1alpha"):
            method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            multi: Any = channel.stream_stream(method)
            call = multi(iter([ask.SerializeToString()]), timeout=5)
            answers.append(await call.read())
    assert answers[0] == answers[1]
    reply = reflection_pb2.ServerReflectionResponse.FromString(answers[0])
    assert reply.WhichOneof("message_response") == "file_descriptor_response"
