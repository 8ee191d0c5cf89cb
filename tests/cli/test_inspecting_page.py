"""`docs/inspecting.md`: each command runs, in the page's order, on the deployment that the page starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_operating_page import PART, Terminal, run_page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inspecting.md"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def test_every_documented_command(terminal: Terminal) -> None:
    """Each prints what the page says."""
    assert sum(1 for _ in run_page(terminal, PAGE.read_text(encoding="utf-8"))) > 0


def test_the_page_shows_every_command() -> None:
    page = PAGE.read_text(encoding="utf-8")
    commands = "".join(part["command"] or "" for part in PART.finditer(page))
    table = set(re.findall(r"^\| `gym-ckpt (\w+)` \|", page, re.MULTILINE))
    assert table == {"ls", "show", "timeline", "episode", "verify", "diff", "salvage"}
    for name in table:
        assert f"gym-ckpt {name} " in commands, name
