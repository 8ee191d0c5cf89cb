"""Tokens: where they come from and what one call's credentials may do."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import pytest

from gym_ckpt_grpc.auth import ROLES, Authenticator, Role, TokenFile, TokenSource, TokenValue
from gym_ckpt_grpc.protocol.errors import PermissionDenied, Unauthenticated

STATUS = "/gymckpt.v1.ParticipantService/GetStatus"
PREPARE = "/gymckpt.v1.ParticipantService/Prepare"


def bearer(token: str | bytes) -> list[tuple[str, str | bytes]]:
    return [("authorization", b"Bearer " + token if isinstance(token, bytes) else f"Bearer {token}")]


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator({Role.OBSERVER: TokenValue("see"), Role.CONTROLLER: TokenValue("do")})


@pytest.mark.behaviour("C316")
def test_roles(authenticator: Authenticator) -> None:
    """An observer reads, a controller does everything, nobody calls what the table does not have."""
    authenticator.check(STATUS, bearer("see"))
    authenticator.check(STATUS, bearer("do"))
    authenticator.check(PREPARE, bearer("do"))
    with pytest.raises(PermissionDenied):
        authenticator.check(PREPARE, bearer("see"))
    for token in ("see", "do"):
        with pytest.raises(PermissionDenied):
            authenticator.check("/gymckpt.v1.ParticipantService/New", bearer(token))
    peer = Authenticator({Role.PEER: TokenValue("p")})
    for method in ROLES:
        if "/gymckpt.v1.GenerationService/" in method:
            peer.check(method, bearer("p"))
            continue
        with pytest.raises(PermissionDenied):
            peer.check(method, bearer("p"))


@pytest.mark.behaviour("C314")
@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "do")],
        [("authorization", "Basic do")],
        [("authorization", "Bearer d\u00f6")],
        [("authorization", b"Bearer d\xff")],
        [("authorization", "Bearer \udcff")],
        [("authorization", "Bearer  do")],
        [("authorization", "Bearer do ")],
        [*bearer("do"), *bearer("do")],
        [("x-authorization", "Bearer do")],
        bearer("DO"),
        bearer("do\n"),
        bearer("d"),
        bearer("dodo"),
    ],
)
def test_odd_credentials_are_no_credentials(
    authenticator: Authenticator, metadata: list[tuple[str, str | bytes]]
) -> None:
    """Not ASCII, empty, doubled, without a scheme, nearly right: UNAUTHENTICATED, and no other exception."""
    with pytest.raises(Unauthenticated):
        authenticator.check(STATUS, metadata)


def test_scheme_and_key_in_any_case(authenticator: Authenticator) -> None:
    """As HTTP has it."""
    authenticator.check(PREPARE, [("Authorization", "bearer do")])
    authenticator.check(PREPARE, bearer(b"do"))


@pytest.mark.behaviour("C315")
def test_every_token_is_compared_in_constant_time(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bytes, all of them on every call, whichever matches first."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(presented: bytes, token: bytes) -> bool:
        compared.append((presented, token))
        return real(presented, token)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for token in ("see", "do", "wrong"):
        compared.clear()
        try:
            authenticator.check(STATUS, bearer(token))
        except Unauthenticated:
            assert token == "wrong"
        assert compared == [(token.encode(), b"see"), (token.encode(), b"do")]


@pytest.mark.behaviour("C319")
def test_health_may_be_opened() -> None:
    """By setting, and nothing else with it."""
    health = "/grpc.health.v1.Health/Check"
    tokens = {Role.CONTROLLER: TokenValue("t")}
    with pytest.raises(Unauthenticated):
        Authenticator(tokens).check(health, [])
    opened = Authenticator(tokens, open_health=True)
    opened.check(health, [])
    with pytest.raises(Unauthenticated):
        opened.check(STATUS, [])


@pytest.mark.behaviour("C320")
@pytest.mark.parametrize("content", [b"token", b"token\n", b"token\r\n", b"  token\n\n"])
def test_a_newline_is_no_part_of_the_token(tmp_path: Path, content: bytes) -> None:
    """Nor are the blanks that an editor leaves."""
    path = tmp_path / "token"
    path.write_bytes(content)
    assert TokenFile(path).token() == b"token"


def test_token_files_that_cannot_be(tmp_path: Path) -> None:
    """Missing, empty, with what cannot travel in a header: refused at the start, naming the file, not the content."""
    path = tmp_path / "token"
    for content in (None, b"", b"\n", b"sec\nret", b"s\xffcret", b"sec ret", b"ret" * 7000):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match="token") as caught:
            TokenFile(path)
        assert str(path) in str(caught.value)
        assert "ret" not in str(caught.value).replace(str(path), "")
    for value in ("", "  ", "d\u00f6", "a b"):
        with pytest.raises(ValueError):
            TokenValue(value)
    with pytest.raises(ValueError):
        Authenticator({})


def test_a_token_file_is_read_again(tmp_path: Path) -> None:
    """When it changes, also within one tick of the clock and with the same length; a gap keeps the old token."""
    path = tmp_path / "token"
    path.write_text("one")
    source = TokenFile(path)
    new = tmp_path / "new"
    new.write_text("two")
    os.replace(new, path)
    source.refresh()
    assert source.token() == b"two"
    path.unlink()
    source.refresh()
    assert source.token() == b"two"
    path.write_text("")
    source.refresh()
    assert source.token() == b"two"
    path.write_text("not\none")
    source.refresh()
    assert source.token() == b"two"
    path.write_text("three")
    source.refresh()
    assert source.token() == b"three"


@pytest.mark.behaviour("C320")
def test_no_token_in_a_repr(tmp_path: Path) -> None:
    """Neither of the sources nor of what holds them."""
    path = tmp_path / "file"
    path.write_text("marker-token")
    sources: list[TokenSource] = [TokenValue("marker-token"), TokenFile(path)]
    shown = [repr(x) + str(x) for x in [*sources, Authenticator({Role.OBSERVER: sources[0], Role.PEER: sources[1]})]]
    assert "marker" not in "".join(shown)


@pytest.mark.behaviour("C320")
def test_files_that_are_no_files(tmp_path: Path) -> None:
    """A directory, a pipe (which would block), a dangling link, one that may not be read: named, at once."""
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    hidden = tmp_path / "hidden"
    hidden.write_text("token")
    hidden.chmod(0)
    names = ["directory", "pipe", "link", *(["hidden"] if os.geteuid() else [])]
    for name in names:
        with pytest.raises(ValueError, match="token file") as caught:
            TokenFile(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.behaviour("C320", "C317")
@pytest.mark.parametrize("content", [None, b"", b"\n", b"secret two", b"s\xffcret", b"secret" * 3500, "directory"])
def test_a_broken_replacement(tmp_path: Path, content: bytes | str | None, caplog: pytest.LogCaptureFixture) -> None:
    """The old token serves, with one warning that has no content; a usable file is taken up and says so."""
    path, new = tmp_path / "token", tmp_path / "new"
    path.write_text("first\r\n")
    source = TokenFile(path)
    path.unlink()
    if content == "directory":
        path.mkdir()
    elif isinstance(content, bytes):
        new.write_bytes(content)
        os.replace(new, path)
    for _ in range(3):
        source.refresh()
        assert source.token() == b"first"
    (warned,) = caplog.records
    assert str(path) in warned.getMessage()
    assert "cret" not in caplog.text.replace(str(path), "")
    if content == "directory":
        path.rmdir()
    new.write_text("  second \n")
    os.replace(new, path)
    source.refresh()
    assert source.token() == b"second"
    assert [record.getMessage() for record in caplog.records][1:] == [f"token file {path} can be used again"]


def test_two_writes_within_one_tick(tmp_path: Path) -> None:
    """Of one length and one change time: contents are compared, not times."""
    path = tmp_path / "token"
    path.write_text("token-1")
    source = TokenFile(path)
    stat = path.stat()
    path.write_text("token-2")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    source.refresh()
    assert source.token() == b"token-2"
