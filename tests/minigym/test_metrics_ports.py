"""Each server of a deployment shows its metrics on a port of its own, under one variable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.metrics_ports import MetricsPorts
from gym_ckpt_grpc.telemetry.configuring import VARIABLE


def test_servers_have_the_ports_after_the_first_and_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "otlp, prometheus:9464")
    ports = MetricsPorts(tmp_path)
    assert ports.env("agent") == {VARIABLE: "otlp,prometheus:127.0.0.1:9465"}
    assert ports.env("counter") == {VARIABLE: "otlp,prometheus:127.0.0.1:9466"}
    assert ports.env("agent") == {VARIABLE: "otlp,prometheus:127.0.0.1:9465"}, "the same in every life"
    assert json.loads(ports.file.read_text()) == [
        {"targets": ["127.0.0.1:9465"], "labels": {"server": "agent"}},
        {"targets": ["127.0.0.1:9466"], "labels": {"server": "counter"}},
    ]


def test_port_0_is_a_free_one_for_each_and_the_host_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "prometheus:localhost:0")
    ports = MetricsPorts(tmp_path)
    found = [ports.env(name)[VARIABLE] for name in ("a", "b")]
    assert len(set(found)) == 2
    assert all(word.startswith("prometheus:localhost:") and not word.endswith(":0") for word in found)


@pytest.mark.parametrize("text", ["", "otlp", "console,otlp:http://127.0.0.1:4317", "prometheus"])
def test_nothing_is_changed_where_no_port_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    ports = MetricsPorts(tmp_path)
    assert ports.env("agent") == {}
    assert not ports.file.exists()


def test_what_is_no_port_is_left_to_the_server_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digit that is no number stops no deployment."""
    monkeypatch.setenv(VARIABLE, "prometheus:9464\u00b2")
    assert MetricsPorts(tmp_path).env("a") == {VARIABLE: "prometheus:127.0.0.1:9464\u00b2"}
