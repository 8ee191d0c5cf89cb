"""A fleet of four participants on loopback, as the coordinator's own tests have it; and a root with checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.coordinator.fleet_of_nodes import Nodes
from tests.storage.damaged import make_root


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root that `make_root` has made; tests work on copies of it."""
    return Path(make_root(tmp_path_factory.mktemp("pristine") / "root").path)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    fleet = await Nodes(tmp_path / "root").start()
    yield fleet
    await fleet.stop()
