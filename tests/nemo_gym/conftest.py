"""What every test of the released framework shares: it stays on this host, and leaves no files in the framework."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

GUARD = Path(__file__).parent / "guard"

# Before any module of the framework is imported, by a test module or by a process that one starts.
runpy.run_path(str(GUARD / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(GUARD), *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(GUARD))]
)
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.dont_write_bytecode = True
# Without it the first call of the framework's client would parse this process's arguments as its own.
os.environ.setdefault("NEMO_GYM_CONFIG_DICT", "{}")
os.environ.pop("NEMO_GYM_CONFIG_PATH", None)


def pytest_configure(config: pytest.Config) -> None:
    """What the framework says about itself: rows that name their agent are deprecated, and are what it has most of."""
    config.addinivalue_line("filterwarnings", "ignore:.* rows routed via their baked-in agent_ref:DeprecationWarning")
