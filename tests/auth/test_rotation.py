"""Certificates and tokens replaced while calls go on: the next connection or call uses them, and no call fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.auth import (
    Authenticator,
    ClientTls,
    NamedRolesFile,
    Role,
    ServerTls,
    TokenFile,
    callers,
    certificates,
    files,
    tokens,
)
from gym_ckpt_grpc.control import open_channel, reloading
from gym_ckpt_grpc.minigym.authority import LOCAL_NAMES, YEAR, Authority, replace_file
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc
from tests.auth.secured import STATUS, Pki, Secured, by_certificates, code_of
from tests.control.scripted import context, eventually

CONTROLLER = ["URI:spiffe://gym.example/controller"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at often."""
    monkeypatch.setattr(files, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(reloading, "AGAIN", 0.02)


def serial(certificate: Path) -> str:
    from cryptography import x509

    return format(x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number, "x")


class Calls:
    """Calls without a break on one channel, and one stream that stays; any failure shows when it ends."""

    def __init__(self, channel: Any) -> None:
        self.stub: Any = participant_pb2_grpc.ParticipantServiceStub(channel)
        self.made = 0
        self._ended = False
        self._failures: list[BaseException] = []

    async def _go_on(self) -> None:
        while not self._ended:
            await self.stub.GetStatus(pb.GetStatusRequest(), timeout=10)
            self.made += 1

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Gives what waits for some more calls to have succeeded."""
        task = asyncio.create_task(self._go_on())

        async def some_more() -> None:
            until = self.made + 5
            await eventually(lambda: self.made >= until or task.done())
            assert not task.done(), task

        try:
            await some_more()
            yield some_more
            await some_more()
        finally:
            self._ended = True
            await task


async def reconnected(channel: Any, line: Any) -> None:
    await eventually(lambda: channel._current is not line)


@pytest.mark.behaviour("C317")
async def test_all_certificates_and_the_authority_change_under_calls(tmp_path: Path, pki: Pki) -> None:
    """With an overlap of the authorities: trust both, then replace the certificates, then trust the new one only.

    A stream that was begun at the start goes on over all of it, on its first connection.
    """
    ca = tmp_path / "bundle.pem"
    ca.write_bytes(pki.ca.read_bytes())
    server = ServerTls(*pki.pair("server"), client_ca=ca)
    certificate, key = pki.pair("controller")
    client = ClientTls(ca, certificate=certificate, key=key)
    async with Secured(tmp_path / "root", pki, tls=server, authenticator=by_certificates()) as p:
        channel: Any = open_channel(p.server.address, tls=client)
        async with channel:
            calls = Calls(channel)
            stream = calls.stub.WatchStatus(pb.WatchStatusRequest())
            assert (await stream.read()).status.phase == pb.PHASE_IDLE
            async with calls.going_on() as some_more:
                new = Authority(tmp_path / "new")
                replace_file(ca, pki.ca.read_bytes() + new.file.read_bytes())
                line = channel._current
                await reconnected(channel, line)
                await some_more()

                other = Pki(new)
                for name, sans in (("server", LOCAL_NAMES), ("controller", CONTROLLER)):
                    issued = new.issue(name, sans)
                    line = channel._current
                    # The key first: for a moment the two do not belong together.
                    for of, at in zip(reversed(issued), reversed(pki.pair(name)), strict=True):
                        replace_file(at, of.read_bytes())
                        await some_more()
                await reconnected(channel, line)
                await some_more()

                line = channel._current
                replace_file(ca, other.ca.read_bytes())
                await reconnected(channel, line)
                await some_more()
            await eventually(lambda: len(channel._retired) == 1)  # the stream's connection, and no other
            p.stub = calls.stub
            await p.prepare()
            while (await stream.read()).status.phase != pb.PHASE_PREPARED:
                pass
            stream.cancel()
            await eventually(lambda: not channel._retired)

    fresh = ClientTls(pki.ca, certificate=certificate, key=key)
    assert fresh.version == 1


@pytest.mark.behaviour("C317")
async def test_a_new_connection_has_the_servers_new_certificate(tmp_path: Path, pki: Pki) -> None:
    """At once, however short ago the file was looked at; the connection that stands is left alone."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p, p.as_("observer") as old:
        assert await code_of(old, STATUS) == "OK"
        host, _, port = p.server.address.rpartition(":")
        seen = [await asyncio.to_thread(peer_serial, host, int(port), pki)]
        pki.authority.issue("server", LOCAL_NAMES)
        seen.append(await asyncio.to_thread(peer_serial, host, int(port), pki))
        assert seen[1] == serial(pki.pair("server")[0])
        assert seen[0] != seen[1]
        assert await code_of(old, STATUS) == "OK"


def peer_serial(host: str, port: int, pki: Pki) -> str:
    """Serial number of the certificate that a server shows."""
    import socket
    import ssl

    context = ssl.create_default_context(cafile=str(pki.ca))
    context.load_cert_chain(*pki.pair("observer"))
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, port), 5) as plain, context.wrap_socket(plain, server_hostname=host) as tls:
        shown: Any = tls.getpeercert()
    return str(shown["serialNumber"]).lower().lstrip("0")


BROKEN: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes | None]]] = {
    "half of it": lambda certificate, key: (certificate[: len(certificate) // 2], key),
    "empty": lambda certificate, key: (b"", key),
    "no certificate": lambda certificate, key: (b"marker-secret\n", key),
    "damaged": lambda certificate, key: (certificate.replace(b"M", b"?", 3), key),
    "another's key": lambda certificate, key: (certificate, None),
    "half of the key": lambda certificate, key: (certificate, key[: len(key) // 2]),
    "no key": lambda certificate, key: (certificate, b"marker-secret\n"),
}


@pytest.mark.behaviour("C317", "C320")
@pytest.mark.parametrize("how", BROKEN)
def test_broken_files_leave_the_last_good_ones(
    tmp_path: Path, pki: Pki, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Warned of once, by name and without content; a good one that follows is used."""
    certificate, key = pki.pair("server")
    tls = ServerTls(certificate, key, client_ca=pki.ca)
    before = tls._kept.value
    good = pki.authority.issue("next", LOCAL_NAMES)
    content, secret = BROKEN[how](good[0].read_bytes(), good[1].read_bytes())
    replace_file(certificate, content)
    if secret is not None:
        replace_file(key, secret)
    for _ in range(3):
        tls.refresh()
    assert tls._kept.value is before
    assert tls.version == 1
    (warned,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    told = warned.getMessage()
    assert str(certificate) in told or str(key) in told
    assert "goes on being used" in told
    assert "marker" not in told
    assert "BEGIN" not in told
    for of, at in zip(good, (certificate, key), strict=True):
        replace_file(at, of.read_bytes())
    tls.refresh()
    assert tls.version == 2
    assert "can be used again" in caplog.text
    replace_file(certificate, content)
    replace_file(key, b"" if secret is None else secret)
    with pytest.raises(ValueError) as caught:
        ServerTls(certificate, key)
    assert "marker" not in str(caught.value)


@pytest.mark.behaviour("C317")
@pytest.mark.parametrize("bundle", [b"", b"junk", b"half", b"expired"])
def test_a_broken_authority_file(
    tmp_path: Path, pki: Pki, bundle: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every connection would fail with it: the one before stays."""
    ca = tmp_path / "bundle.pem"
    ca.write_bytes(pki.ca.read_bytes())
    tls = ClientTls(ca)
    if bundle == b"half":
        bundle = pki.ca.read_bytes() + pki.ca.read_bytes()[:100]
    elif bundle == b"expired":
        bundle = pki.ca.read_bytes() + b"\n"
        monkeypatch.setattr(certificates, "now", lambda: 4e9)
    replace_file(ca, bundle)
    tls.refresh()
    tls.refresh()
    assert tls.version == 1
    assert [r for r in caplog.records if str(ca) in r.getMessage()] == [*caplog.records]
    assert len(caplog.records) == 1


@pytest.mark.behaviour("C317")
def test_a_certificate_that_ends_is_warned_of_ahead(
    pki: Pki, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once when a tenth of its time is left, once when it has ended; one that has ended is not taken for a good one."""
    certificate, key = pki.authority.issue("server", LOCAL_NAMES, seconds=100.0, begins=0.0)
    begun = certificates.now()
    tls = ServerTls(certificate, key)
    clock = 0.0
    monkeypatch.setattr(certificates, "now", lambda: begun + clock)

    def told() -> list[str]:
        tls.refresh()
        tls.refresh()
        return [record.getMessage() for record in caplog.records]

    clock = 80.0
    assert told() == []
    clock = 95.0
    (soon,) = told()
    assert "expires soon" in soon
    assert str(certificate) in soon
    clock = 105.0
    assert [text.partition(": ")[0].split()[-2:] for text in told()] == [["expires", "soon"], ["has", "expired"]]
    caplog.clear()
    with pytest.raises(ValueError, match="has expired on 2"):
        ServerTls(certificate, key)
    pki.authority.issue("server", LOCAL_NAMES, seconds=YEAR)
    assert told() == []
    assert tls.version == 2
    pki.authority.issue("server", LOCAL_NAMES, seconds=YEAR, begins=3600.0)
    assert "not valid before" in told()[0]
    assert tls.version == 2


def test_a_weeks_warning_of_a_long_certificate(
    pki: Pki, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that looks at its files warns without any connection."""
    tls = pki.server()
    begun = certificates.now()
    monkeypatch.setattr(certificates, "now", lambda: begun + YEAR - 8 * 86400)
    tls.refresh()
    assert not caplog.records
    monkeypatch.setattr(certificates, "now", lambda: begun + YEAR - 6 * 86400)
    tls.refresh()
    assert "expires soon" in caplog.text


async def test_a_served_certificate_is_watched(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same through a server nobody connects to; its thread ends with the server."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        begun = certificates.now()
        monkeypatch.setattr(certificates, "now", lambda: begun + YEAR - 86400)
        await eventually(lambda: "expires soon" in caplog.text)
        watch: Any = p.tls._kept._watch
    assert watch._ended.is_set()
    assert p.tls._kept._watch is None


@pytest.mark.behaviour("C317")
async def test_files_that_the_server_does_not_accept(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's new certificate of an authority that the server does not know: the connection before goes on."""
    monkeypatch.setattr(reloading, "PATIENCE", 0.0)
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        channel: Any = p.channel
        async with Calls(channel).going_on() as some_more:
            first = channel._current
            issued = Authority(tmp_path / "other").issue("controller", CONTROLLER)
            for of, at in zip(issued, pki.pair("controller"), strict=True):
                replace_file(at, of.read_bytes())
            await eventually(lambda: "no connection with the changed" in caplog.text)
            await some_more()
            assert channel._current is first
            pki.authority.issue("controller", CONTROLLER)
            await reconnected(channel, first)


@pytest.mark.behaviour("C317")
async def test_a_channel_that_was_idle_has_the_new_certificate(tmp_path: Path, pki: Pki) -> None:
    """The server forgets the old authority; a channel that was never used connects with the new certificate."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        channel: Any = p.channel
        line = channel._current
        pki.authority.issue("controller", CONTROLLER)
        await reconnected(channel, line)
        assert await p.phase() == "IDLE"
        await eventually(lambda: not channel._retired)


async def test_files_that_change_while_a_channel_is_made(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another channel's thread has seen it and told those who listened by then: the new one is not left behind."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        tls = pki.client("controller")
        listen = tls.listen

        def late(listener: Callable[[], None]) -> Callable[[], None]:
            pki.authority.issue("controller", CONTROLLER)
            tls.refresh()
            return listen(listener)

        monkeypatch.setattr(tls, "listen", late)
        async with open_channel(p.server.address, tls=tls) as channel:
            made: Any = channel
            await eventually(lambda: made._current.version == tls.version == 2)
            assert await code_of(channel, STATUS) == "OK"


@pytest.mark.behaviour("C317")
async def test_files_are_looked_at_off_the_loop(tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens, roles and TLS, of servers and clients, in calls that are let in and in calls that are refused."""
    on_loop, elsewhere = list[Path](), set[Path]()
    real = files.read_file

    def read(what: str, path: Path) -> bytes:
        if asyncio._get_running_loop() is not None:
            on_loop.append(path)
        else:
            elsewhere.add(path)
        return real(what, path)

    for module in (tokens, callers):
        monkeypatch.setattr(module, "REFRESH_SECONDS", 0.0)
    token, own, roles = tmp_path / "token", tmp_path / "own", tmp_path / "roles"
    for file in (token, own):
        file.write_text("token")
    roles.write_text(f"controller: [{CONTROLLER[0]}]\n")
    authenticator = Authenticator({Role.OBSERVER: TokenFile(token)}, certificates=NamedRolesFile(roles))
    async with (
        Secured(tmp_path / "root", pki, authenticator=authenticator) as p,
        p.as_("stranger", token=TokenFile(own)) as by_token,
        p.as_("stranger") as stranger,
    ):
        monkeypatch.setattr(files, "read_file", read)
        monkeypatch.setattr(certificates, "read_file", read)
        await asyncio.to_thread(pki.authority.issue, "controller", CONTROLLER)
        pairs = [pki.pair(name) for name in ("server", "controller", "stranger")]
        everything = {token, own, roles, pki.ca, *itertools.chain(*pairs)}
        while not everything <= {*elsewhere, *on_loop}:
            assert await code_of(by_token, STATUS) == "OK"
            assert await code_of(p.channel, STATUS) == "OK"  # type: ignore[arg-type]
            assert await code_of(stranger, STATUS) == "UNAUTHENTICATED"
    assert on_loop == []


async def test_a_call_after_the_end(tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails as with any channel, also where its method was not called on the last connection: gRPC 1.85 crashes the
    process when it makes a method of a closed channel."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        channel: Any = open_channel(p.server.address, tls=pki.client("controller"))
        stub = participant_pb2_grpc.ParticipantServiceStub(channel)
        await channel.close()
        made = list[str]()
        line = type("Closed", (), {"__getattr__": lambda self, name: made.append(name)})()
        monkeypatch.setattr(channel._current, "channel", line)
        for method, request in ((stub.GetStatus, pb.GetStatusRequest()), (stub.WatchStatus, pb.WatchStatusRequest())):
            with pytest.raises(grpc.aio.UsageError):
                method(request, timeout=5)
        assert made == []


async def test_closing_while_the_files_change(tmp_path: Path, pki: Pki) -> None:
    """Nothing is left: neither a connection nor a task nor a listener."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        tls = pki.client("controller")
        for _ in range(3):
            channel: Any = open_channel(p.server.address, tls=tls)
            assert await code_of(channel, STATUS) == "OK"
            channel._changed()
            await channel.close()
            channel._changed()
            assert channel._renewing.done()
        assert tls._kept._watch is None


@pytest.mark.behaviour("C317")
async def test_tokens_change_under_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pki: Pki) -> None:
    """First the server's file, then the clients', or the other way round within one look: no call fails."""
    at_server, at_client = tmp_path / "server-token", tmp_path / "client-token"
    for file in (at_server, at_client):
        file.write_text("token-0\n")
    source = TokenFile(at_client)
    authenticator = Authenticator({Role.CONTROLLER: TokenFile(at_server)})
    async with Secured(tmp_path / "root", pki, clients=False, authenticator=authenticator, token=source) as p:
        calls = Calls(p.channel)
        async with calls.going_on() as some_more:
            for number in range(1, 4):
                # Both within one step of the loop, as for one file that both read.
                for file in (at_server, at_client):
                    replace_file(file, f"token-{number}\r\n".encode())
                source.refresh()
                await some_more()


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.behaviour("C317")
async def test_two_minutes_of_short_certificates(
    tmp_path: Path, pki: Pki, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates that hold for 60 s, replaced after 30 s, a checkpoint every 10 s for two minutes."""
    monkeypatch.setattr(files, "REFRESH_SECONDS", 1.0)
    monkeypatch.setattr(reloading, "AGAIN", 1.0)

    def renew() -> None:
        for name, sans in (("server", LOCAL_NAMES), ("controller", CONTROLLER)):
            pki.authority.issue(name, sans, seconds=60.0)

    renew()
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        p.add("a", "b")
        for number in range(12):
            if number and number % 3 == 0:
                replace_file(pki.pair("server")[0], b"half written")
                await eventually(lambda: "no whole certificate" in caplog.text)
                caplog.clear()
                renew()
            checkpoint = f"k{number}"
            await p.prepare(checkpoint)
            await p.commit(id=checkpoint)
            await p.resume(checkpoint)
            await asyncio.sleep(10)
        channel: Any = p.channel
        await eventually(lambda: not channel._retired)


async def _answer(call: Any) -> Any:
    return await call


async def test_calls_that_end_in_any_way_keep_no_connection(tmp_path: Path, pki: Pki) -> None:
    """Cancelled before they began, cancelled in the middle, out of time, refused, a stream that is left."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        channel: Any = p.channel
        line = channel._current
        status = pb.GetStatusRequest()
        at_once = p.stub.GetStatus(status, timeout=5)
        at_once.cancel()
        p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=5).cancel()
        p.owner.closes.hold()
        middle = p.stub.Prepare(pb.PrepareRequest(context=context("k1")), timeout=30)
        await p.owner.closes.entered.wait()
        middle.cancel()
        p.owner.closes.open.set()
        late = p.stub.GetStatus(status, timeout=1e-6)
        refused = p.stub.Prepare(pb.PrepareRequest(), timeout=5)
        task = asyncio.create_task(p.phase())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await refused
        await asyncio.gather(_answer(late), return_exceptions=True)
        stream = p.stub.WatchStatus(pb.WatchStatusRequest())
        await stream.read()
        stream.cancel()
        channel._changed()
        await eventually(lambda: channel._current is not line and not channel._retired)
