"""A fleet of four participants on loopback, as the coordinator's own tests have it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.coordinator.fleet_of_nodes import Nodes


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    fleet = await Nodes(tmp_path / "root").start()
    yield fleet
    await fleet.stop()
