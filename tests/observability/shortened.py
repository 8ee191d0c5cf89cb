"""The rules of docs/observability, made quick enough to be provoked while somebody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DIRECTORY = Path(__file__).resolve().parents[2] / "docs" / "observability"
PREFIX = "GymCheckpoint"

THRESHOLDS = {
    "ClosedTooLong": ("> 300", "> 3"),
    "BlockerTooOld": ("age_seconds > 120", "age_seconds > 2"),
    "LoopLag": ("> 1000", "> 500"),
    "PauseTooLong": ("> 60000", "> 1"),
    "AdmissionRefused": ("> 100", "> 0"),
}
"""Alert -> what stands in its expression once, and what stands there instead."""
WINDOW = ("1h", "15s")
"""The long window of the recorded rules, and what stands for it."""


def rules() -> dict[str, Any]:
    """As they are."""
    found: dict[str, Any] = yaml.safe_load((DIRECTORY / "alerts.yaml").read_text())
    return found


def alerts() -> dict[str, dict[str, Any]]:
    """Every alert by its name without the prefix."""
    [group] = rules()["groups"]
    return {rule["alert"].removeprefix(PREFIX): rule for rule in group["rules"] if "alert" in rule}


def shortened() -> dict[str, Any]:
    """Every `for` is a second, and the thresholds and the window above are lower."""
    found = rules()
    for rule in found["groups"][0]["rules"]:
        name = rule.get("alert", "").removeprefix(PREFIX)
        rule["expr"] = rule["expr"].replace(f"[{WINDOW[0]}]", f"[{WINDOW[1]}]")
        rule["expr"] = rule["expr"].replace(f"offset {WINDOW[0]}", f"offset {WINDOW[1]}")
        if name:
            rule["for"] = "1s"
        if name in THRESHOLDS:
            old, new = THRESHOLDS[name]
            assert rule["expr"].count(old) == 1, name
            rule["expr"] = rule["expr"].replace(old, new)
    return found
