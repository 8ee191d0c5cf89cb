"""The file that carries a session: whole, private, and used by one command at a time."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from gym_ckpt_grpc.cli.session_file import SessionFile
from gym_ckpt_grpc.coordinator import Fleet, Server, SessionState, Step
from gym_ckpt_grpc.protocol.errors import UsageError

STATE = SessionState(
    purpose="checkpoint",
    checkpoint_id="c1",
    step=Step.PREPARED,
    controller_id="operator",
    run_id="operator",
    epoch=3,
    claim=7,
    root="file:///root",
    lease_ttl=300.0,
    fleet=Fleet([Server(kind="policy_model", service="policy", address="unix:policy.sock")]).to_mapping(),
)


@pytest.fixture
def file(tmp_path: Path) -> SessionFile:
    return SessionFile(tmp_path / "session")


def test_it_reads_back_and_nobody_else_can_read_it(file: SessionFile) -> None:
    file.write(STATE)
    assert file.read() == STATE
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.write(msgspec.structs.replace(STATE, step=Step.COMMITTED))
    assert file.read().step is Step.COMMITTED
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [entry.name for entry in file.path.parent.iterdir()] == ["session"]


def test_a_write_that_fails_leaves_the_old_one_whole(file: SessionFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write(STATE)

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UsageError, match="No space left"):
        file.write(msgspec.structs.replace(STATE, step=Step.COMMITTED))
    assert file.read() == STATE
    assert [entry.name for entry in file.path.parent.iterdir()] == ["session"]


def test_one_that_others_may_write_is_not_believed(file: SessionFile) -> None:
    """It says which servers are called with the token."""
    file.write(STATE)
    file.path.chmod(0o622)
    with pytest.raises(UsageError, match="chmod 600"):
        file.read()


def test_a_link_is_not_followed(file: SessionFile, tmp_path: Path) -> None:
    real = SessionFile(tmp_path / "real")
    real.write(STATE)
    file.path.symlink_to(real.path)
    with pytest.raises(UsageError, match="session"):
        file.read()


def test_damage_and_absence_are_named(file: SessionFile) -> None:
    with pytest.raises(UsageError, match=r"there is no session .*session"):
        file.read()
    file.path.write_bytes(b'{"format": "gymckpt.session"}')
    file.path.chmod(0o600)
    with pytest.raises(UsageError, match="session"):
        file.read()


def test_one_command_at_a_time(file: SessionFile) -> None:
    """A second one is refused at once; what the lock leaves goes with the session."""
    file.write(STATE)
    with file.held(), pytest.raises(UsageError, match="in use"), SessionFile(file.path).held():
        raise AssertionError("held twice")
    with file.held():
        file.remove()
    assert list(file.path.parent.iterdir()) == []
