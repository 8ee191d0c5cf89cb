"""docs/errors.md is what the error table says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import ERRORS, ErrorCode

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("errors_page", REPOSITORY / "tools" / "errors_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.behaviour("C37")
def test_the_page_is_current(tool: Any) -> None:
    """One row per code, made from the row of the table that server and client read."""
    assert tool.main(["--check"]) == 0
    text = tool.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (yes|no) \| `(\w+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == [code.name for code in ErrorCode if code is not ErrorCode.UNSPECIFIED]
    for name, status, http, again, exception, when, recovery in rows:
        row = ERRORS[ErrorCode[name]]
        assert (status, int(http), again == "yes") == (row.grpc_status, row.http_status, row.retryable)
        assert (exception, recovery) == (row.exception.__name__, row.recovery)
        assert len(when) > 10
        assert "ecovery" not in when


def test_a_stale_page_is_noticed(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--check` fails for a page that is missing or changed, and writing mends it."""
    monkeypatch.setattr(tool, "PAGE", tmp_path / "errors.md")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    tool.PAGE.write_text("changed")
    assert tool.main(["--check"]) == 1


def test_a_code_of_one_side_only_is_an_error(tool: Any) -> None:
    """A code without a comment in the proto cannot be on the page."""
    proto = tool.PROTO.read_text(encoding="utf-8").replace("ERROR_CODE_LEASE_LOST", "ERROR_CODE_LEASE_GONE")
    with pytest.raises(tool.PageError, match="LEASE_GONE, LEASE_LOST"):
        tool.page(proto)
