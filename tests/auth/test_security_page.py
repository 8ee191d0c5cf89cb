"""`docs/security.md`: each command runs, in the page's order, with the page's own programs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.ports import free_ports
from tests.cli.test_operating_page import PART, Terminal

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the page's commands need openssl"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
PROGRAM = re.compile(r"^```python (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SILENT = re.compile(r"(?<!-->\n)^```sh\n(?P<command>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def steps(text: str) -> list[re.Match[str]]:
    """Every command of the page, in its order."""
    found = sorted([*PART.finditer(text), *SILENT.finditer(text)], key=lambda match: match.start())
    assert len(found) == text.count("```sh")
    return found


@pytest.mark.behaviour("C312", "C316", "C317")
def test_the_page_runs(tmp_path: Path, terminal: Terminal) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for port, free in zip(("7001", "7002"), free_ports(2), strict=True):
        text = text.replace(port, str(free))
    for name, program in PROGRAM.findall(text):
        (tmp_path / name).write_text(program)
    for step in steps(text):
        parts = step.groupdict()
        command = parts["command"]
        if parts.get("stays"):
            terminal.stay(command.strip())
            continue
        status, output = terminal.run(command)
        shown = " ".join(output.split())
        assert (status != 0) is bool(parts.get("fails")), f"{command}\n{output}"
        assert (parts.get("text") or "") in shown, f"{command}\n{output}"
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600
