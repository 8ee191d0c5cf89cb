"""What the README promises is what other tests run."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def test_the_commands_for_generic_tools_are_those_of_the_debugging_page() -> None:
    """That page's commands are each run against a living server."""
    shown = BLOCK.findall((REPOSITORY / "README.md").read_text())
    tested = BLOCK.findall((REPOSITORY / "docs" / "debugging.md").read_text())
    assert len(shown) >= 3
    assert [block for block in shown if block not in tested] == []


def test_every_local_link_leads_somewhere() -> None:
    """Of the README and of the pages under docs, apart from the behaviour lists."""
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
