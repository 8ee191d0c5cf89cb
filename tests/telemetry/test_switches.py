"""Which groups of spans are on."""

from __future__ import annotations

import logging

import pytest

from gym_ckpt_grpc.telemetry import Switches
from gym_ckpt_grpc.telemetry.switches import VARIABLE


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("", False),
        ("none", False),
        ("default", False),
        ("all", True),
        ("checkpoint", True),
        ("default,checkpoint", True),
        (" Default , CHECKPOINT ,,", True),
        ("none,checkpoint", True),
        (",", False),
    ],
)
def test_groups_and_presets(text: str, on: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A comma list, in any case; the group of checkpoints is opt-in."""
    assert Switches(text).checkpoint is on
    assert caplog.text == ""


def test_unknown_words(caplog: pytest.LogCaptureFixture) -> None:
    """They are named, shortened, and left out; the rest counts."""
    caplog.set_level(logging.WARNING)
    assert Switches("chekpoint," + "x" * 1000 + ",checkpoint").checkpoint
    assert [record.args[1] for record in caplog.records] == ["chekpoint", "x" * 40]  # type: ignore[index]
    assert "known: none, default, all, checkpoint" in caplog.text


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides where nothing else does."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not Switches().checkpoint
    monkeypatch.setenv(VARIABLE, "default,checkpoint")
    assert Switches().checkpoint
    assert not Switches("default").checkpoint
