"""Where commands have certificates from: options, else the environment; and which commands have them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_ckpt_grpc.auth import NamedRolesFile, TokenValue
from gym_ckpt_grpc.cli import access
from gym_ckpt_grpc.cli.access import authenticator_of, client_tls, server_tls, with_tls
from gym_ckpt_grpc.cli.app import app
from gym_ckpt_grpc.cli.server_commands import app as all_commands
from gym_ckpt_grpc.cli.up import _planned, up
from gym_ckpt_grpc.minigym.authority import replace_file
from gym_ckpt_grpc.minigym.deployment import Deployment
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.protocol.errors import UsageError
from tests.auth.secured import Pki

VARIABLES = ("GYM_CKPT_TLS_CA", "GYM_CKPT_TLS_CERT", "GYM_CKPT_TLS_KEY", "GYM_CKPT_TLS_SERVER_NAME")


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    token = access._given.set(access._Given())
    yield
    access._given.reset(token)


def given(**options: Any) -> Any:
    """What a command gets to see."""
    seen: list[Any] = []

    @with_tls
    def command(word: str) -> None:
        seen.append(client_tls())

    command("x", **options)
    return seen[0]


def test_options_before_the_environment(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for itself; nothing given is plain text."""
    certificate, key = pki.pair("controller")
    assert given() is None
    found = given(tls_ca=str(pki.ca), tls_cert=certificate, tls_key=key)
    assert str(certificate) in repr(found)
    for name, value in zip(VARIABLES, (pki.ca, *pki.pair("observer"), "name.example"), strict=True):
        monkeypatch.setenv(name, str(value))
    assert "observer" in repr(given())
    assert given().server_name == "name.example"
    assert "controller" in repr(given(tls_cert=certificate, tls_key=key))
    assert "None, None" in repr(given(tls_ca="system").without_certificate())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tls_cert": "controller.pem", "tls_key": "controller.key"}, "--tls-ca"),
        ({"tls_ca": "ca.pem", "tls_cert": "controller.pem"}, "needs its key"),
        ({"tls_ca": "missing.pem"}, "missing.pem"),
        ({"tls_ca": "controller.key"}, "controller.key"),
        ({"tls_ca": "ca.pem", "tls_cert": "controller.pem", "tls_key": "observer.key"}, "do not belong together"),
    ],
)
def test_what_cannot_be(pki: Pki, options: dict[str, str], told: str) -> None:
    """An error of usage that names the option or the file."""
    with pytest.raises(UsageError, match=told):
        given(**{name: str(pki.ca.with_name(value)) for name, value in options.items()})


def test_a_servers_files(pki: Pki, tmp_path: Path) -> None:
    """Half a pair, or a client's authority alone, is refused."""
    certificate, key = pki.pair("server")
    assert server_tls(None, None, None) is None
    full = server_tls(certificate, key, pki.ca)
    assert full is not None
    assert full.asks_clients
    for half in ((certificate, None, None), (None, key, None), (None, None, pki.ca)):
        with pytest.raises(UsageError):
            server_tls(*half)
    roles = tmp_path / "roles.yaml"
    replace_file(roles, b"peer: ['DNS:x']")
    assert authenticator_of(None, None, None) is None
    for token in (None, TokenValue("t")):
        found = authenticator_of(token, None, roles)
        assert found is not None
        assert isinstance(found._certificates, NamedRolesFile)
    replace_file(roles, b"nobody: ['DNS:x']")
    with pytest.raises(UsageError, match=str(roles)):
        authenticator_of(None, None, roles)


def test_every_command_that_takes_a_token_takes_certificates() -> None:
    """Those that call servers. `nemo-gym` serves one: its files stand in the configuration."""
    assert app is all_commands
    lacking = []
    for command in app.registered_commands:
        assert command.callback is not None
        options = inspect.signature(command.callback).parameters
        if "token_file" in options and not {"tls_ca", "tls_cert", "tls_key"} <= set(options):
            lacking.append(command.callback.__name__)
    assert lacking == ["nemo_gym"]


def test_a_command_says_what_is_wrong(pki: Pki, tmp_path: Path) -> None:
    """On one line, with the exit code of a wrong call, and before it asks anybody."""
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("require_kinds: []\nservers: [{kind: agent, service: a, address: 'gym.example:1'}]\n")
    argv = ["status", "--fleet", str(fleet), "--tls-ca", str(pki.pair("server")[1])]
    ended = CliRunner().invoke(app, argv)
    assert ended.exit_code == 2, ended.output
    assert "has no whole certificate" in " ".join(ended.output.split())


@pytest.mark.parametrize("option", ["mtls", "audit"])
async def test_a_directory_without_what_is_asked_for(tmp_path: Path, option: str) -> None:
    """`up` does not go on with tokens where certificates are asked for; what is not asked for stays as it is."""
    Deployment.create(tmp_path / "plain")
    asked: dict[str, Any] = {"mtls": False, "audit": False} | {option: True}
    with pytest.raises(UsageError, match=f"without --{option}"):
        await asyncio.wait_for(up(directory=tmp_path / "plain", rollouts=0, as_json=True, **asked), 20)
    made = _planned(tmp_path / "other", Topology(**asked))
    assert getattr(_planned(tmp_path / "other", Topology()).topology, option)
    assert made == _planned(tmp_path / "other", Topology(**asked))
