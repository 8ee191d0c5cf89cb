"""The alert rules, the dashboard and the page say what the catalogue says, and stand together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import INSTRUMENTS, Instrument, Kind
from tools.telemetry_page import PAGE, page

DOCS = Path(__file__).resolve().parents[2] / "docs"
RULES: dict[str, Any] = yaml.safe_load((DOCS / "observability" / "alerts.yaml").read_text())
TESTS: dict[str, Any] = yaml.safe_load((DOCS / "observability" / "alerts_test.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DOCS / "observability" / "dashboard.json").read_text())

ALERTS = {rule["alert"]: rule for rule in RULES["groups"][0]["rules"] if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES["groups"][0]["rules"] if "record" in rule}
PROMETHEUS_LABELS = {"job", "instance", "le"}


def series(instrument: Instrument) -> set[str]:
    """The names of an instrument's series."""
    suffixes = ("_bucket", "_count", "_sum") if instrument.kind is Kind.HISTOGRAM else ("",)
    return {instrument.prometheus + suffix for suffix in suffixes}


SERIES = {name: instrument for instrument in INSTRUMENTS for name in series(instrument)}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    rules = [rule["expr"] for rule in RULES["groups"][0]["rules"]]
    return rules + [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_page_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert page(written) == written


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    headings = re.findall("^### (GymCheckpoint[A-Za-z]+)$", (DOCS / "telemetry.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS)
    for name, rule in ALERTS.items():
        assert "for" in rule, name
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert rule["annotations"]["summary"], name
        assert rule["annotations"]["runbook"] == f"docs/telemetry.md#{name.lower()}", name


def test_every_alert_has_a_test_that_it_fires_and_one_that_it_is_silent() -> None:
    names = [test["name"] for test in TESTS["tests"]]
    for alert in ALERTS:
        assert any(name.startswith(f"{alert} fires: ") for name in names), alert
        assert any(name.startswith(f"{alert} is silent: ") for name in names), alert


def test_every_name_in_rules_and_dashboard_is_one_of_the_catalogue() -> None:
    for expression in expressions():
        named = set(re.findall(r"\b(?:gym_checkpoint_|rpc_(?:server|client)_)\w+(?=[{\[\s)]|$)", expression))
        assert named <= SERIES.keys(), expression
        assert set(re.findall(r"\bgym_checkpoint:[\w:]+", expression)) <= RECORDED, expression


def test_every_label_is_one_that_the_instruments_of_its_expression_have() -> None:
    names = {attribute.name.replace(".", "_"): attribute.name for attribute in at.ATTRIBUTES.values()}
    for expression in expressions():
        instruments = [SERIES[name] for name in SERIES if re.search(rf"\b{name}\b", expression)]
        if not instruments:
            continue  # of a recorded rule, whose own expression is looked at
        allowed = {name for instrument in instruments for name in instrument.attributes}
        for label in re.findall(r"\b(?:nemo_gym_checkpoint|rpc)_\w+\b", expression):
            if label not in SERIES:
                assert names[label] in allowed, (label, expression)


def test_every_instrument_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    assert [i.name for i in INSTRUMENTS if not any(name in shown for name in series(i))] == []


def test_panels_have_a_title_a_text_and_a_place_of_their_own() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(places)) == len(places)
    assert all(panel["title"] and panel["description"] for panel in panels())
