"""A running fleet for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.coordinator.fleet_of_nodes import Nodes


@pytest_asyncio.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    """One node of each kind."""
    fleet = await Nodes(tmp_path / "root").start()
    try:
        yield fleet
    finally:
        await fleet.stop()
