"""docs/generation.md: every block of it is run, as real processes on loopback, in its order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.testing.pages import Shell, blocks_of, check_every_block_is_run

PAGE = "generation.md"
STORY = re.compile(r"^(.+): '(.+)', (\w+), (\d+) tokens reused$", re.MULTILINE)


def test_every_block_is_run() -> None:
    """No code of the page can grow old unseen."""
    check_every_block_is_run(PAGE)


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_the_page_runs(tmp_path: Path) -> None:
    """What was cut and killed ends as what was never cut, and the next turn builds upon the same tokens."""
    embedding = {name: text for _, name, text in blocks_of("embed.md")}["embedding.py"]
    with Shell(tmp_path, PAGE) as shell:
        shell.write("embedding.py", embedding)
        shell.run_page()
        output = shell.output
    said = {name: (text, reason, int(reused)) for name, text, reason, reused in STORY.findall(output)}
    assert list(said) == ["uncut", "uncut, next turn", "continued", "continued, next turn", "streamed"], output
    for name in ("continued", "streamed"):
        assert said[name][:2] == said["uncut"][:2]
        assert said[name][2] > 0
    assert said["continued, next turn"] == said["uncut, next turn"]
    assert "{'held': 2, 'cut': 2, 'cut_failed': 0, 'cut_skipped': 0}" in output
    assert "continues: task-1-a1 task-2-a1" in output
    assert re.search(r"^1 text 0 \+ \d+ task-1-a1/\w+\n2 token_in \d+ \+ \d+ task-1-a1/\w+$", output, re.MULTILINE)
    assert "removed 5, kept 2, named 2" in output
