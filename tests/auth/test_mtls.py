"""Roles of certificates: who is let in, who is not told anything, and what comes before decoding."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.auth import Authenticator, NamedRoles, NamedRolesFile, Role, TokenValue
from gym_ckpt_grpc.auth import callers as callers_module
from gym_ckpt_grpc.control import ControlPlane, ParticipantServer, error_from, open_channel
from gym_ckpt_grpc.minigym.authority import Authority, replace_file
from gym_ckpt_grpc.protocol.errors import Unauthenticated, UsageError
from gymckpt.v1 import participant_pb2 as pb
from tests.auth.secured import STATUS, Pki, Secured, by_certificates, code_of, raw
from tests.control.scripted import ScriptedOwner

PREPARE = "/gymckpt.v1.ParticipantService/Prepare"
WATCH = "/gymckpt.v1.ParticipantService/WatchStatus"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
ARITIES = [STATUS, PREPARE, WATCH, REFLECTION, "/gymckpt.v1.ParticipantService/Unknown"]


@pytest.fixture
async def served(tmp_path: Path, pki: Pki) -> AsyncIterator[Secured]:
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        yield p


@pytest.mark.behaviour("C317")
async def test_the_role_comes_from_the_certificate(served: Secured) -> None:
    """A controller changes, an observer reads, a peer does neither; by URI names."""
    await served.prepare()
    assert await served.phase() == "PREPARED"
    async with served.as_("observer") as channel:
        assert await code_of(channel, STATUS) == "OK"
        assert await code_of(channel, PREPARE, b"\xff") == "PERMISSION_DENIED"
    async with served.as_("peer") as channel:
        assert await code_of(channel, STATUS) == "PERMISSION_DENIED"


@pytest.mark.behaviour("C317", "C321", "C313")
@pytest.mark.parametrize("method", ARITIES)
async def test_a_certificate_without_a_role_learns_nothing(served: Secured, method: str) -> None:
    """It comes from the right authority, and no name of it is in the mapping: unknown, whatever the arity, before its
    bytes are decoded."""
    await served.prepare()
    async with served.as_("stranger") as channel:
        failure = await raw(channel, method, b"\xff\xffnot a message")
    assert failure is not None
    known = error_from(failure)
    assert isinstance(known, Unauthenticated)
    assert failure.details() == "no valid credentials"
    assert (known.phase, known.active_checkpoint_id, known.participant, known.episodes) == ("", "", "", ())


@pytest.mark.behaviour("C313")
async def test_a_known_certificate_and_a_malformed_request(served: Secured) -> None:
    """Decoding comes after the check, and its failure is typed as it is without certificates."""
    assert served.channel is not None
    assert await code_of(served.channel, PREPARE, b"\xff") == "INVALID_ARGUMENT"
    assert await code_of(served.channel, "/a.B/C") == "PERMISSION_DENIED"
    missing = "/gymckpt.v1.CoordinatorService/GetCheckpoint"  # listed, and not served here
    assert await code_of(served.channel, missing) == "UNIMPLEMENTED"


@pytest.mark.behaviour("C317")
@pytest.mark.parametrize("name", ["", "foreign"])
async def test_no_certificate_or_one_of_another_authority_does_not_connect(
    served: Secured, pki: Pki, name: str, tmp_path: Path
) -> None:
    """TLS refuses it before any call."""
    other = Authority(tmp_path / "other")
    other.issue("foreign", ["URI:spiffe://gym.example/controller"])
    tls = Pki(other).client(name, ca=pki.ca)
    async with open_channel(served.server.address, tls=tls) as channel:
        assert await code_of(channel, STATUS) == "UNAVAILABLE"


@pytest.mark.behaviour("C317")
async def test_the_servers_name_is_compared(tmp_path: Path, pki: Pki) -> None:
    """A certificate of another host is refused by the client, and accepted under the name that it has."""
    pki.authority.issue("server", ["DNS:elsewhere.example"])
    async with Secured(tmp_path / "root", pki, clients=False, authenticator=Authenticator(TOKENS)) as p:
        async with open_channel(p.server.address, token=TOKENS[Role.CONTROLLER], tls=pki.client()) as channel:
            assert await code_of(channel, STATUS) == "UNAVAILABLE"
        tls = pki.client(server_name="elsewhere.example")
        async with open_channel(p.server.address, token=TOKENS[Role.CONTROLLER], tls=tls) as channel:
            assert await code_of(channel, STATUS) == "OK"


TOKENS = {Role.CONTROLLER: TokenValue("marker-controller"), Role.OBSERVER: TokenValue("marker-observer")}


@pytest.mark.behaviour("C317", "C312")
async def test_a_presented_token_decides(tmp_path: Path, pki: Pki) -> None:
    """Both ways in are open; a token is judged alone, for better and for worse."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates(dict(TOKENS))) as p:
        async with p.as_("controller") as channel:
            assert await code_of(channel, STATUS) == "OK"
            for wrong in ("wrong", ""):
                presented = [("authorization", f"Bearer {wrong}")]
                assert await code_of(channel, STATUS, metadata=presented) == "UNAUTHENTICATED"
            assert await code_of(channel, PREPARE, b"\xff", [("authorization", "Bearer marker-observer")]) == (
                "PERMISSION_DENIED"
            )
        async with p.as_("stranger") as channel:
            assert await code_of(channel, STATUS) == "UNAUTHENTICATED"
            assert await code_of(channel, STATUS, metadata=[("authorization", "Bearer marker-observer")]) == "OK"


@pytest.mark.behaviour("C317")
def test_a_token_is_judged_without_the_certificate() -> None:
    """By the check itself, whoever calls it; and without tokens every token is wrong."""
    peer = {"peer_uri": [b"spiffe://gym.example/controller"]}
    for authenticator in (by_certificates(), by_certificates(dict(TOKENS))):
        assert authenticator.check(STATUS, [], peer).role == Role.CONTROLLER
        for value in ("Bearer wrong", "", "Basic x"):
            assert not authenticator.needs_peer(STATUS, [("authorization", value)])
            with pytest.raises(Unauthenticated):
                authenticator.check(STATUS, [("authorization", value)], peer)


@pytest.mark.behaviour("C312", "C318")
async def test_tls_without_client_certificates(tmp_path: Path, pki: Pki) -> None:
    """The server's certificate encrypts, tokens say who calls; an address beyond this host then needs no more."""
    serving: dict[str, Any] = {"address": "0.0.0.0:0", "authenticator": Authenticator(TOKENS)}
    async with Secured(tmp_path / "root", pki, clients=False, token=TOKENS[Role.CONTROLLER], **serving) as p:
        address = p.server.address.replace("0.0.0.0", "127.0.0.1")
        async with open_channel(address, token=TOKENS[Role.OBSERVER], tls=pki.client()) as channel:
            assert await code_of(channel, STATUS) == "OK"
        async with open_channel(address, token=TokenValue("wrong"), tls=pki.client()) as channel:
            assert await code_of(channel, STATUS) == "UNAUTHENTICATED"


@pytest.mark.behaviour("C318")
async def test_where_a_server_does_not_start(tmp_path: Path, pki: Pki) -> None:
    """Beyond this host: without an authenticator never, without TLS on request only. Nor with roles nobody can have."""
    owner = ScriptedOwner()
    plane = ControlPlane(owner, Secured(tmp_path / "root", pki).identity, roots=[str(tmp_path)])
    tokens, tls, half = Authenticator(TOKENS), pki.server(), pki.server(clients=False)
    for address in ("0.0.0.0:0", "[::]:0", "gym.example:7000", "::1:7000"):
        for refused in (
            {},
            {"authenticator": tokens},
            {"allow_insecure": True},
            {"tls": tls},
            {"tls": tls, "allow_insecure": True},
        ):
            with pytest.raises(UsageError, match="not local"):
                ParticipantServer(plane, address, **refused)
        ParticipantServer(plane, address, authenticator=tokens, allow_insecure=True)
        ParticipantServer(plane, address, authenticator=tokens, tls=half)
        ParticipantServer(plane, address, authenticator=by_certificates(), tls=tls)
    for without in (None, half):
        with pytest.raises(UsageError, match="client_ca"):
            ParticipantServer(plane, authenticator=by_certificates(), tls=without)
    with pytest.raises(UsageError, match="not local"):
        open_channel("gym.example:7000", token=TOKENS[Role.CONTROLLER])
    await plane.close()


@pytest.mark.behaviour("C317")
async def test_a_mapping_that_changes(tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is added is let in at once; one that is taken out is cut off on the connection that it has."""
    monkeypatch.setattr(callers_module, "REFRESH_SECONDS", 0.0)
    file = tmp_path / "roles.yaml"
    file.write_text("controller: ['URI:spiffe://gym.example/controller']\n")
    authenticator = Authenticator(certificates=NamedRolesFile(file))
    async with Secured(tmp_path / "root", pki, authenticator=authenticator) as p, p.as_("stranger") as channel:
        assert await code_of(channel, STATUS) == "UNAUTHENTICATED"
        replace_file(file, b"observer: ['URI:spiffe://gym.example/stranger']\n")
        assert await code_of(channel, STATUS) == "OK"
        assert p.channel is not None
        assert await code_of(p.channel, STATUS) == "UNAUTHENTICATED"
        replace_file(file, b"observer: [oops")
        assert await code_of(channel, STATUS) == "OK"


NAMES = {
    Role.CONTROLLER: ["URI:spiffe://gym.example/trainer", "email:Ops@gym.example"],
    Role.OBSERVER: ["DNS:Board.gym.example", "URI:spiffe://gym.example/people/*"],
    Role.PEER: ["URI:spiffe://gym.example/trainer", "DNS:policy.gym.example"],
}


@pytest.mark.behaviour("C317")
@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (["URI:spiffe://gym.example/trainer"], "controller peer"),
        (["URI:spiffe://gym.example/trainer/"], ""),
        (["URI:spiffe://GYM.example/trainer"], ""),
        (["URI:spiffe://gym.example/train"], ""),
        (["DNS:spiffe://gym.example/trainer"], ""),
        (["DNS:board.gym.example"], "observer"),
        (["URI:board.gym.example"], ""),
        (["DNS:*.gym.example"], ""),
        (["email:Ops@gym.example"], "controller"),
        (["email:ops@gym.example"], ""),
        (["URI:spiffe://gym.example/people/ann"], "observer"),
        (["URI:spiffe://gym.example/people/"], ""),
        (["URI:spiffe://gym.example/people"], ""),
        (["URI:spiffe://gym.example/people/ann/x"], ""),
        (["URI:spiffe://gym.example/people/ann?x"], ""),
        (["URI:spiffe://gym.example/people/ann\n"], ""),
        (["DNS:x", "DNS:policy.gym.example", "DNS:board.gym.example"], "observer peer"),
        ([], ""),
    ],
)
def test_names_and_roles(names: list[str], roles: str) -> None:
    """Exactly the kind and value that is given; `*` is one part at the end of a path; names add up."""
    peer: dict[str, list[bytes]] = {}
    keys = {"URI": "peer_uri", "DNS": "peer_dns", "email": "peer_email"}
    for name in names:
        kind, _, value = name.partition(":")
        peer.setdefault(keys[kind], []).append(value.encode())
    found = NamedRoles(NAMES).roles_of(callers_module.names_of(peer))
    assert sorted(found) == roles.split()


@pytest.mark.behaviour("C317")
@pytest.mark.parametrize(
    "name",
    ["", "spiffe://gym.example/x", "CN:x", "DNS:", "DNS:*.gym.example", "URI:spiffe://gym.example/*/x", "URI:*",
     "URI:spiffe://*", "URI:spiffe://gym.example/a*", "email:*@gym.example", "URI:spiffe://x/*/*", "DNS:a b"],
)  # fmt: skip
def test_names_that_cannot_be(name: str) -> None:
    """A pattern that would match more than it seems is refused at the start."""
    with pytest.raises(ValueError):
        NamedRoles({Role.OBSERVER: [name]})


def test_role_files_that_cannot_be(tmp_path: Path) -> None:
    """The error names the file and what is wrong."""
    file = tmp_path / "roles.yaml"
    for content in ("", "[]", "root: [DNS:x]", "observer: DNS:x", "observer: [1]", "observer: []", "a: b: c", "\x00"):
        file.write_text(content)
        with pytest.raises(ValueError, match="roles file") as caught:
            NamedRolesFile(file)
        assert str(file) in str(caught.value)


@pytest.mark.behaviour("C317")
@pytest.mark.parametrize("more", [["URI:spiffe://gym.example/controller\0.elsewhere"], ["DNS:b\0x", "email:a@b"]])
async def test_a_name_with_a_nul_is_no_name(served: Secured, pki: Pki, more: list[str]) -> None:
    """gRPC would end it there, and a name below somebody's own would become another's. Such a certificate has no
    name at all; zeros of an address are nothing of the kind."""
    address = "IP:10.0.0.1"
    pki.authority.issue("cut", [address, *more, "URI:spiffe://gym.example/observer"])
    pki.authority.issue("whole", [address, "URI:spiffe://gym.example/observer"])
    for name, code in (("cut", "UNAUTHENTICATED"), ("whole", "OK")):
        async with served.as_(name) as channel:
            assert await code_of(channel, STATUS) == code


def test_a_certificate_that_cannot_be_read_has_no_names() -> None:
    """It would have to be gRPC's fault: nobody is let in by it."""
    for certificate in (b"", b"\xff", b"-----BEGIN CERTIFICATE-----\nMAMCAQA=\n-----END CERTIFICATE-----\n"):
        peer = {"peer_uri": [b"spiffe://gym.example/trainer"], "x509_pem_cert": [certificate]}
        assert callers_module.names_of(peer) == []


@pytest.mark.behaviour("C317")
async def test_the_last_name_can_be_taken_out(tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list without names is meant; a file that is empty or half written is not, and leaves the roles as they are."""
    monkeypatch.setattr(callers_module, "REFRESH_SECONDS", 0.0)
    file = tmp_path / "roles.yaml"
    file.write_text("controller:\n  - URI:spiffe://gym.example/controller\n")
    authenticator = Authenticator(certificates=NamedRolesFile(file))
    async with Secured(tmp_path / "root", pki, authenticator=authenticator) as p:
        channel: Any = p.channel
        for content, code in (("", "OK"), ("controller:\n", "OK"), ("controller: []\n", "UNAUTHENTICATED")):
            replace_file(file, content.encode())
            assert await code_of(channel, STATUS) == code


async def test_a_certificate_in_a_call_of_the_real_client(served: Secured) -> None:
    """Typed stubs, unary and streaming, over the channel that reloads."""
    assert (await served.stub.GetStatus(pb.GetStatusRequest(), timeout=5)).status.phase == pb.PHASE_IDLE
    async for reply in served.stub.WatchStatus(pb.WatchStatusRequest(), timeout=5):
        assert reply.status.phase == pb.PHASE_IDLE
        break
