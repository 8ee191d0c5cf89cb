"""An authority and certificates, as files in the test's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.authority import LOCAL_NAMES, Authority
from tests.auth.secured import Pki


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    """One authority with a server's, a controller's, an observer's and a stranger's certificate."""
    authority = Authority(tmp_path / "pki")
    authority.issue("server", LOCAL_NAMES)
    for name in ("controller", "observer", "peer", "stranger"):
        authority.issue(name, [f"URI:spiffe://gym.example/{name}"])
    return Pki(authority)
