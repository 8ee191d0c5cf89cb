"""Programs of their own process: for what a process can do once, and for how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from textwrap import dedent

LIMIT = 30.0
"""Seconds for a program, far above what it takes on a busy machine."""


def clean_env(**more: str) -> dict[str, str]:
    """This environment without what switches telemetry on."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GYM_CKPT_", "OTEL_"))}
    return {**kept, **more}


def ran(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; fails unless it ended well."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=LIMIT, env=clean_env(**env)
    )
    assert done.returncode == 0, done.stderr
    return done
