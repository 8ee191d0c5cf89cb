"""`gym-ckpt nemo-gym` in an environment without NeMo Gym: what it passes on, and what it says is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_ckpt_grpc.cli.server_commands import app
from gym_ckpt_grpc.integrations.nemo_gym import launch
from gym_ckpt_grpc.protocol.errors import InvalidArgument
from tests.e2e.processes import run


@pytest.mark.skipif(find_spec("nemo_gym") is not None, reason="NeMo Gym is installed here")
def test_what_is_missing_is_one_line_that_says_what_to_install() -> None:
    ended = run("nemo-gym", "counter", "--control", "127.0.0.1:7001")
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: nemo_gym is not installed in ")
    assert "pip install nemo-gym==0.7.0" in line


def test_the_options_reach_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(launch, "launch", lambda instance, **options: called.append((instance, options)))
    words = ["--config", "gym.yaml", "--class", "app:Counter", "--control", "127.0.0.1:7001", "--root", "/ckpt"]
    words += ["--token-file", "token", "--service", "tools", "--mode", "exported", "--verify", "wait"]
    words += ["--hooks", "mine:Hooks", "--policy", "policy", "--policy", "other"]
    assert CliRunner().invoke(app, ["nemo-gym", "counter", *words]).exit_code == 0
    own: dict[str, Any] = {"control": "127.0.0.1:7001", "service": "tools", "mode": "exported", "verify": "wait"}
    own |= {"hooks": "mine:Hooks", "policy": ["policy", "other"]}
    place = {
        "config_file": Path("gym.yaml"),
        "server_class": "app:Counter",
        "root": "/ckpt",
        "token_file": Path("token"),
    }
    assert called == [("counter", {**place, **own})]


def test_nothing_is_passed_that_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the configuration's own options stand."""
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "launch", lambda instance, **options: called.append(options))
    assert CliRunner().invoke(app, ["nemo-gym", "counter"]).exit_code == 0
    assert set(called[0].values()) == {None}


def test_a_refusal_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise InvalidArgument("counter.num_workers is 4")

    monkeypatch.setattr(launch, "launch", refuse)
    ended = CliRunner().invoke(app, ["nemo-gym", "counter"])
    assert ended.exit_code == 2
    assert "Traceback" not in ended.output
