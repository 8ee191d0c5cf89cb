"""`gym-ckpt timeline`: how the taking of a checkpoint went, for people and for programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_ckpt_grpc.cli import root_commands  # noqa: F401 - it registers its commands
from gym_ckpt_grpc.cli.app import app
from gym_ckpt_grpc.cli.timeline import WIDTH, bar
from gym_ckpt_grpc.storage import CheckpointRoot
from gym_ckpt_grpc.storage.event_log import EventLog, LoggedStep, write_event_log
from tests.storage.damaged import EVIL, unsynced

__all__ = ["unsynced"]
pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "root")
    return tmp_path / "root"


def step(participant: str, name: str, start: float, end: float, **more: Any) -> LoggedStep:
    return LoggedStep(participant=participant, step=name, start=start, end=end, **more)


STEPS = [
    step("agent/a/0", "Prepare", 0.0, 0.25, outcome="not_ready"),
    step("agent/a/0", "Prepare", 0.3, 0.4),
    step("agent/a/0", "Commit", 0.5, 1.0, tries=3, records=7, bytes=4096),
    step("resources/r/0", "Resume", 0.9, 1.0, outcome="WORKER_UNAVAILABLE"),
]
MOMENTS = {"prepared": 0.4, "durable": 0.8, "published": 0.85, "released": 1.0}


def keep(root: Path, steps: list[LoggedStep] = STEPS, **fields: Any) -> Path:
    opened = CheckpointRoot(str(root))
    facts = {"began": 1_700_000_000.5, "moments": MOMENTS, **fields}
    write_event_log(opened.files, opened.location("two"), EventLog(checkpoint_id="two", steps=steps, **facts))
    return Path(opened.location("two").events)


def run(root: Path, *arguments: str, exits: int = 0) -> str:
    result = CliRunner().invoke(app, ["timeline", "--root", str(root), *arguments])
    assert result.exit_code == exits, result.output
    return result.stdout


def test_a_bar_per_participant_and_step(root: Path) -> None:
    keep(root)
    text = run(root)
    assert "two  published as number 3" in text
    assert "began 2023-11-14T22:13:20.500+00:00, prepared after 0.400 s, durable after 0.800 s" in text
    assert "pause of 1.000 s: 0.400 s until every participant was at its cut, 0.600 s beyond it" in text
    rows = [line for line in text.splitlines() if "━" in line and "│" in line]
    assert len(rows) == len(STEPS)
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells[2][:2] + cells[2][3:] == ["agent/a/0", "Commit", "0.500", "0.500", "7", "4.0 KiB", "ok (3 tries)"]
    assert cells[2][2].count("━") == WIDTH // 2
    assert [row[-1] for row in cells] == ["not_ready", "ok", "ok (3 tries)", "WORKER_UNAVAILABLE"]


def test_for_programs(root: Path) -> None:
    keep(root)
    told = json.loads(run(root, "two", "--json"))
    assert (told["checkpoint_id"], told["sequence_number"], told["event_log"]) == ("two", 3, True)
    assert (told["began"], told["moments"], told["problems"]) == (1_700_000_000.5, MOMENTS, [])
    assert told["steps"][2] == {
        "participant": "agent/a/0",
        "step": "Commit",
        "start": 0.5,
        "end": 1.0,
        "outcome": "ok",
        "tries": 3,
        "records": 7,
        "bytes": 4096,
    }


def test_a_checkpoint_without_a_log_tells_what_its_manifest_does(root: Path) -> None:
    """Those of earlier versions have none: said, and no failure."""
    text = run(root, "one")
    assert "no event log" in text
    assert "records" in text
    told = json.loads(run(root, "one", "--json"))
    assert (told["event_log"], told["steps"], told["began"]) == (False, [], None)
    assert {member["records"] for member in told["members"]} != {None}


def test_a_damaged_log_is_said_and_what_can_be_read_is_shown(root: Path) -> None:
    path = keep(root)
    head, first, *rest = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([head, first[:-9], *rest]))
    text = run(root, exits=1)
    assert text.count("agent/a/0") == 2
    assert "1 of its steps cannot be read" in text
    path.write_bytes(b"junk")
    text = run(root, exits=1)
    assert "problem: " in text
    assert "no event log" not in text
    assert json.loads(run(root, "--json", exits=1))["problems"][0]["file"] == "checkpoints/two/events.jsonl"


def test_people_are_shown_the_slowest_and_whoever_failed(root: Path) -> None:
    many = [step(f"agent/a/{at}", "Commit", 0.0, at / 1000) for at in range(1, 1000)]
    many.append(step("agent/b/0", "Commit", 0.0, 0.0, outcome="EXPORT_FAILED"))
    keep(root, many)
    text = run(root)
    assert "agent/a/999 " in text
    assert "EXPORT_FAILED" in text
    assert "agent/a/5 " not in text
    assert "and 980 more that ended sooner; --json has all" in text
    assert len(json.loads(run(root, "--json"))["steps"]) == 1000


def test_nothing_in_a_log_commands_the_terminal(root: Path) -> None:
    keep(root, [step(EVIL, EVIL, 0.0, 1.0, outcome=EVIL), step("[red]x[/]", "Commit", 5.0, 1.0)], began=1e300)
    text = run(root)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]x[/]" in text
    assert "at an unknown time" in text
    assert "\x1b" not in run(root, "--json")


@pytest.mark.parametrize(
    ("start", "end", "span", "drawn"),
    [
        (0.0, 1.0, 1.0, "━" * WIDTH),
        (0.0, 0.0, 1.0, "━" + " " * (WIDTH - 1)),
        (1.0, 1.0, 1.0, " " * (WIDTH - 1) + "━"),
        (0.5, 1.0, 1.0, " " * (WIDTH // 2) + "━" * (WIDTH // 2)),
        (0.0, 1e308, 1.7e308, "━" * 24 + " " * 16),
        (2.0, 1.0, 2.0, "?"),
        (0.0, 0.0, 0.0, "?"),
    ],
)
def test_bars(start: float, end: float, span: float, drawn: str) -> None:
    assert bar(start, end, span) == drawn


def test_moments_stand_in_the_order_in_which_they_came(root: Path) -> None:
    """Where nobody releases before the end, that is the last of them."""
    keep(root, moments={**MOMENTS, "released": 0.9})
    assert "prepared after 0.400 s, durable after 0.800 s, published after 0.850 s, released after 0.900 s" in run(
        root, "two"
    )
