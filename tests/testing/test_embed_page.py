"""docs/embed.md: every block of it is run, as real processes on loopback, in the order in which it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.pages import REPOSITORY, Shell, blocks_of, check_every_block_is_run

PAGE = "embed.md"


def test_every_block_is_run() -> None:
    """No code of the page can grow old unseen."""
    check_every_block_is_run(PAGE)


def test_the_first_server_is_the_example() -> None:
    """One source: the page has examples/embed_resources.py, whose own part is about 30 lines."""
    shown = {name: text for _, name, text in blocks_of(PAGE)}["embed_resources.py"]
    assert shown == (REPOSITORY / "examples" / "embed_resources.py").read_text(encoding="utf-8")
    code = [line for line in shown.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))]
    assert len(code) <= 35


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_page_runs(tmp_path: Path) -> None:
    """What was killed goes on: a count from three, a rollout through all four servers, a legacy run, an MCP session."""
    with Shell(tmp_path, PAGE) as shell:
        shell.run_page()
        output = shell.output
    for expected in (
        "{'count': 3}",
        "{'count': 4}",
        "{'reward': 4}",
        "continues: task-7",
        "continues: task-8",
        "continues: task-9",
        "continue: 0 start over: task-10",
        "{'structuredContent': {'count': 4}}",
        "on {'of': 'task-11', 'reward': 1.0}",
        "off {'of': 'task-11', 'reward': 1.0}",
    ):
        assert expected in output, f"{expected}\n{output}"
    assert output.count("{'reward': 20, 'turns': 20}") == 2
