"""No token anywhere: in logs at every level, reprs, errors, the audit log, and what `ps` shows."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from gym_ckpt_grpc.auth import Authenticator, Role, TokenFile, TokenValue
from gym_ckpt_grpc.minigym.access import access_as
from gym_ckpt_grpc.minigym.deployment import Deployment
from tests.auth.secured import Pki, Secured, by_certificates
from tests.control.scripted import Participant
from tests.e2e.processes import clean_env

ROOT = Path(__file__).resolve().parents[2]
MARKERS = {name: f"marker-{name}-0123456789" for name in (*Role, "wrong")}


@pytest.mark.behaviour("C320")
@pytest.mark.timeout(180)
def test_a_process_as_loud_as_it_gets(tmp_path: Path) -> None:
    """Root logger at level 1, asyncio's debug mode, GRPC_VERBOSITY=DEBUG: every marker is asked for, none is found.

    In all that is printed, logged and left in files.
    """
    for name, marker in MARKERS.items():
        file = tmp_path / ("wrong" if name == "wrong" else f"{name}.token")
        file.write_text(marker)
    env = clean_env(GRPC_VERBOSITY="DEBUG", PYTHONPATH=str(ROOT), PYTHONASYNCIODEBUG="1")
    argv = [sys.executable, "-m", "tests.auth.loud_run", str(tmp_path)]
    ended = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 0, told
    assert ended.stdout.rstrip().endswith("done")
    for sign in ("UNAUTHENTICATED", "debug_error_string", "DEBUG:", "token file"):
        assert sign in told, "it was loud"
    audit = (tmp_path / "audit").read_text()
    assert audit.count("\n") >= 4
    for marker in MARKERS.values():
        assert marker not in told
        assert marker not in audit
        assert marker.encode().hex() not in told.replace(" ", "")


@pytest.mark.behaviour("C320")
def test_tokens_do_not_travel_by_accident(tmp_path: Path) -> None:
    """A value is copied as itself and not pickled; a file is pickled as its path."""
    value = TokenValue("marker")
    assert copy.deepcopy(value) is value
    assert copy.copy(value) is value
    with pytest.raises(TypeError) as caught:
        pickle.dumps(value)
    assert "marker" not in str(caught.value)
    path = tmp_path / "token"
    path.write_text("marker")
    pickled = pickle.dumps(TokenFile(path))
    assert b"marker" not in pickled
    assert pickle.loads(pickled).token() == b"marker"
    for shown in (value, TokenFile(path), Authenticator({Role.PEER: value})):
        assert "marker" not in f"{shown!r} {shown}"


@pytest.mark.behaviour("C320")
def test_no_command_line_has_a_secret(tmp_path: Path) -> None:
    """What `ps` shows of a deployment's processes, and what they inherit: paths only."""
    plan = Deployment.create(tmp_path / "gym")
    secrets = {plan.token_file(role).read_text().strip() for role in ("controller", "observer", "peer")}
    for spec in plan.specs(life=1):
        shown = " ".join((*spec.argv, *spec.env.values()))
        assert not [secret for secret in secrets if secret in shown]
    assert not [secret for secret in secrets if secret in plan.file.read_text()]
    for file in (plan.token_file("controller"), plan.tokens):
        assert file.stat().st_mode & 0o077 == 0
    assert "marker" not in repr(access_as("controller", plan))


@pytest.mark.behaviour("C320")
async def test_no_key_or_certificate_in_reprs(tmp_path: Path, pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    """Of what holds them."""
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates()) as p:
        tls = pki.client("controller")
        told = f"{tls!r} {vars(tls)} {p.tls!r} {vars(p.tls)} {vars(p.tls._kept)} {p.channel!r} {vars(p.server._host)}"
        value = repr(tls._kept.value)
    key = pki.pair("controller")[1].read_text().splitlines()[1]
    assert str(pki.pair("controller")[1]) in told
    assert key not in told + value
    assert "PRIVATE" not in told + value + caplog.text


@pytest.mark.parametrize(
    ("traces", "warned"),
    [
        ("", False),
        ("client_channel", False),
        ("a, http", True),
        ("all", True),
        ("*", True),
        ("tcp,a*", True),
        ("chttp2_hpack_parser", True),
    ],
)
async def test_a_trace_that_shows_headers_is_warned_of(
    tmp_path: Path, traces: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC's own, which nothing of ours can keep tokens out of."""
    monkeypatch.setitem(os.environ, "GRPC_TRACE", traces)
    async with Participant(tmp_path, authenticator=Authenticator({Role.CONTROLLER: TokenValue("t")})):
        assert ("writes tokens" in caplog.text) is warned
