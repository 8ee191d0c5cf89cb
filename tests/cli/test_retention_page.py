"""docs/retention.md: every block of it is run, in its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.storage import CheckpointRoot
from tests.testing.pages import Shell, check_every_block_is_run

PAGE = "retention.md"


def test_every_block_is_run() -> None:
    check_every_block_is_run(PAGE)


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_the_page_runs(tmp_path: Path) -> None:
    """What the text says stays does."""
    with Shell(tmp_path, PAGE) as shell:
        shell.run_page()
        output = shell.output
    lines = [line for line in output.splitlines() if line.startswith("ck-") and " removed [" in line]
    assert lines == [
        "ck-1 removed []",
        "ck-2 removed []",
        "ck-3 removed ['ck-1']",
        "ck-4 removed ['ck-2']",
        "ck-5 removed []",
        "ck-6 removed []",
        "ck-7 removed ['ck-5']",
    ]
    root = CheckpointRoot(str(tmp_path / "ckpt"))
    # --keep-within 6h keeps all that this test has made; the last command keeps one and what is held.
    assert [entry.publication.checkpoint_id for entry in root.published()] == ["ck-7", "ck-3"]
    assert "trainer-step-300" in output
