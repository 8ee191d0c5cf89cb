"""The alert rules by Prometheus' own tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.observability.shortened import DIRECTORY, alerts, rules, shortened

pytestmark = pytest.mark.timeout(180)


def promtool(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=directory, capture_output=True, text=True, timeout=170)


def test_the_rules_are_rules() -> None:
    done = promtool("check", "rules", "alerts.yaml", directory=DIRECTORY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_where_it_should_and_is_silent_where_it_should_be() -> None:
    done = promtool("test", "rules", "alerts_test.yaml", directory=DIRECTORY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_tests_miss_each_alert_that_never_fires(tmp_path: Path) -> None:
    (tmp_path / "alerts_test.yaml").write_text((DIRECTORY / "alerts_test.yaml").read_text())
    changed = rules()
    for rule in changed["groups"][0]["rules"]:
        if "alert" in rule:
            rule["expr"] = "vector(1) == 0"
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(changed))
    done = promtool("test", "rules", "alerts_test.yaml", directory=tmp_path)
    assert done.returncode != 0
    for name in alerts():
        assert f'exp: {{alertname="GymCheckpoint{name}"}}' in done.stdout + done.stderr


def test_the_shortened_rules_are_rules_too(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(shortened()))
    done = promtool("check", "rules", "alerts.yaml", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
